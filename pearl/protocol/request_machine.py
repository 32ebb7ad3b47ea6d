"""The target's state machine for one request: it owns the prefix, decides what is computed next, issues every verdict.

Events in (`handle`), commands out.  All methods - ar, sd, pearl and its ablations - are settings of this one machine
(`window.METHODS`); what differs between acceptance rules, models and transports is behind the commands.

The shape: a forward feeds unfed tokens and yields a row for the position after each; then `_decide` asks, again and
again, what the rows at hand allow.  A row and a draft token: judge.  A row for which no draft token will come: draw
from it.  A row whose token is still on its way: hold it.  No row: feed what is unfed, once the window is full enough.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, ClassVar

from pearl.errors import RemoteProtocolError
from pearl.protocol.events import (
    Cause,
    Deliver,
    DraftGone,
    DraftJoined,
    End,
    Failed,
    Forward,
    Forwarded,
    Judge,
    Judged,
    Open,
    Phase,
    Rollback,
    Sample,
    Sampled,
    Send,
    Stalled,
    Wait,
)
from pearl.protocol.machine import Do, Machine, Table
from pearl.protocol.messages import (
    Begin,
    Cancel,
    Committed,
    DraftTokens,
    Finish,
    FinishReason,
    Preview,
    Provenance,
    Resync,
    Submit,
    Verdict,
)
from pearl.protocol.proposals import Proposal
from pearl.protocol.request import RequestState
from pearl.protocol.sequence import TokenSequence
from pearl.protocol.window import Method, Speeds, Window

# Tokens of a long prompt fed at once, up to a multiple of it: messages are looked at between two chunks.
PREFILL_CHUNK = 512
MAX_BRANCHES = 64  # of one request, that wait for their outcome
_GRANTS_A_CHOICE = 8  # speeds change slowly, and to choose c takes as long as all else that follows a judgement


class State(Enum):
    IDLE = "idle"
    PREFILL = "prefill"
    PRE_VERIFY = "pre-verify"
    POST_VERIFY = "post-verify"
    JUDGING = "judging"
    SAMPLING = "sampling"
    HELD = "held"
    GATHERING = "gathering"


_RUNNING = {
    Phase.PREFILL: State.PREFILL,
    Phase.PRE_VERIFY: State.PRE_VERIFY,
    Phase.POST_VERIFY: State.POST_VERIFY,
}
_FED = frozenset({State.JUDGING, State.SAMPLING, State.HELD, State.IDLE})
_ENDED = frozenset({State.IDLE})
_DECIDED = frozenset({State.PRE_VERIFY, State.GATHERING, State.IDLE})

# state -> event -> the states that may follow. What is not listed is illegal. The README's diagram is drawn from this.
TRANSITIONS: dict[State, dict[type, frozenset[State]]] = {
    State.IDLE: {Submit: frozenset({State.PREFILL})},
    State.PREFILL: {Forwarded: _FED | {State.PREFILL}, Failed: _ENDED},
    State.PRE_VERIFY: {Forwarded: _FED, Failed: _ENDED},
    State.POST_VERIFY: {Forwarded: _FED, Failed: _ENDED},
    State.JUDGING: {
        Judged: _DECIDED | {State.POST_VERIFY, State.JUDGING, State.SAMPLING, State.HELD},
        Failed: _ENDED,
    },
    State.SAMPLING: {Sampled: _DECIDED, Failed: _ENDED},
    State.HELD: {
        DraftTokens: frozenset({State.JUDGING}),
        DraftGone: frozenset({State.SAMPLING}),
        Stalled: frozenset({State.HELD}),
        Cancel: _ENDED,
    },
    State.GATHERING: {
        DraftTokens: frozenset({State.POST_VERIFY}),
        DraftGone: frozenset({State.PRE_VERIFY}),
        Stalled: frozenset({State.GATHERING}),
        Cancel: _ENDED,
    },
}
# Legal in every state, and by themselves they change none: the world outside does not wait for our forwards.
ANYTIME = (Submit, Cancel, DraftTokens, DraftGone, DraftJoined, Resync)
# A verdict being computed stands: what would discard the tokens under judgement waits until it is out.
_AFTER_JUDGING = (DraftGone, DraftJoined)


class RequestMachine(Machine):
    """The target's machine for one request, in slot `slot`.

    Args:
        sequence: the slot's, with the text whose cache the request may begin with.
        speeds: the target's estimates, which this machine adds to.
        draft_context: tokens that the draft's model holds; 0: no draft.
        window: c as last used.
    """

    role: ClassVar[str] = "target"
    transitions: ClassVar[Table[Any]] = TRANSITIONS
    anytime: ClassVar[tuple[type, ...]] = ANYTIME

    def __init__(
        self, submit: Submit, sequence: TokenSequence, slot: int, speeds: Speeds, draft_context: int, window: int
    ) -> None:
        super().__init__()
        self.state = State.IDLE
        self.request = RequestState(submit, sequence, window=window)
        self.submit, self.sequence = submit, sequence
        self.proposals, self.counts = self.request.proposals, self.request.counts
        self.slot, self.speeds, self.draft_context = slot, speeds, draft_context
        self._deferred: list[object] = []

    def handle(self, event: object) -> list[object]:
        """See `Machine.handle`. What would discard tokens under judgement waits until the verdict is out."""
        if self.state is State.JUDGING and type(event) in _AFTER_JUDGING:
            self._deferred.append(event)
            return []
        was_judging = self.state is State.JUDGING
        commands = super().handle(event)
        if was_judging and type(event) in (Judged, Failed):
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
        decoding, number = submit.decoding, submit.request
        rule = decoding.rule, submit.stops, decoding.parameters
        do(Open(submit.prompt, submit.sampling, *rule, self.slot, request=number))
        self._begin_draft(do)
        self._forward(Phase.PREFILL, do)

    def _cancel(self, _: Cancel, do: Do) -> None:
        self.request.ending = FinishReason.CANCELLED
        if self.state in (State.HELD, State.GATHERING):
            self._decide(do)

    def _forwarded(self, event: Forwarded, do: Do) -> None:
        if self.state is not State.PREFILL:  # a prompt's forward says nothing about a window's
            self.speeds.observe_target(self.request.in_flight, event.seconds)
        if self.state is State.PREFILL and self.sequence.fed < self.sequence.committed and not self.request.ending:
            self._forward(Phase.PREFILL, do)
        else:
            self._decide(do)

    def _failed(self, _: Failed, do: Do) -> None:
        self.request.ending = FinishReason.CANCELLED
        self._finish(do)
        self.sequence.fed = 0  # what the cache holds may be what the model choked on

    def _judged(self, event: Judged, do: Do) -> None:
        judged = event.accepted + (event.token is not None)
        self.speeds.observe_judgement(event.accepted, judged)
        for i in range(event.accepted):
            self._commit(None, Provenance.ACCEPTED, event.stop_after == i + 1)
        if event.token is not None:
            self._commit(event.token, Provenance.CORRECTED, event.stop_after == judged)
        self._decide(do)

    def _sampled(self, event: Sampled, do: Do) -> None:
        bonus = self._method.bonus and self._drafting and not self.request.is_fresh
        self._commit(event.token, Provenance.BONUS if bonus else Provenance.DIRECT, event.stop)
        self._decide(do)

    def _draft_tokens(self, message: DraftTokens, do: Do) -> None:
        known = len(self.sequence.tokens)
        if self.request.ending or (message.epoch < self.epoch and not self._is_foreseen(message)):
            self.counts.stale += 1
            return
        most = self.request.draft_until if message.after is None else self.submit.limit
        if message.epoch > self.epoch or message.start + len(message.tokens) > most:
            raise RemoteProtocolError(
                f"draft sent {len(message.tokens)} tokens from position {message.start} in epoch {message.epoch}; "
                f"allowed: up to {most} in epoch {self.epoch} (target {self.state.value})"
            )
        self.speeds.observe_draft(message.seconds)
        if message.after is not None and message.epoch == self.epoch:
            self._branch(message)
        elif message.start < known:
            self.counts.duplicate += 1
        elif message.start > known:
            if self.state is State.JUDGING:
                self._deferred.append(message)
            else:
                self._resynchronise(do)
        else:
            self.request.is_paused = message.paused
            self._propose(Proposal(message.start, message.tokens, message.rows, message.source))
            self._preview(do)
            if self.state in (State.HELD, State.GATHERING):
                self._decide(do)

    def _propose(self, proposal: Proposal) -> None:
        """Takes the next tokens of the main line."""
        self.sequence.extend(proposal.tokens)
        self.proposals.add(proposal)
        self.counts.drafted += len(proposal.tokens)

    def _branch(self, message: DraftTokens) -> None:
        """Keeps a continuation for another outcome at a position that is not decided yet."""
        assert message.after is not None
        position, token = message.after
        tokens = self.sequence.tokens
        is_open = self.sequence.committed <= position < len(tokens) and tokens[position] != token
        if not is_open or len(self.proposals.branches) >= MAX_BRANCHES:
            self.counts.stale += 1
            return
        self.proposals.add(Proposal(message.start, message.tokens, message.rows, message.source, message.after))

    def _is_foreseen(self, message: DraftTokens) -> bool:
        """Whether it is the branch for the very outcome that opened this epoch: the verdict has only overtaken it."""
        is_before = message.epoch == self.epoch - 1
        return message.after is not None and is_before and message.after == self.request.opened_by

    def _draft_joined(self, event: DraftJoined, do: Do) -> None:
        self.draft_context = event.context
        if not self.request.ending:
            self._resynchronise(do)

    def _draft_gone(self, event: DraftGone, do: Do) -> None:
        if event.request is None:
            self.draft_context = 0
        elif self.request.is_undraftable:
            return
        else:
            self.request.is_undraftable = True
            if self.request.told_draft:
                do(Send(Finish(self.number)))  # it may have been given the prefix again meanwhile
        self.request.told_draft = 0
        self._discard_pending()
        if self.state in (State.HELD, State.GATHERING):
            self._decide(do)

    def _stalled(self, _: Stalled, do: Do) -> None:
        self._resynchronise(do)

    def _resync(self, message: Resync, do: Do) -> None:
        if message.epoch < self.epoch or self.request.ending:
            self.counts.stale += 1
            return
        if message.epoch > self.epoch:
            raise RemoteProtocolError(f"draft asks to resynchronise epoch {message.epoch}; it is epoch {self.epoch}")
        if self.state is State.JUDGING:
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
        if seq.fed >= seq.committed:  # there is a row for the position after the prefix
            run = min(len(seq.pending), self._judgeable)
            if run:
                self.state = State.JUDGING
                do(Judge(seq.committed, tuple(seq.pending[:run]), self.proposals.rows(run), request=self.number))
            elif self._row_is_direct:
                self.state = State.SAMPLING
                do(Sample(seq.committed, request=self.number))
            else:
                self._announce(do)
                self.state = State.HELD
                do(Wait(Cause.HELD_ROW, request=self.number))
            return
        self._announce(do)
        if len(seq.unfed) >= self._needed:
            self._forward(Phase.PRE_VERIFY, do)
        else:
            self.state = State.GATHERING
            do(Wait(Cause.WINDOW, request=self.number))

    @property
    def _method(self) -> Method:
        return self.request.method

    @property
    def _drafting(self) -> bool:
        """Whether a draft token will come for the position after the prefix.

        Depends on the draft's being there and on the position, never on what it drafted (invariant 9).
        """
        can_draft = self._method.drafts and not self.request.is_undraftable
        return can_draft and self.sequence.committed < self.draft_context

    @property
    def _judgeable(self) -> int:
        """Positions after the prefix whose row is to be judged: all there are, but for a bonus row.

        That one is drawn from even where a draft token has come for it: which it is must not depend on timing.
        """
        rows = self.sequence.fed + 1 - self.sequence.committed
        return rows - 1 if self._method.bonus and (rows > 1 or not self.request.is_fresh) else rows

    @property
    def _row_is_direct(self) -> bool:
        return not self._drafting or (self._method.bonus and not self.request.is_fresh)

    @property
    def _needed(self) -> int:
        """Unfed tokens to wait for. Near the limit, or the draft's context, fewer can ever come."""
        length = self.sequence.committed
        can_come = min(self.submit.limit - length, 1 + max(0, self.draft_context - length))
        return min(self._window.needed, can_come) if self._drafting and not self.request.is_paused else 1

    @property
    def _window(self) -> Window:
        policy = self.submit.decoding.window
        request = self.request
        return Window.after(self._method, policy, request.window, self.sequence.committed, fresh=request.is_fresh)

    def _grant(self) -> int:
        """Return how far the draft may draft, never less than before in the same epoch; re-choose c every 8 grants.

        c changes only here, together with what the draft is told: were it to grow in between, the target would wait
        for tokens that the draft was never allowed to draft.
        """
        if self.request.grants % _GRANTS_A_CHOICE == 0:
            self.request.window = self.submit.decoding.gamma or self.speeds.best_window()
        self.request.grants += 1
        until = min(self._window.draft_until, self.submit.limit, self.draft_context)
        self.request.draft_until = max(self.request.draft_until, until)
        return self.request.draft_until

    def _forward(self, phase: Phase, do: Do) -> None:
        """Starts a forward of the unfed tokens. The last position before the limit needs no feeding: no row follows."""
        seq = self.sequence
        if phase is Phase.PREFILL:
            count = min(len(seq.unfed), PREFILL_CHUNK - seq.fed % PREFILL_CHUNK)
        else:
            count = min(len(seq.unfed), self.submit.limit - seq.committed)
            phase = Phase.POST_VERIFY if count > 1 else Phase.PRE_VERIFY
        if seq.cached > seq.fed:
            do(Rollback(seq.fed, request=self.number))
        start = seq.fed
        tokens = tuple(seq.feed(count))
        rows = max(0, seq.fed + 1 - seq.committed)
        self.state = _RUNNING[phase]
        self.counts.steps[phase] += 1
        self.request.in_flight = count
        do(Forward(phase, start, tokens, rows, request=self.number))

    # ---- committing ----

    def _commit(self, token: int | None, provenance: Provenance, stop: bool) -> None:
        """Commits the first pending token, or `token` in its place. After the end nothing is committed any more."""
        if self.request.ending:
            return
        self.request.is_fresh = token is not None
        if token is None:
            self.sequence.accept()
            self.proposals.accept(self.sequence.committed)
            self.counts.accepted += 1
            self.counts.run += 1
        else:
            foreseen = self.proposals.branch(self.sequence.committed, token)
            self._discard_pending()
            self.request.opened_by = self.sequence.committed, token
            self.sequence.correct(token)
            if foreseen is not None:
                self.counts.foreseen += 1
                self._propose(foreseen)
            if provenance is not Provenance.DIRECT:
                runs, run = self.counts.runs, self.counts.run
                runs[run] = runs.get(run, 0) + 1
            self.counts.run = 0
        self.counts.judged += provenance in (Provenance.ACCEPTED, Provenance.CORRECTED)
        self.request.untold.append(provenance)
        self.counts.provenance[provenance] += 1
        if self.sequence.tokens[self.sequence.committed - 1] in self.submit.eos:
            self.request.ending = FinishReason.EOS
        elif stop:
            self.request.ending = FinishReason.STOP
        elif self.sequence.committed >= self.submit.limit:
            self.request.ending = FinishReason.LENGTH

    def _discard_pending(self) -> None:
        """What was drafted counts no more."""
        self.request.epoch += 1
        self.request.draft_until = 0
        self.request.opened_by = None
        self.proposals.clear()
        self.sequence.drop_pending()

    # ---- telling the draft and the front ----

    def _begin_draft(self, do: Do) -> None:
        if not self._drafting:
            return
        seq, submit = self.sequence, self.submit
        self.request.told_draft, self.request.is_paused = seq.committed, False
        prefix = tuple(seq.tokens[: seq.committed])
        sampling, rule, values = submit.sampling, submit.decoding.rule, submit.decoding.parameters
        do(Send(Begin(submit.request, self.epoch, prefix, self._grant(), sampling, rule, seq.digest, values)))

    def _resynchronise(self, do: Do) -> None:
        """Gives the draft the whole prefix again, in a new epoch."""
        self.counts.resyncs += 1
        self._discard_pending()
        self._begin_draft(do)

    def _announce(self, do: Do) -> None:
        """Tells the draft, then the front, what has been committed since they were last told."""
        seq = self.sequence
        if self.request.told_draft and self._drafting and self.request.told_draft < seq.committed:
            start, new = self.request.told_draft, tuple(seq.tokens[self.request.told_draft : seq.committed])
            request, until = self.number, self._grant()
            do(Send(Verdict(request, self.epoch, start, new, until, seq.digest)))
            self.request.is_paused = False
            self.request.told_draft = seq.committed
        self._deliver_committed(do)
        if seq.committed < len(seq.tokens):
            self._preview(do)

    def _deliver_committed(self, do: Do) -> None:
        seq = self.sequence
        if self.request.told_front < seq.committed:
            new = tuple(seq.tokens[self.request.told_front : seq.committed])
            do(Deliver(Committed(self.number, self.request.told_front, new, tuple(self.request.untold))))
            self.request.told_front = seq.committed
            self.request.untold.clear()

    def _preview(self, do: Do) -> None:
        if self.submit.preview:
            seq = self.sequence
            do(Deliver(Preview(self.number, seq.committed, tuple(seq.pending))))

    def _finish(self, do: Do) -> None:
        self._deliver_committed(do)
        if self.request.told_draft:
            do(Send(Finish(self.number)))
        ending, window = self.request.ending, self.request.window
        assert ending is not None
        do(End(self.number, ending, len(self.submit.prompt), self.counts, window))
        self.sequence.drop_pending()
        self.proposals.clear()
        self.state = State.IDLE
        do(Wait(Cause.IDLE))


RequestMachine.handlers = {
    Submit: RequestMachine._submit,
    Cancel: RequestMachine._cancel,
    Forwarded: RequestMachine._forwarded,
    Failed: RequestMachine._failed,
    Stalled: RequestMachine._stalled,
    Judged: RequestMachine._judged,
    Sampled: RequestMachine._sampled,
    DraftTokens: RequestMachine._draft_tokens,
    DraftJoined: RequestMachine._draft_joined,
    DraftGone: RequestMachine._draft_gone,
    Resync: RequestMachine._resync,
}
