"""The target's state machine: it owns the prefix, decides what the target computes next, and issues every verdict.

Events in (`handle`), commands out.  All methods - ar, sd, pearl and its ablations - are settings of this one machine
(`window.METHODS`); what differs between acceptance rules, models and transports is behind the commands.

The shape: a forward feeds unfed tokens and yields a row for the position after each; then `_decide` asks, again and
again, what the rows at hand allow.  A row and a draft token: judge.  A row for which no draft token will come: draw
from it.  A row whose token is still on its way: hold it.  No row: feed what is unfed, once the window is full enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pearl.errors import LocalProtocolError, RemoteProtocolError
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
from pearl.protocol.sequence import TokenSequence
from pearl.protocol.window import METHODS, Method, Speeds, Window

PREFILL_CHUNK = 512  # tokens of a long prompt fed at once: between two chunks messages are looked at
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


@dataclass
class Counts:
    """What happened to one request, in tokens and steps; folded into statistics by `pearl.metrics`."""

    cached: int = 0  # prompt tokens that the cache still held from the request before
    drafted: int = 0  # draft tokens that arrived in time to count
    judged: int = 0
    accepted: int = 0
    stale: int = 0  # dropped: older epoch or another request
    duplicate: int = 0  # dropped: known start again
    resyncs: int = 0
    steps: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))
    provenance: dict[Provenance, int] = field(default_factory=lambda: dict.fromkeys(Provenance, 0))
    runs: dict[int, int] = field(default_factory=dict)  # accepted tokens of a run -> how many such runs
    run: int = 0  # accepted tokens of the run that is going on


class Coordinator:
    """One target. `speeds` outlives requests."""

    def __init__(self, speeds: Speeds | None = None) -> None:
        self.speeds = speeds or Speeds()
        self.state = State.IDLE
        self.sequence = TokenSequence()
        self.draft_context = 0  # 0: no draft
        self.request: Submit | None = None
        self.counts = Counts()
        self.epoch = 0
        self.window = 0  # c as last used
        self._queue: deque[Submit] = deque()
        self._deferred: list[object] = []
        self._in_flight = 0  # tokens that the running forward was fed
        self._reset_request()

    def _reset_request(self) -> None:
        self._rows: list[Any] = []  # the draft's distributions for the pending tokens, opaque here
        self._fresh = True
        self._ending: FinishReason | None = None
        self._told_draft = 0  # prefix length that the draft knows of
        self._undraftable = False  # the draft cannot go on with this request
        self._draft_until = 0
        self._grants = 0
        self._delivered = 0  # prefix length that the front knows of
        self._provenance: list[Provenance] = []  # of the tokens not delivered yet

    # ---- the machine ----

    def handle(self, event: object) -> list[object]:
        """Takes one event, returns the commands it leads to, in order.

        Raises `LocalProtocolError` for an event that the state does not allow and `RemoteProtocolError` for a message
        that the draft had no right to send; the machine is then as it was.
        """
        kind = type(event)
        allowed = TRANSITIONS[self.state].get(kind)
        if allowed is None and kind not in ANYTIME:
            raise LocalProtocolError(f"target in state {self.state.value} (epoch {self.epoch}) cannot take {event!r}")
        if self.state is State.JUDGING and kind in _AFTER_JUDGING:
            self._deferred.append(event)
            return []
        before = self.state
        commands: list[object] = []
        _HANDLERS[kind](self, event, commands.append)
        assert self.state is before or self.state in (allowed or ()), (before, event, self.state)
        if before is State.JUDGING and kind in (Judged, Failed):
            deferred, self._deferred = self._deferred, []
            for late in deferred:
                commands += self.handle(late)
        if self.state is State.IDLE and self._queue:
            commands += self.handle(self._queue.popleft())
        return commands

    # ---- events ----

    def _submit(self, submit: Submit, do: Callable[[object], None]) -> None:
        if self.state is not State.IDLE:
            self._queue.append(submit)
            return
        self.request, self.counts = submit, Counts()
        self.epoch = 0
        self._reset_request()
        self.sequence.restart(submit.prompt)
        self.counts.cached = self.sequence.fed
        self._delivered = self.sequence.committed
        do(Open(submit.prompt, submit.sampling, submit.decoding.rule, submit.stops))
        self._begin_draft(do)
        self._forward(Phase.PREFILL, do)

    def _cancel(self, cancel: Cancel, do: Callable[[object], None]) -> None:
        if self.request is None or cancel.request != self.request.request:
            waiting = len(self._queue)
            self._queue = deque(s for s in self._queue if s.request != cancel.request)
            if len(self._queue) < waiting:
                do(End(cancel.request, FinishReason.CANCELLED, 0, Counts(), 0))
            return
        self._ending = FinishReason.CANCELLED
        if self.state in (State.HELD, State.GATHERING):
            self._decide(do)

    def _forwarded(self, event: Forwarded, do: Callable[[object], None]) -> None:
        if self.state is not State.PREFILL:  # a prompt's forward says nothing about a window's
            self.speeds.observe_target(self._in_flight, event.seconds)
        if self.state is State.PREFILL and self.sequence.fed < self.sequence.committed and not self._ending:
            self._forward(Phase.PREFILL, do)
        else:
            self._decide(do)

    def _failed(self, _: Failed, do: Callable[[object], None]) -> None:
        self._ending = FinishReason.CANCELLED
        self._finish(do)
        self.sequence.fed = 0  # what the cache holds may be what the model choked on

    def _judged(self, event: Judged, do: Callable[[object], None]) -> None:
        judged = event.accepted + (event.token is not None)
        self.speeds.observe_judgement(event.accepted, judged)
        for i in range(event.accepted):
            self._commit(None, Provenance.ACCEPTED, event.stop_after == i + 1)
        if event.token is not None:
            self._commit(event.token, Provenance.CORRECTED, event.stop_after == judged)
        self._decide(do)

    def _sampled(self, event: Sampled, do: Callable[[object], None]) -> None:
        bonus = self._method.bonus and self._drafting and not self._fresh
        self._commit(event.token, Provenance.BONUS if bonus else Provenance.DIRECT, event.stop)
        self._decide(do)

    def _draft_tokens(self, message: DraftTokens, do: Callable[[object], None]) -> None:
        known = len(self.sequence.tokens)
        stale = self.request is None or message.request != self.request.request or message.epoch < self.epoch
        if stale or self._ending:
            self.counts.stale += 1
            return
        if message.epoch > self.epoch or message.start + len(message.tokens) > self._draft_until:
            raise RemoteProtocolError(
                f"draft sent {len(message.tokens)} tokens from position {message.start} in epoch {message.epoch}; "
                f"allowed: up to {self._draft_until} in epoch {self.epoch} (target {self.state.value})"
            )
        self.speeds.observe_draft(message.seconds)
        if message.start < known:
            self.counts.duplicate += 1
        elif message.start > known:
            if self.state is State.JUDGING:
                self._deferred.append(message)
            else:
                self._resynchronise(do)
        else:
            self.sequence.extend(message.tokens)
            self._rows.extend(message.rows.data or [None] * len(message.tokens))
            self.counts.drafted += len(message.tokens)
            self._preview(do)
            if self.state in (State.HELD, State.GATHERING):
                self._decide(do)

    def _draft_joined(self, event: DraftJoined, do: Callable[[object], None]) -> None:
        self.draft_context = event.context
        self.speeds.t_draft = event.seconds or self.speeds.t_draft  # what its predecessor took says nothing of it
        if self.request is not None and not self._ending:
            self._resynchronise(do)

    def _draft_gone(self, event: DraftGone, do: Callable[[object], None]) -> None:
        if event.request is None:
            self.draft_context = 0
        elif self.request is None or event.request != self.request.request or self._undraftable:
            return
        else:
            self._undraftable = True
            if self._told_draft:
                do(Send(Finish(event.request)))  # it may have been given the prefix again meanwhile
        self._told_draft = 0
        if self.request is None:
            return
        self._discard_pending()
        if self.state in (State.HELD, State.GATHERING):
            self._decide(do)

    def _stalled(self, _: Stalled, do: Callable[[object], None]) -> None:
        self._resynchronise(do)

    def _resync(self, message: Resync, do: Callable[[object], None]) -> None:
        stale = self.request is None or message.request != self.request.request or message.epoch < self.epoch
        if stale or self._ending:
            self.counts.stale += 1
            return
        if message.epoch > self.epoch:
            raise RemoteProtocolError(f"draft asks to resynchronise epoch {message.epoch}; it is epoch {self.epoch}")
        if self.state is State.JUDGING:
            self._deferred.append(message)
        else:
            self._resynchronise(do)

    # ---- what to do next ----

    def _decide(self, do: Callable[[object], None]) -> None:
        """Called whenever nothing is being computed: the one place where the next step is chosen."""
        seq = self.sequence
        if self._ending:
            self._finish(do)
            return
        if seq.fed >= seq.committed:  # there is a row for the position after the prefix
            run = min(len(seq.pending), self._judgeable)
            if run:
                self.state = State.JUDGING
                do(Judge(seq.committed, tuple(seq.pending[:run]), tuple(self._rows[:run])))
            elif self._row_is_direct:
                self.state = State.SAMPLING
                do(Sample(seq.committed))
            else:
                self._announce(do)
                self.state = State.HELD
                do(Wait(Cause.HELD_ROW))
            return
        self._announce(do)
        if len(seq.unfed) >= self._needed:
            self._forward(Phase.PRE_VERIFY, do)
        else:
            self.state = State.GATHERING
            do(Wait(Cause.WINDOW))

    @property
    def _method(self) -> Method:
        assert self.request is not None
        return METHODS[self.request.decoding.method]

    @property
    def _drafting(self) -> bool:
        """Whether a draft token will come for the position after the prefix.

        Depends on the draft's being there and on the position, never on what it drafted (invariant 9).
        """
        return self._method.drafts and not self._undraftable and self.sequence.committed < self.draft_context

    @property
    def _judgeable(self) -> int:
        """Positions after the prefix whose row is to be judged: all there are, but for a bonus row.

        That one is drawn from even where a draft token has come for it: which it is must not depend on timing.
        """
        rows = self.sequence.fed + 1 - self.sequence.committed
        return rows - 1 if self._method.bonus and (rows > 1 or not self._fresh) else rows

    @property
    def _row_is_direct(self) -> bool:
        return not self._drafting or (self._method.bonus and not self._fresh)

    @property
    def _needed(self) -> int:
        """Unfed tokens to wait for. Near the limit, or the draft's context, fewer can ever come."""
        assert self.request is not None
        length = self.sequence.committed
        can_come = min(self.request.limit - length, 1 + max(0, self.draft_context - length))
        return min(self._window.needed, can_come) if self._drafting else 1

    @property
    def _window(self) -> Window:
        assert self.request is not None
        policy = self.request.decoding.window
        return Window.after(self._method, policy, self.window, self.sequence.committed, fresh=self._fresh)

    def _grant(self) -> int:
        """Now and then chooses c anew; returns how far the draft may draft, never less than before in the same epoch.

        c changes only here, together with what the draft is told: were it to grow in between, the target would wait
        for tokens that the draft was never allowed to draft.
        """
        assert self.request is not None
        if self._grants % _GRANTS_A_CHOICE == 0:
            self.window = self.request.decoding.gamma or self.speeds.best_window()
        self._grants += 1
        until = min(self._window.draft_until, self.request.limit, self.draft_context)
        self._draft_until = max(self._draft_until, until)
        return self._draft_until

    def _forward(self, phase: Phase, do: Callable[[object], None]) -> None:
        """Starts a forward of the unfed tokens. The last position before the limit needs no feeding: no row follows."""
        assert self.request is not None
        seq = self.sequence
        if phase is Phase.PREFILL:
            count = min(len(seq.unfed), PREFILL_CHUNK)
        else:
            count = min(len(seq.unfed), self.request.limit - seq.committed)
            phase = Phase.POST_VERIFY if count > 1 else Phase.PRE_VERIFY
        if seq.cached > seq.fed:
            do(Rollback(seq.fed))
        start = seq.fed
        tokens = tuple(seq.feed(count))
        rows = max(0, seq.fed + 1 - seq.committed)
        self.state = _RUNNING[phase]
        self.counts.steps[phase] += 1
        self._in_flight = count
        do(Forward(phase, start, tokens, rows))

    # ---- committing ----

    def _commit(self, token: int | None, provenance: Provenance, stop: bool) -> None:
        """Commits the first pending token, or `token` in its place. After the end nothing is committed any more."""
        assert self.request is not None
        if self._ending:
            return
        self._fresh = token is not None
        if token is None:
            self.sequence.accept()
            self._rows.pop(0)
            self.counts.accepted += 1
            self.counts.run += 1
        else:
            self._discard_pending()
            self.sequence.correct(token)
            if provenance is not Provenance.DIRECT:
                self.counts.runs[self.counts.run] = self.counts.runs.get(self.counts.run, 0) + 1
            self.counts.run = 0
        self.counts.judged += provenance in (Provenance.ACCEPTED, Provenance.CORRECTED)
        self._provenance.append(provenance)
        self.counts.provenance[provenance] += 1
        if self.sequence.tokens[self.sequence.committed - 1] in self.request.eos:
            self._ending = FinishReason.EOS
        elif stop:
            self._ending = FinishReason.STOP
        elif self.sequence.committed >= self.request.limit:
            self._ending = FinishReason.LENGTH

    def _discard_pending(self) -> None:
        """What was drafted counts no more."""
        self.epoch += 1
        self._draft_until = 0
        self._rows.clear()
        self.sequence.drop_pending()

    # ---- telling the draft and the front ----

    def _begin_draft(self, do: Callable[[object], None]) -> None:
        assert self.request is not None
        if not self._drafting:
            return
        seq, request = self.sequence, self.request
        self._told_draft = seq.committed
        prefix = tuple(seq.tokens[: seq.committed])
        sampling, rule = request.sampling, request.decoding.rule
        do(Send(Begin(request.request, self.epoch, prefix, self._grant(), sampling, rule, seq.digest)))

    def _resynchronise(self, do: Callable[[object], None]) -> None:
        """Gives the draft the whole prefix again, in a new epoch."""
        self.counts.resyncs += 1
        self._discard_pending()
        self._begin_draft(do)

    def _announce(self, do: Callable[[object], None]) -> None:
        """Tells the draft, then the front, what has been committed since they were last told."""
        assert self.request is not None
        seq = self.sequence
        if self._told_draft and self._drafting and self._told_draft < seq.committed:
            start, new = self._told_draft, tuple(seq.tokens[self._told_draft : seq.committed])
            request, until = self.request.request, self._grant()
            do(Send(Verdict(request, self.epoch, start, new, until, seq.digest)))
            self._told_draft = seq.committed
        self._deliver_committed(do)
        if seq.committed < len(seq.tokens):
            self._preview(do)

    def _deliver_committed(self, do: Callable[[object], None]) -> None:
        assert self.request is not None
        seq = self.sequence
        if self._delivered < seq.committed:
            new = tuple(seq.tokens[self._delivered : seq.committed])
            do(Deliver(Committed(self.request.request, self._delivered, new, tuple(self._provenance))))
            self._delivered = seq.committed
            self._provenance.clear()

    def _preview(self, do: Callable[[object], None]) -> None:
        assert self.request is not None
        if self.request.preview:
            seq = self.sequence
            do(Deliver(Preview(self.request.request, seq.committed, tuple(seq.pending))))

    def _finish(self, do: Callable[[object], None]) -> None:
        assert self.request is not None
        assert self._ending is not None
        self._deliver_committed(do)
        if self._told_draft:
            do(Send(Finish(self.request.request)))
        do(End(self.request.request, self._ending, len(self.request.prompt), self.counts, self.window))
        self.sequence.drop_pending()
        self._rows.clear()
        self.request = None
        self.state = State.IDLE
        do(Wait(Cause.IDLE))


_HANDLERS: dict[type, Callable[[Coordinator, Any, Callable[[object], None]], None]] = {
    Submit: Coordinator._submit,
    Cancel: Coordinator._cancel,
    Forwarded: Coordinator._forwarded,
    Failed: Coordinator._failed,
    Stalled: Coordinator._stalled,
    Judged: Coordinator._judged,
    Sampled: Coordinator._sampled,
    DraftTokens: Coordinator._draft_tokens,
    DraftJoined: Coordinator._draft_joined,
    DraftGone: Coordinator._draft_gone,
    Resync: Coordinator._resync,
}
