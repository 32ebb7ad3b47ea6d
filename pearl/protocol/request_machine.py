"""The target's state machine for one request: it owns the prefix, decides what is computed next, issues every verdict.

Events in (`handle`), commands out. All methods are settings of this one machine (`spec.methods`); what differs between
acceptance rules, models and transports is behind the commands.

A forward feeds unfed tokens and yields a row for the position after each; then `_decide` picks the next step from the
rows at hand. A row and a draft token: judge. A row for which no draft token will come: draw from it. A row whose token
is still on its way: hold it. No row: feed what is unfed, once the window is full enough.

A request that looks ahead has guesses, made without a model, fed beside and behind what is unfed, as a tree: where the
text turns out to follow them, its rows are there already. If the rule then commits the target's own draw whatever was
proposed, no row is held either: the target draws from it at once, and the draft, sent the token, catches up.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar

from pearl.errors import RemoteProtocolError
from pearl.protocol.draft_state import DraftState, Received
from pearl.protocol.events import (
    Cause,
    DraftDropped,
    DraftGone,
    DraftJoined,
    End,
    Failed,
    Forwarded,
    Guessed,
    Judged,
    Odds,
    Open,
    Phase,
    Sampled,
    Wait,
)
from pearl.protocol.machine import Do, Machine, Table
from pearl.protocol.messages import Cancel, DraftTokens, FinishReason, Provenance, Resync, Submit
from pearl.protocol.method_trials import AutoText
from pearl.protocol.request import Request
from pearl.protocol.sequence import TokenSequence
from pearl.protocol.speeds import Speeds
from pearl.protocol.target_steps import TargetSteps


class State(Enum):
    IDLE = "idle"  # not begun, or ended
    PREFILL = "prefill"  # a forward of the prompt is running
    PRE_VERIFY = "pre-verify"  # a forward of one token (and guesses) is running
    POST_VERIFY = "post-verify"  # a forward of several tokens (and guesses) is running
    JUDGING = "judging"  # the acceptance rule is being applied to draft tokens
    SAMPLING = "sampling"  # the target is drawing a token of its own
    HELD = "held"  # logits are there, the draft token to judge with them is not
    GATHERING = "gathering"  # waits for enough draft tokens to start a forward
    GUESSING = "guessing"  # model-free guesses are being looked up


WAITING = frozenset({State.HELD, State.GATHERING})  # for tokens of the draft
_FED = frozenset({State.JUDGING, State.SAMPLING, State.HELD, State.IDLE})
# Under block rules tokens are gathered, not held.
_OF_BLOCKS = frozenset({State.GATHERING, State.POST_VERIFY})
_ENDED = frozenset({State.IDLE})
_DECIDED = frozenset({State.PRE_VERIFY, State.GATHERING, State.GUESSING, State.IDLE})

# state -> event -> the states that may follow; anything else is illegal. The README's diagram is generated from this.
TRANSITIONS: dict[State, dict[type, frozenset[State]]] = {
    State.IDLE: {Submit: frozenset({State.PREFILL})},
    State.PREFILL: {Forwarded: _FED | _OF_BLOCKS | {State.PREFILL}, Failed: _ENDED},
    State.PRE_VERIFY: {Forwarded: _FED | _OF_BLOCKS, Failed: _ENDED},
    State.POST_VERIFY: {Forwarded: _FED | _OF_BLOCKS, Failed: _ENDED},
    State.JUDGING: {
        Judged: _DECIDED | {State.POST_VERIFY, State.JUDGING, State.SAMPLING, State.HELD},
        Failed: _ENDED,
    },
    # The last two: the token taken in place of a withheld one was fed as a guess, so that the next row is there.
    State.SAMPLING: {
        Sampled: _DECIDED | {State.POST_VERIFY, State.HELD, State.SAMPLING},
        Failed: _ENDED,
    },
    State.HELD: {
        # SAMPLING where the draft withholds its token.
        DraftTokens: frozenset({State.JUDGING, State.SAMPLING}),
        DraftGone: frozenset({State.SAMPLING}),
        Cancel: _ENDED,
    },
    State.GATHERING: {
        DraftTokens: frozenset({State.PRE_VERIFY, State.POST_VERIFY, State.GUESSING}),
        DraftGone: frozenset({State.PRE_VERIFY, State.GUESSING}),
        Cancel: _ENDED,
    },
    State.GUESSING: {Guessed: _ENDED | {State.PRE_VERIFY, State.POST_VERIFY}, Failed: _ENDED},
}
# Legal in every state: peers do not wait for our forwards. Where a state does not list one, the state stays the same.
ANYTIME = (Submit, Cancel, DraftTokens, DraftGone, DraftJoined, Resync)
# These events discard pending tokens, so they are deferred while such tokens are judged or guesses made after them.
AFTER_COMPUTING = (DraftGone, DraftJoined)
COMPUTING = {State.JUDGING: (Judged, Failed), State.GUESSING: (Guessed, Failed)}


class RequestMachine(Machine):
    """The target's machine for one request, in slot `slot`.

    Args:
        sequence: the slot's, with the text whose cache the request may begin with.
        speeds: the target's estimates, which this machine adds to.
        draft_context: tokens that the draft's model holds; 0: no draft.
        window: c as last used.
        running: the machines of all running requests, this one among them.
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
        self.sequence = sequence
        self.slot = slot
        self._speeds = speeds
        self._running = running
        self.request = Request(submit, sequence)
        self.draft = DraftState(self.request, speeds, draft_context, window)
        self.auto = AutoText(self.request, self.draft, speeds, running)
        self._steps = TargetSteps(self.request, self.draft, speeds, running)
        self._deferred: list[object] = []

    def handle(self, event: object) -> list[object]:
        """See `Machine.handle`. Defers events that would discard tokens while something is computed about these."""
        computing = COMPUTING.get(self.state, ())
        if computing and type(event) in AFTER_COMPUTING:
            self._deferred.append(event)
            return []
        commands = super().handle(event)
        if type(event) in computing:
            deferred = self._deferred
            self._deferred = []
            for deferred_event in deferred:
                commands += self.handle(deferred_event)
        is_drafted_for = not self.draft.is_lost and self.state is not State.IDLE
        if is_drafted_for and self.draft.resyncs_too_often:
            gone = DraftGone("it was given the whole prefix too often", self.request.number)
            commands += self.handle(gone)
        return commands

    @property
    def epoch(self) -> int:  # type: ignore[override]
        return self.request.epoch

    # ---- events ----

    def _submit(self, submit: Submit, do: Do) -> None:
        self.request.begin()
        do(Open(submit.prompt, submit.options, self.slot, request=submit.request))
        self.auto.begin(do)
        self.draft.begin(do)
        self._forward(Phase.PREFILL, do)

    def _cancel(self, _: Cancel, do: Do) -> None:
        self.request.ending = FinishReason.CANCELLED
        if self.state in WAITING:
            self._decide(do)

    def _forwarded(self, event: Forwarded, do: Do) -> None:
        if self.state is not State.PREFILL:  # a prompt's forward says nothing about a window's
            self._observe_step(event)
            self.auto.step(event.at, do)
        has_prompt_left = self.sequence.fed < self.sequence.committed
        if self.state is State.PREFILL and has_prompt_left and not self.request.ending:
            self._forward(Phase.PREFILL, do)
        else:
            self._decide(do)

    def _observe_step(self, event: Forwarded) -> None:
        self.request.counts.was_shared |= len(self._running) > 1
        if event.beside is None:
            return
        fed = self._steps.num_fed + event.beside
        self.draft.beside = event.beside
        self._speeds.observe_target(fed, event.seconds)
        self.request.counts.observe_step(fed, event.seconds)

    def _failed(self, _: Failed, do: Do) -> None:
        self.request.ending = FinishReason.CANCELLED
        self.sequence.fed = 0  # the cache may hold what the model failed on
        self._finish(do)

    def _judged(self, event: Judged, do: Do) -> None:
        request = self.request
        judged = event.accepted + (event.token is not None)
        self._speeds.observe_judgement(event.accepted, judged)
        if event.odds is not None:
            request.counts.odds = event.odds + (request.counts.odds or Odds())
            request.counts.num_rejections += event.token is not None and not event.is_candidate
        for count in range(1, event.accepted + 1):
            request.commit(None, Provenance.ACCEPTED, event.stop_after == count)
        if event.token is not None:
            provenance = Provenance.ACCEPTED if event.is_candidate else Provenance.CORRECTED
            request.commit(event.token, provenance, event.stop_after == judged)
        self._decide(do)

    def _sampled(self, event: Sampled, do: Do) -> None:
        stops = [event.stop_after == count for count in range(1, len(event.tokens) + 1)]
        if self.request.looks_ahead:
            self._steps.commit_draws(event.tokens, stops)
        else:
            request = self.request
            has_bonus = request.method.bonus and not request.is_fresh
            is_bonus = has_bonus and self.draft.is_drafting
            provenance = Provenance.BONUS if is_bonus else Provenance.DIRECT
            request.commit(event.tokens[0], provenance, stops[0])
        self._decide(do)

    def _guessed(self, event: Guessed, do: Do) -> None:
        if self.request.ending:
            self._finish(do)
        elif len(self.sequence.tokens) == self.request.indexed:
            self._forward(Phase.PRE_VERIFY, do, event)
        else:  # the text has changed behind them
            self._forward(Phase.PRE_VERIFY, do)

    def _draft_tokens(self, message: DraftTokens, do: Do) -> None:
        match self.draft.receive(message):
            case Received.PENDING:
                self.request.preview(do)
                if self.state in WAITING:
                    self._decide(do)
            case Received.COMPARED if self.state is State.GATHERING:
                self._decide(do)
            case Received.GAP if self.state in COMPUTING:
                self._deferred.append(message)
            case Received.GAP:
                self._resynchronise(do)

    def _draft_joined(self, event: DraftJoined, do: Do) -> None:
        self.draft.context = event.context
        if not self.request.ending:
            self._resynchronise(do)

    def _draft_gone(self, event: DraftGone, do: Do) -> None:
        if event.request is not None and self.draft.is_lost:
            return
        self.request.counts.loss = event.reason
        if event.request is None:
            self.draft.context = self.draft.known = 0
            self.auto.lose_draft()
        else:
            self.draft.is_lost = True
            self.draft.finish(do)  # it may have been given the prefix again since
            do(DraftDropped(event.reason, request=event.request))
        self.request.discard_pending()
        if self.state in WAITING:
            self._decide(do)

    def _resync(self, message: Resync, do: Do) -> None:
        if message.epoch < self.epoch or self.request.ending or not self.request.method.drafts:
            self.request.counts.stale += 1
        elif message.epoch > self.epoch:
            raise RemoteProtocolError(
                f"draft asks to resynchronise epoch {message.epoch}; it is epoch {self.epoch}"
            )
        elif self.state in COMPUTING:
            self._deferred.append(message)
        else:
            self._resynchronise(do)

    # ---- what to do next ----

    def _decide(self, do: Do) -> None:
        """Called whenever nothing is being computed: the one place where the next step is chosen."""
        request = self.request
        seq = self.sequence
        if request.ending:
            self._finish(do)
            return
        self._steps.follow()
        has_row = seq.fed >= seq.committed  # for the position after the prefix
        if has_row and self._use_rows(do):
            return
        self._announce(do)
        if len(seq.unfed) < self.draft.needed:
            self.state = State.GATHERING
            do(Wait(Cause.WINDOW, request=request.number))
        elif request.looks_ahead:
            self.state = State.GUESSING
            self._steps.guess(do)
        else:
            self._forward(Phase.PRE_VERIFY, do)

    def _use_rows(self, do: Do) -> bool:
        """Judge, draw or wait with the rows at hand; False where these are of no use."""
        request = self.request
        steps = self._steps
        if steps.num_judged:
            self.state = State.JUDGING
            steps.judge(do)
        elif request.runs_ahead or steps.row_is_direct:
            self.state = State.SAMPLING
            steps.sample(do)
        elif request.block == 1:
            self._announce(do)
            self.state = State.HELD
            do(Wait(Cause.HELD_ROW, request=request.number))
        else:
            # The row comes again with those of a block.
            self.sequence.fed = self.sequence.committed - 1
            return False
        return True

    def _forward(self, phase: Phase, do: Do, guessed: Guessed | None = None) -> None:
        self.state = State(self._steps.forward(phase, do, guessed).value)  # named alike

    # ---- the end, and beginning again ----

    def _announce(self, do: Do) -> None:
        """Send draft and front what was committed, and the front what is pending."""
        self.draft.announce(do)
        self.request.deliver(do)
        if self.sequence.pending:
            self.request.preview(do)

    def _resynchronise(self, do: Do) -> None:
        """Give the draft the whole prefix again, in a new epoch."""
        self.request.counts.resyncs += 1
        self.request.discard_pending()
        self.draft.begin(do)

    def _finish(self, do: Do) -> None:
        request = self.request
        request.deliver(do)
        self.draft.finish(do)
        self.auto.end()
        assert request.ending is not None
        num_prompt_tokens = len(request.submit.prompt)
        counts = request.counts
        do(End(request.number, request.ending, num_prompt_tokens, counts, self.draft.window))
        self.sequence.drop_pending()
        if self.sequence.cached < self.sequence.fed:
            # A tree that is not settled yet is this request's.
            self._steps.settle(do)
        request.proposals.clear()
        self.state = State.IDLE
        do(Wait(Cause.IDLE))


RequestMachine.handlers = {
    Submit: RequestMachine._submit,
    Cancel: RequestMachine._cancel,
    Forwarded: RequestMachine._forwarded,
    Failed: RequestMachine._failed,
    Guessed: RequestMachine._guessed,
    Judged: RequestMachine._judged,
    Sampled: RequestMachine._sampled,
    DraftTokens: RequestMachine._draft_tokens,
    DraftJoined: RequestMachine._draft_joined,
    DraftGone: RequestMachine._draft_gone,
    Resync: RequestMachine._resync,
}
