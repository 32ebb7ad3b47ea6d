"""The target's state machine for one request: it owns the prefix, decides what is computed next, issues every verdict.

Events in (`handle`), commands out.  All methods - ar, sd, pearl and its ablations - are settings of this one machine
(`window.METHODS`); what differs between acceptance rules, models and transports is behind the commands.

The shape: a forward feeds unfed tokens and yields a row for the position after each; then `_decide` asks, again and
again, what the rows at hand allow.  A row and a draft token: judge.  A row for which no draft token will come: draw
from it.  A row whose token is still on its way: hold it.  No row: feed what is unfed, once the window is full enough.

A request that looks ahead has guesses, made without a model, fed beside and behind what is unfed, as a tree: where the
text turns out to follow them, its rows are there already.  Where the rule commits the target's own draw whatever was
proposed, no row is held either: it is drawn from at once, and the draft, told of the token, catches up.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar

from pearl.errors import RemoteProtocolError
from pearl.protocol.events import (
    Cause,
    DraftGone,
    DraftJoined,
    End,
    Failed,
    Forward,
    Forwarded,
    Guess,
    Guessed,
    Judge,
    Judged,
    Keep,
    Odds,
    Open,
    Phase,
    Rollback,
    Sample,
    Sampled,
    Send,
    Stalled,
    Wait,
)
from pearl.protocol.fed import Fed
from pearl.protocol.intake import Taken, take
from pearl.protocol.machine import Do, Machine, Table
from pearl.protocol.messages import (
    Cancel,
    DraftTokens,
    Finish,
    FinishReason,
    Provenance,
    Resync,
    Submit,
)
from pearl.protocol.request import RequestState
from pearl.protocol.resting import Resting
from pearl.protocol.sequence import TokenSequence
from pearl.protocol.telling import announce, begin_draft, deliver_committed, preview
from pearl.protocol.window import Speeds, worthwhile

# Tokens of a long prompt fed at once, up to a multiple of it: messages are looked at between two chunks. Where other
# requests are worked on too it is fed in smaller ones, for each of their tokens then waits for one.
PREFILL_CHUNK, SHARED_CHUNK = 512, 64
_NONE = Guessed()


class State(Enum):
    IDLE = "idle"
    PREFILL = "prefill"
    PRE_VERIFY = "pre-verify"
    POST_VERIFY = "post-verify"
    JUDGING = "judging"
    SAMPLING = "sampling"
    HELD = "held"
    GATHERING = "gathering"
    GUESSING = "guessing"


_RUNNING = {
    Phase.PREFILL: State.PREFILL,
    Phase.PRE_VERIFY: State.PRE_VERIFY,
    Phase.POST_VERIFY: State.POST_VERIFY,
}
_FED = frozenset({State.JUDGING, State.SAMPLING, State.HELD, State.IDLE})
_OF_BLOCKS = frozenset({State.GATHERING, State.POST_VERIFY})  # no row is held for one token alone
_ENDED = frozenset({State.IDLE})
_DECIDED = frozenset({State.PRE_VERIFY, State.GATHERING, State.GUESSING, State.IDLE})

# state -> event -> the states that may follow. What is not listed is illegal. The README's diagram is drawn from this.
TRANSITIONS: dict[State, dict[type, frozenset[State]]] = {
    State.IDLE: {Submit: frozenset({State.PREFILL})},
    State.PREFILL: {Forwarded: _FED | _OF_BLOCKS | {State.PREFILL}, Failed: _ENDED},
    State.PRE_VERIFY: {Forwarded: _FED | _OF_BLOCKS, Failed: _ENDED},
    State.POST_VERIFY: {Forwarded: _FED | _OF_BLOCKS, Failed: _ENDED},
    State.JUDGING: {
        Judged: _DECIDED | {State.POST_VERIFY, State.JUDGING, State.SAMPLING, State.HELD},
        Failed: _ENDED,
    },
    State.SAMPLING: {Sampled: _DECIDED | {State.POST_VERIFY}, Failed: _ENDED},
    State.HELD: {
        DraftTokens: frozenset({State.JUDGING}),
        DraftGone: frozenset({State.SAMPLING}),
        Stalled: frozenset({State.HELD}),
        Cancel: _ENDED,
    },
    State.GATHERING: {
        DraftTokens: frozenset({State.PRE_VERIFY, State.POST_VERIFY, State.GUESSING}),
        DraftGone: frozenset({State.PRE_VERIFY, State.GUESSING}),
        Stalled: frozenset({State.GATHERING}),
        Cancel: _ENDED,
    },
    State.GUESSING: {Guessed: _ENDED | {State.PRE_VERIFY, State.POST_VERIFY}, Failed: _ENDED},
}
# Legal in every state, and by themselves they change none: the world outside does not wait for our forwards.
ANYTIME = (Submit, Cancel, DraftTokens, DraftGone, DraftJoined, Resync)
# What is being computed stands: what would discard the tokens that it is about waits until it is out.
_AFTER_COMPUTING = (DraftGone, DraftJoined)
_COMPUTING = {State.JUDGING: (Judged, Failed), State.GUESSING: (Guessed, Failed)}


class RequestMachine(Machine):
    """The target's machine for one request, in slot `slot`.

    Args:
        sequence: the slot's, with the text whose cache the request may begin with.
        speeds: the target's estimates, which this machine adds to.
        draft_context: tokens that the draft's model holds; 0: no draft.
        window: c as last used.
        running: the machines of all requests that are worked on, this one among them.
    """

    role: ClassVar[str] = "target"
    transitions: ClassVar[Table[Any]] = TRANSITIONS
    anytime: ClassVar[tuple[type, ...]] = ANYTIME

    def __init__(
        self,
        submit: Submit,
        sequence: TokenSequence,
        slot: int,
        speeds: Speeds,
        draft_context: int,
        window: int,
        running: Mapping[int, RequestMachine],
    ) -> None:
        super().__init__()
        self.state = State.IDLE
        options = submit.options
        rule, is_greedy = options.rule_spec, options.sampling.temperature == 0
        block = 1 if is_greedy else rule.block(options.parameters)
        self.request = RequestState(submit, sequence, draft_context=draft_context, window=window, block=block)
        self.submit, self.sequence = submit, sequence
        self.proposals, self.counts = self.request.proposals, self.request.counts
        self.slot, self.speeds = slot, speeds
        is_direct = rule.is_proposal_invariant or is_greedy
        self.request.keeps_window = self.request.method.bonus and not is_direct
        self._runs_ahead = self.request.looks_ahead and (is_direct or not self.request.method.drafts)
        self._running = running
        adapts = self.request.method.adapts and self._runs_ahead
        self.resting = Resting(self.request, speeds, adapts, running)
        self._deferred: list[object] = []

    def handle(self, event: object) -> list[object]:
        """See `Machine.handle`. What would discard tokens that something is being computed about waits for it."""
        computing = _COMPUTING.get(self.state, ())
        if computing and type(event) in _AFTER_COMPUTING:
            self._deferred.append(event)
            return []
        commands = super().handle(event)
        if type(event) in computing:
            deferred, self._deferred = self._deferred, []
            for late in deferred:
                commands += self.handle(late)
        return commands

    @property
    def epoch(self) -> int:  # type: ignore[override]
        return self.request.epoch

    @property
    def number(self) -> int:
        return self.submit.request

    @property
    def has_ended(self) -> bool:
        return self.state is State.IDLE

    # ---- events ----

    def _submit(self, submit: Submit, do: Do) -> None:
        seq = self.sequence
        seq.restart(submit.prompt)
        self.counts.cached = seq.fed
        self.request.told_front = seq.committed
        do(Open(submit.prompt, submit.options, self.slot, request=submit.request))
        self.request.told_guesser = len(submit.prompt)
        self.resting.begin(do)
        begin_draft(self.request, self.speeds, do)
        self._forward(Phase.PREFILL, do)

    def _cancel(self, _: Cancel, do: Do) -> None:
        self.request.ending = FinishReason.CANCELLED
        if self.state in (State.HELD, State.GATHERING):
            self._decide(do)

    def _forwarded(self, event: Forwarded, do: Do) -> None:
        if self.state is not State.PREFILL:  # a prompt's forward says nothing about a window's
            if event.beside is not None:
                self.request.beside = event.beside
                self.speeds.observe_target(self.request.in_flight + event.beside, event.seconds)
            self.resting.stepped(event.at, do)
        if self.state is State.PREFILL and self.sequence.fed < self.sequence.committed and not self.request.ending:
            self._forward(Phase.PREFILL, do)
        else:
            self._decide(do)

    def _failed(self, _: Failed, do: Do) -> None:
        self.request.ending = FinishReason.CANCELLED
        self.sequence.fed = 0  # what the cache holds may be what the model choked on
        self._finish(do)

    def _judged(self, event: Judged, do: Do) -> None:
        judged = event.accepted + (event.token is not None)
        self.speeds.observe_judgement(event.accepted, judged)
        if event.odds is not None:
            self.counts.odds = event.odds + (self.counts.odds or Odds())
            self.counts.rejected += event.token is not None and not event.is_candidate
        for i in range(event.accepted):
            self.request.commit(None, Provenance.ACCEPTED, event.stop_after == i + 1)
        if event.token is not None:
            provenance = Provenance.ACCEPTED if event.is_candidate else Provenance.CORRECTED
            self.request.commit(event.token, provenance, event.stop_after == judged)
        self._decide(do)

    def _sampled(self, event: Sampled, do: Do) -> None:
        stops = [event.stop_after == count for count in range(1, len(event.tokens) + 1)]
        if self.request.looks_ahead:
            self._run_ahead(event.tokens, stops)
        else:
            bonus = self.request.method.bonus and self.request.is_drafting and not self.request.is_fresh
            self.request.commit(event.tokens[0], Provenance.BONUS if bonus else Provenance.DIRECT, stops[0])
        self._decide(do)

    def _run_ahead(self, tokens: tuple[int, ...], stops: list[bool]) -> None:
        """Commits the target's draws, whether or not the draft's tokens for these positions are there yet."""
        agreed = undrafted = 0
        is_wrong = False
        guessers = self.request.fed.guessers(self.sequence.committed, tokens)
        for token, stop, guesser in zip(tokens, stops, guessers, strict=True):
            if self.request.ending:
                break
            pending = self.sequence.first_pending
            is_node = agreed + undrafted + is_wrong + 1 < len(tokens)
            if pending is None:
                undrafted += 1
                self.request.commit(token, Provenance.GUESSED if is_node else Provenance.DIRECT, stop)
            elif pending == token:
                agreed += 1
                self.request.commit(None, Provenance.ACCEPTED, stop)
            else:
                is_wrong = True
                self.counts.judged += is_node
                self.request.commit(token, Provenance.GUESSED if is_node else Provenance.CORRECTED, stop)
            if guesser is not None and pending != token:
                self.counts.guessed[guesser] = self.counts.guessed.get(guesser, 0) + 1
        self.speeds.observe_judgement(agreed, agreed + is_wrong)
        # One token further than its draft the target still is in step with it, if the draft has been right so far.
        self.request.is_fresh = is_wrong or not agreed or undrafted > 1

    def _guessed(self, event: Guessed, do: Do) -> None:
        self.resting.retraced(event.alone)
        if self.request.ending:
            self._finish(do)
        elif len(self.sequence.tokens) == self.request.told_guesser:
            self._forward(Phase.PRE_VERIFY, do, event)
        else:  # the text that they were to follow is another now
            self._forward(Phase.PRE_VERIFY, do)

    def _draft_tokens(self, message: DraftTokens, do: Do) -> None:
        match take(self.request, self.speeds, message, self._runs_ahead):
            case Taken.PENDING:
                preview(self.request, do)
                if self.state in (State.HELD, State.GATHERING):
                    self._decide(do)
            case Taken.COMPARED if self.state is State.GATHERING:
                self._decide(do)
            case Taken.GAP if self.state in _COMPUTING:
                self._deferred.append(message)
            case Taken.GAP:
                self._resynchronise(do)

    def _draft_joined(self, event: DraftJoined, do: Do) -> None:
        self.request.draft_context = event.context
        if not self.request.ending:
            self._resynchronise(do)

    def _draft_gone(self, event: DraftGone, do: Do) -> None:
        if event.request is None:
            self.request.draft_context = 0
        elif self.request.is_undraftable:
            return
        else:
            self.request.is_undraftable = True
            if self.request.told_draft:
                do(Send(Finish(self.number)))  # it may have been given the prefix again meanwhile
        self.request.told_draft = 0
        self.request.discard_pending()
        if self.state in (State.HELD, State.GATHERING):
            self._decide(do)

    def _stalled(self, _: Stalled, do: Do) -> None:
        self._resynchronise(do)

    def _resync(self, message: Resync, do: Do) -> None:
        if message.epoch < self.epoch or self.request.ending or self.request.is_resting:
            self.counts.stale += 1
            return
        if message.epoch > self.epoch:
            raise RemoteProtocolError(f"draft asks to resynchronise epoch {message.epoch}; it is epoch {self.epoch}")
        if self.state in _COMPUTING:
            self._deferred.append(message)
        else:
            self._resynchronise(do)

    # ---- what to do next ----

    def _decide(self, do: Do) -> None:
        """Called whenever nothing is being computed: the one place where the next step is chosen."""
        seq = self.sequence
        if self.request.ending:
            self._finish(do)
            return
        fed = self.request.fed
        if self.request.looks_ahead:
            fed.follow(seq)
        if seq.fed >= seq.committed:  # there is a row for the position after the prefix
            run = self._judged_next
            if run:
                self.state = State.JUDGING
                tokens, nodes = tuple(seq.pending[:run]), fed.nodes(seq.committed, run)
                do(Judge(seq.committed, tokens, self.proposals.rows(run), nodes, request=self.number))
            elif self._runs_ahead or self._row_is_direct:
                self.state = State.SAMPLING
                (node,) = fed.nodes(seq.committed, 1)
                do(Sample(seq.committed, node, self.request.looks_ahead, request=self.number))
            elif self.request.block == 1:
                announce(self.request, self.speeds, do)
                self.state = State.HELD
                do(Wait(Cause.HELD_ROW, request=self.number))
            else:
                seq.fed = seq.committed - 1  # the row comes again with those of a block
            if seq.fed >= seq.committed:
                return
        announce(self.request, self.speeds, do)
        if len(seq.unfed) >= self.request.needed:
            if self.request.looks_ahead:
                self._guess(do)
            else:
                self._forward(Phase.PRE_VERIFY, do)
        else:
            self.state = State.GATHERING
            do(Wait(Cause.WINDOW, request=self.number))

    @property
    def _judged_next(self) -> int:
        """How many pending tokens are to be judged with the rows at hand."""
        run = 0 if self._runs_ahead else min(len(self.sequence.pending), self._judgeable)
        if self.request.block == 1 or not run:
            return run
        return self.request.next_block if run >= self.request.next_block else 0

    @property
    def _judgeable(self) -> int:
        """Positions after the prefix whose row is to be judged: all there are, but for a bonus row.

        That one is drawn from even where a draft token has come for it: which it is must not depend on timing.
        """
        rows = self.sequence.fed + 1 - self.sequence.committed
        return rows - 1 if self.request.method.bonus and (rows > 1 or not self.request.is_fresh) else rows

    @property
    def _row_is_direct(self) -> bool:
        return not self.request.is_drafting or (self.request.method.bonus and not self.request.is_fresh)

    def _guess(self, do: Do) -> None:
        seq, told = self.sequence, self.request.told_guesser
        self.state = State.GUESSING
        acceptance, most = self.speeds.acceptance if self.request.is_drafting else 1.0, self.request.options.look_ahead
        new, limit = tuple(seq.tokens[told:]), self.submit.limit - 1  # the token before the limit is not fed
        do(Guess(told, new, seq.committed, limit, acceptance, most, request=self.number))
        self.request.told_guesser = len(seq.tokens)

    def _settle(self, do: Do) -> None:
        """Makes the KV cache hold the fed tokens, and nothing else."""
        seq = self.sequence
        if seq.cached > seq.fed:
            do(Rollback(seq.fed, request=self.number))
        elif seq.cached < seq.fed:
            do(Keep(tuple(self.request.fed.path[: seq.fed - seq.cached]), request=self.number))
        seq.cached = seq.fed

    def _forward(self, phase: Phase, do: Do, guessed: Guessed = _NONE) -> None:
        """Starts a forward of the unfed tokens. The last position before the limit needs no feeding: no row follows."""
        seq = self.sequence
        if phase is Phase.PREFILL:
            chunk = PREFILL_CHUNK if len(self._running) == 1 else SHARED_CHUNK
            count = min(len(seq.unfed), chunk - seq.fed % chunk)
            if seq.piece > 1:  # the draft's first tokens are computed in other sizes, whenever they came
                count = min(count, seq.prompt - seq.fed)
        else:
            count = min(len(seq.unfed), self.submit.limit - 1 - seq.fed)
            phase = Phase.POST_VERIFY if count > 1 else Phase.PRE_VERIFY
        self._settle(do)
        start, tokens = seq.fed, tuple(seq.feed(count))
        guesses = self._worthwhile(guessed, len(tokens))
        self.request.fed = fed = Fed.feed(start, tokens, guessed, guesses, len(seq.tokens))
        seq.cached = start + len(fed.tokens) if fed.parents is None else start  # a tree's tokens are kept by path
        self.counts.guesses += guesses
        rows = max(0, start + len(fed.tokens) + 1 - seq.committed)
        self.state = _RUNNING[phase]
        self.counts.steps[phase] += 1
        self.request.in_flight = len(fed.tokens)
        do(Forward(phase, start, fed.tokens, rows, fed.parents, request=self.number))

    def _worthwhile(self, guessed: Guessed, fed: int) -> int:
        """How many of the guesses to feed beside `fed` tokens of the text."""
        if not guessed.tokens:
            return 0
        chances, acceptance = guessed.chances, self.speeds.acceptance
        if not self._runs_ahead:  # a guess is of use only where the draft comes to guess the same
            chances = tuple(chance * acceptance for chance in chances)
        pending = self.sequence.fed - self.sequence.committed
        expected = sum(acceptance**i for i in range(pending + 1))
        return worthwhile(chances, fed + self.request.beside, expected, self.speeds.target.hoped)

    # ---- the end, and beginning anew ----

    def _resynchronise(self, do: Do) -> None:
        """Gives the draft the whole prefix again, in a new epoch."""
        self.counts.resyncs += 1
        self.request.discard_pending()
        begin_draft(self.request, self.speeds, do)

    def _finish(self, do: Do) -> None:
        deliver_committed(self.request, do)
        if self.request.told_draft:
            do(Send(Finish(self.number)))
        ending, window = self.request.ending, self.request.window
        self.resting.end()
        assert ending is not None
        do(End(self.number, ending, len(self.submit.prompt), self.counts, window))
        self.sequence.drop_pending()
        if self.sequence.cached < self.sequence.fed:  # the tree that waits is this request's business
            self._settle(do)
        self.proposals.clear()
        self.state = State.IDLE
        do(Wait(Cause.IDLE))


RequestMachine.handlers = {
    Submit: RequestMachine._submit,
    Cancel: RequestMachine._cancel,
    Forwarded: RequestMachine._forwarded,
    Failed: RequestMachine._failed,
    Stalled: RequestMachine._stalled,
    Guessed: RequestMachine._guessed,
    Judged: RequestMachine._judged,
    Sampled: RequestMachine._sampled,
    DraftTokens: RequestMachine._draft_tokens,
    DraftJoined: RequestMachine._draft_joined,
    DraftGone: RequestMachine._draft_gone,
    Resync: RequestMachine._resync,
}
