"""The draft's state machines, the counterpart of the coordinator in the target.

Each machine drafts on from the newest prefix that it knows, up to the position that the target
allows. The machines decide nothing about the text, never wait while they may draft, and send
drafted tokens at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, ClassVar

from pearl.errors import RemoteProtocolError
from pearl.protocol.events import Cause, Draft, Drafted, Open, Rollback, Send, Wait
from pearl.protocol.machine import Do, Machine, Table
from pearl.protocol.messages import (
    Begin,
    DraftTokens,
    Error,
    Finish,
    Resync,
    Source,
    Verdict,
)
from pearl.protocol.proposals import Proposal
from pearl.protocol.scheduler import prefill_chunk
from pearl.protocol.sequence import TokenSequence, extend_digest


class DrafterState(Enum):
    IDLE = "idle"  # no request
    DRAFTING = "drafting"  # a forward is running, for the text or for branches
    WAITING = "waiting"  # waits for a verdict: at the look-ahead limit, or ended by the stop policy
    LOST = "lost"  # has requested the whole prefix, because its own differs from the target's


_IDLE = frozenset({DrafterState.IDLE})
_LOST = frozenset({DrafterState.LOST})
_BEGUN = frozenset({DrafterState.DRAFTING, DrafterState.WAITING})

# state -> event -> states that may follow. Messages may come while a forward runs.
TRANSITIONS: dict[DrafterState, dict[type, frozenset[DrafterState]]] = {
    DrafterState.IDLE: {Begin: _BEGUN},
    DrafterState.DRAFTING: {Drafted: _BEGUN | _IDLE | _LOST},
    DrafterState.WAITING: {Begin: _BEGUN, Verdict: _BEGUN | _LOST, Finish: _IDLE},
    DrafterState.LOST: {Begin: _BEGUN, Finish: _IDLE},
}
ANYTIME = (Begin, Verdict, Finish)


class DraftMachine(Machine):
    """Drafts for one request after the other, in one slot.

    Args:
        slot: the slot of the draft model. A request may reuse the KV cache of the slot's previous
            request.
        context: how many tokens a slot holds; positions from `context` on are never drafted.
        machines: the machines of all slots, this one included.
        piece: how many prompt tokens are computed together; see `Capabilities.prompt_piece`.
    """

    role: ClassVar[str] = "draft"
    transitions: ClassVar[Table[Any]] = TRANSITIONS
    anytime: ClassVar[tuple[type, ...]] = ANYTIME

    def __init__(
        self, slot: int, context: int, machines: Sequence[DraftMachine], piece: int
    ) -> None:
        super().__init__()
        self.slot = slot
        self.context = context
        self._machines = machines
        self.state = DrafterState.IDLE
        self.sequence = TokenSequence(piece=piece)
        self.begun: Begin | None = None  # the request being drafted for
        self.last_request = -1  # the request that the slot was last given to
        # The request that the running forward is for; `begun` may be a later one.
        self.computing = -1
        self.epoch = 0
        self.draft_until = 0
        self._lost = False
        # Whether the stop policy ended drafting until all drafted tokens are judged.
        self._paused = False
        self._withheld = -1  # the position for which a token was drafted and not sent
        # Whether no more branches are worth a forward until the next verdict.
        self._is_hedged = False
        self._in_flight = 0  # number of tokens that the running forward was fed
        # Total seconds of the forwards that have searched for the next block so far.
        self._searched = 0.0
        self._hedges = False  # whether the running forward drafts only branches
        # Whether the running forward's tokens would continue an outdated prefix.
        self._overtaken = False
        self._branches: dict[tuple[int, int], tuple[int, ...]] = {}  # tokens sent for each outcome
        self._followed: tuple[int, int] | None = None  # the outcome whose branch the text follows

    # ---- events ----

    def _begin(self, begin: Begin, do: Do) -> None:
        if extend_digest(0, begin.tokens) != begin.digest or not begin.tokens:
            raise RemoteProtocolError(
                f"target sent a prefix of {len(begin.tokens)} tokens (request {begin.request}, epoch {begin.epoch}) "
                "that does not match its digest"
            )
        self.begun = begin
        self.last_request = begin.request
        self.epoch = begin.epoch
        self.draft_until = begin.draft_until
        self._lost = self._paused = self._is_hedged = False
        self._diverge()
        self.sequence.restart(begin.tokens)
        do(Open(begin.tokens, begin.options, self.slot, request=begin.request))
        self._go_on(do)

    def _verdict(self, verdict: Verdict, do: Do) -> None:
        seq = self.sequence
        if self.begun is None or verdict.request != self.begun.request:
            return
        if verdict.epoch < self.epoch:
            return
        if self._lost:
            if verdict.epoch > self.epoch:  # a rejection has overtaken our Resync
                self._lose(verdict, do)
            return
        if verdict.start < seq.committed:
            return
        if verdict.start > seq.committed or not self._apply(verdict):
            self._lose(verdict, do)
            return
        self.draft_until = verdict.draft_until
        self._paused = self._paused and seq.first_pending is not None
        self._is_hedged = False
        self._go_on(do)

    def _finish(self, finish: Finish, do: Do) -> None:
        if self.begun is None or finish.request != self.begun.request:
            return
        self.begun = None
        self._lost = False
        self._diverge()
        self.sequence.drop_pending()
        self._go_on(do)

    def _drafted(self, event: Drafted, do: Do) -> None:
        self.state = DrafterState.WAITING
        if event.failure or self._overtaken:
            self.sequence.cached += event.cached  # to be rolled back
        if event.failure:
            self._give_up(event.failure, do)
        elif self._overtaken:
            pass  # what it drafted would continue an outdated prefix
        elif event.tokens or (event.paused and not self._hedges):
            self._send_drafted(event, do)
            self._prepare(event.branches, do)
        elif self._hedges:
            self._is_hedged = event.paused
            self._prepare(event.branches, do)
        elif self._in_flight == 1:  # the search for a block goes on
            self._searched += event.seconds
        self._go_on(do)

    def _send_drafted(self, event: Drafted, do: Do) -> None:
        """Append the drafted tokens to the text, as pending, and send them."""
        assert self.begun is not None
        start = len(self.sequence.tokens)
        self.sequence.extend(event.tokens)
        self.sequence.feed(event.cached)
        if not self.begun.options.withholds:
            self._paused = event.paused
        elif event.paused:
            self._withheld = start + len(event.tokens)
        else:
            self._withheld = -1
        seconds = 0.0  # unknown: the forward of a whole prefix is no measure of a token's time
        if self._in_flight == 1 and not event.has_prompt:
            seconds = (self._searched + event.seconds) / max(1, len(event.tokens))
        self._searched = 0.0
        message = DraftTokens(
            self.begun.request,
            self.epoch,
            start,
            event.tokens,
            seconds,
            event.rows,
            paused=event.paused,
            known=self.sequence.committed,
            runners_up=event.seen,
        )
        do(Send(message))

    def _prepare(self, branches: tuple[Proposal, ...], do: Do) -> None:
        """Send the tokens of branches, except tokens that were sent before.

        A branch prepares for one token that the target may commit at a position: instead of the
        drafted token, or as a bonus token. Branches for positions that are already committed are
        not sent.
        """
        assert self.begun is not None
        seq = self.sequence
        has_bonus = self.begun.options.prepares_bonus and len(seq.tokens) >= self._until
        # The branches for positions from the prefix to `end` are still open.
        end = len(seq.tokens) + has_bonus
        for branch in branches:
            assert branch.after is not None
            sent = self._branches.get(branch.after, ())
            num_sent = len(sent)
            tokens = branch.tokens[num_sent:]
            is_open = seq.committed <= branch.after[0] < end
            if not tokens or not is_open or branch.tokens[:num_sent] != sent:
                continue
            self._branches[branch.after] = branch.tokens
            takes_runners_up = self.begun.options.sends_runners_up
            message = DraftTokens(
                self.begun.request,
                self.epoch,
                branch.start + num_sent,
                tokens,
                rows=branch.rows[num_sent:],
                source=Source.BRANCH,
                after=branch.after,
                known=seq.committed,
                runners_up=branch.seen[num_sent:] if takes_runners_up else (),
            )
            do(Send(message))

    def _diverge(self) -> None:
        """Drop the tokens being drafted and the branches, because the prefix has changed."""
        self._overtaken = True
        self._paused = False
        self._withheld = -1
        self._searched = 0.0
        self._branches.clear()
        self._followed = None

    def _give_up(self, why: str, do: Do) -> None:
        """Stop drafting for this request after the model failed; send the target the error.

        If the prefix on which the model failed is outdated, drafting goes on from the new prefix.
        """
        self.sequence.drop_pending()
        self.sequence.fed = 0  # the cache may hold what the model failed on
        if self.begun is not None and not self._overtaken:
            do(Send(Error(self.begun.request, "NumericalError", why)))
            self.begun = None
            self._lost = False

    # ---- what to do next ----

    def _go_on(self, do: Do) -> None:
        """Start the next forward, unless one is running or nothing may be drafted."""
        if self.state is DrafterState.DRAFTING:
            return
        seq = self.sequence
        if self.begun is None or self._lost:
            self.state = DrafterState.LOST if self._lost else DrafterState.IDLE
            do(Wait(Cause.IDLE))
        elif self._may_hedge:
            self._forward(do, hedge=self.draft_until - seq.committed)
        elif len(seq.tokens) >= self._until or self._paused or len(seq.tokens) == self._withheld:
            self.state = DrafterState.WAITING
            do(Wait(Cause.WINDOW))
        else:
            self._forward(do)

    def _forward(self, do: Do, hedge: int = 0) -> None:
        """Start a forward that continues the text.

        If `hedge` is positive, the forward continues branches instead of the text. Each branch then
        gets at most `hedge` tokens.
        """
        assert self.begun is not None
        seq = self.sequence
        length = len(seq.tokens)
        budget = 0
        count = length - seq.fed
        if not hedge:
            # If the last token was fed already, it is fed again, because its logits are gone.
            seq.fed = min(seq.fed, length - 1)
            is_alone = all(machine is self or machine.begun is None for machine in self._machines)
            count = prefill_chunk(seq, is_alone=is_alone)
            if seq.fed + count == length:
                budget = self._until - length
        if seq.cached > seq.fed:
            do(Rollback(seq.fed, request=self.begun.request))
        start = seq.fed
        tokens = tuple(seq.feed(count))
        self._in_flight = len(tokens)
        self._hedges = hedge > 0
        self._overtaken = False
        self.computing = self.begun.request
        self.state = DrafterState.DRAFTING
        draft = Draft(
            start,
            tokens,
            budget,
            length - seq.committed,
            hedge,
            bonus=self._hedges and self.begun.options.prepares_bonus,
            prompt=not hedge and start < seq.prompt,
            request=self.begun.request,
        )
        do(draft)

    @property
    def _may_hedge(self) -> bool:
        """Whether the machine has to wait for a verdict and may draft branches meanwhile."""
        assert self.begun is not None
        seq = self.sequence
        is_full = self.draft_until <= len(seq.tokens) or self._paused
        may_go_on = seq.committed < len(seq.tokens) < self.context
        return self.begun.options.branches > 0 and is_full and may_go_on and not self._is_hedged

    @property
    def _until(self) -> int:
        """The first position that may not be drafted."""
        return min(self.draft_until, self.context)

    # ---- following the target ----

    def _apply(self, verdict: Verdict) -> bool:
        """Commit the verdict's tokens; return whether the prefix then has the verdict's digest."""
        seq = self.sequence
        for token in verdict.tokens:
            if seq.pending[:1] == [token]:
                seq.accept()
            else:
                outcome = (seq.committed, token)
                prepared = self._branches.get(outcome, ())
                self._diverge()
                seq.correct(token)
                if prepared:
                    seq.extend(prepared)
                    self._followed = outcome
        if verdict.epoch > self.epoch:  # the target has discarded our pending tokens
            self.epoch = verdict.epoch
            self._overtaken = True
            if self._followed is None or self._followed[0] < verdict.start:
                self._diverge()
                seq.drop_pending()
        if self._branches:
            self._branches = {
                outcome: tokens
                for outcome, tokens in self._branches.items()
                if outcome[0] >= seq.committed
            }
        return seq.digest == verdict.digest

    def _lose(self, verdict: Verdict, do: Do) -> None:
        assert self.begun is not None
        self._lost = True
        self._diverge()
        self._paused = False
        self.sequence.drop_pending()
        self.epoch = verdict.epoch
        do(Send(Resync(self.begun.request, verdict.epoch)))
        self._go_on(do)


DraftMachine.handlers = {
    Begin: DraftMachine._begin,
    Verdict: DraftMachine._verdict,
    Finish: DraftMachine._finish,
    Drafted: DraftMachine._drafted,
}


class Drafter:
    """The draft's state machines, one for each slot of the draft model.

    Args:
        context: how many tokens a slot holds.
        slots: how many requests are drafted for side by side.
        piece: how many prompt tokens are computed together; see `Capabilities.prompt_piece`.
    """

    def __init__(self, context: int, slots: int = 1, piece: int = 1) -> None:
        self.context = context
        self.piece = piece
        self.machines: list[DraftMachine] = []
        for slot in range(slots):
            self.machines.append(DraftMachine(slot, context, self.machines, piece))
        self._turn = 0  # the slot that the next request takes if none is free

    def handle(self, event: object) -> list[object]:
        """Give an event to the machine whose request it names; return the machine's commands.

        A `Begin` of a new request goes to a free machine. Raises the errors of `Machine.handle`.
        """
        if type(event) is Drafted:
            return self._computing(event).handle(event)
        number = getattr(event, "request", None)
        for machine in self.machines:
            if machine.begun is not None and machine.begun.request == number:
                return machine.handle(event)
        if type(event) is Begin:
            return self._free(event).handle(event)
        return self.machines[0].handle(event)  # no slot has this request, as with a late verdict

    def _computing(self, event: Drafted) -> DraftMachine:
        for machine in self.machines:
            if machine.state is DrafterState.DRAFTING and event.request in (machine.computing, -1):
                return machine
        return self.machines[0]

    def _free(self, begin: Begin) -> DraftMachine:
        """Return the machine of a free slot for a request.

        If the request had a slot before, this is the same slot, in which a forward for the request
        may still be running. Otherwise it is the slot whose KV cache holds the longest part of the
        prefix.

        If no slot is free, the target has ended a running request, and the `Finish` message is
        still on its way. The draft cannot know which request has ended. So each such call returns
        the machine of the next slot in turn.
        """
        free = [machine for machine in self.machines if machine.begun is None]
        for machine in free:
            if machine.last_request == begin.request:
                return machine
        if free:
            return max(free, key=lambda machine: machine.sequence.held(begin.tokens))
        self._turn = (self._turn + 1) % len(self.machines)
        return self.machines[self._turn - 1]

    @property
    def state(self) -> DrafterState:
        """The state of the busiest slot; the order is DRAFTING, LOST, WAITING, IDLE."""
        states = [machine.state for machine in self.machines]
        return min(states, key=_BUSIEST.index)


_BUSIEST = (DrafterState.DRAFTING, DrafterState.LOST, DrafterState.WAITING, DrafterState.IDLE)
