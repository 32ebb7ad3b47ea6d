"""The same coordinator and drafter under a virtual clock: no processes, no waiting, the same decisions.

Everything but a forward takes no time; a message takes `Timing.delay`.  So a simulation is what the protocol could
reach at best with given models, and the bar that the real runtime is measured against.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch

from pearl.config import EngineConfig
from pearl.decoding.shaping import MakeGuide
from pearl.drafting.datastore import Datastore
from pearl.drafting.habits import Habits
from pearl.drafting.model import ModelProposer
from pearl.drafting.proposer import Launched
from pearl.drafting.step import Step
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import Event, TargetExecutor
from pearl.metrics import Stopwatch
from pearl.models.runner import Feed, ModelRunner, WrappedRunner
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.drafter import Drafter
from pearl.protocol.events import (
    Cause,
    Deliver,
    Draft,
    Drafted,
    DraftJoined,
    End,
    Forward,
    Forwarded,
    Judge,
    Judged,
    Phase,
    Sample,
    Sampled,
    Send,
    Spread,
    Wait,
)
from pearl.protocol.messages import Committed, Provenance, Submit, Verdict
from pearl.protocol.proposals import Proposal
from pearl.protocol.request import Counts
from pearl.protocol.window import Speeds
from pearl.trace.recorder import Recorder, where_and_what
from pearl.trace.tracer import Tracer, identity

_DIGITS = 12  # of a second: five forwards of 10 ms and one of 50 ms end at the same time, not one rounding error apart


@dataclass(frozen=True)
class Timing:
    """Seconds. `t_target`: of a forward fed n tokens; `t_spread`: with the draft's cores too, None where that changes
    nothing. `t_draft_fed`: likewise of the draft, guesses and branches counted; None: `t_draft`, whatever it is fed.
    `jitter`: standard deviation, as a share of each forward.
    """

    t_draft: float
    t_target: Callable[[int], float]
    delay: float = 0.0
    jitter: float = 0.0
    seed: int = 0
    t_spread: Callable[[int], float] | None = None
    t_draft_fed: Callable[[int], float] | None = None

    def draft(self, fed: int) -> float:
        """Of a draft forward fed `fed` tokens."""
        return self.t_draft if self.t_draft_fed is None else self.t_draft_fed(fed)


@dataclass
class Outcome:
    """One simulated request. `seconds` runs from the first forward to the last commit; `watch`: as a worker's."""

    tokens: list[int] = field(default_factory=list)
    provenance: list[Provenance] = field(default_factory=list)
    seconds: float = 0.0
    target_steps: int = 0  # forwards after the prefill
    counts: Counts = field(default_factory=Counts)
    watch: Stopwatch = field(default_factory=Stopwatch)
    window: int = 0  # c as last used


class Executor(Protocol):
    def execute(self, command: object) -> Event | None: ...


class CoinTarget:
    """Accepts the draft's token at a position or not, whatever the token.

    A position's coin depends on (seed, position) alone.  So methods, windows and delays are compared on the same coins,
    and a text whose draft was right at known positions can be decoded again by another method.

    Args:
        acceptance: the rate of the coins: the i.i.d. model of the papers.
        known: position -> whether the draft's token there is right; coins are tossed for the others.
    """

    def __init__(self, acceptance: float, seed: int = 0, known: Mapping[int, bool] | None = None) -> None:
        self._acceptance = acceptance
        self._random = random.Random(seed)
        self._known = known or {}
        self._right = bytearray()  # by position, as far as was asked

    def execute(self, command: object) -> Event | None:
        match command:
            case Forward():
                return Forwarded(request=command.request)
            case Judge(start, tokens):
                end = start + len(tokens)
                self._toss(end)
                wrong = self._right.find(0, start, end)
                accepted, token = (len(tokens), None) if wrong < 0 else (wrong - start, 1)
                return Judged(accepted, token, request=command.request)
            case Sample():
                return Sampled((0,), request=command.request)
        return None

    def _toss(self, end: int) -> None:
        for position in range(len(self._right), end):
            coin = self._random.random() < self._acceptance
            self._right.append(self._known.get(position, coin))


class CoinDraft:
    """Drafts token 0 for ever, and prepares for nothing else."""

    def execute(self, command: object) -> Event | None:
        match command:
            case Draft(budget=budget, hedge=hedge):
                return Drafted((0,) if budget else (), paused=hedge > 0, request=command.request)
        return None


class ForesightDraft:
    """Drafts token 0 for ever, and a window for what a `CoinTarget` says instead: for a share of the positions.

    Whether a position is one of these depends on (seed, position) alone.

    Args:
        foreseen: the share. filled: tokens of such a window. limit: the first position that nobody drafts.
    """

    def __init__(self, foreseen: float, filled: int, limit: int, seed: int = 0) -> None:
        luck = random.Random(seed)
        self._foreseen = [luck.random() < foreseen for _ in range(limit)]
        self._filled, self._limit = filled, limit

    def execute(self, command: object) -> Event | None:
        match command:
            case Draft(start, tokens, budget, pending):
                end = start + len(tokens)
                branches = [self._branch(position) for position in range(end - pending, end + 1)] if budget else []
                found = tuple(branch for branch in branches if branch is not None)
                paused = command.hedge > 0  # a branch comes whole, with the forward before it
                return Drafted((0,) if budget else (), paused=paused, branches=found, request=command.request)
        return None

    def _branch(self, position: int) -> Proposal | None:
        filled = min(self._filled, self._limit - position - 1)
        if filled < 1 or not self._foreseen[position]:
            return None
        return Proposal(position + 1, (0,) * filled, after=(position, 1))


class LookupDraft:
    """Drafts token 0 for ever, several by one forward where what it looks up is what it says itself.

    Args:
        hit: how often that is, at each position that a lookup has reached. most: tokens looked up for a forward.
        limit: the first position that nobody drafts.
    """

    def __init__(self, hit: float, most: int, limit: int, seed: int = 0) -> None:
        luck = random.Random(seed)
        self._hits = [luck.random() < hit for _ in range(limit)]
        self._most = most

    def execute(self, command: object) -> Event | None:
        match command:
            case Draft(start, tokens, budget):
                end, drafted = start + len(tokens), min(budget, 1)
                while 0 < drafted < min(budget, 1 + self._most) and self._hits[end + drafted]:
                    drafted += 1
                cached, paused = max(0, drafted - 1), command.hedge > 0
                return Drafted((0,) * drafted, cached=cached, paused=paused, request=command.request)
        return None


class VirtualProposer(ModelProposer):
    """The proposer, whose forwards last as long as the virtual clock says: it feeds what pays at *these* times.

    Args:
        seconds: of a forward by the number of tokens fed, all its feeds together.
    """

    def __init__(self, draft: ModelRunner, vocab_size: int, seconds: Callable[[int], float], **options: Any) -> None:
        super().__init__(_Counting(draft), vocab_size, **options)
        self._seconds = seconds

    def collect(self, launched: Launched) -> Drafted:
        assert isinstance(launched, Step)
        assert isinstance(self.runner, _Counting)
        began, forwarded, done = launched.marks
        forwarded.at = done.at = began.at + self._seconds(self.runner.fed)
        return super().collect(launched)


class _Counting(WrappedRunner):
    """Remembers how many tokens the last forward was fed."""

    fed = 1

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        self.fed = sum(len(feed.tokens) for feed in feeds)
        return super().forward(feeds)


def paired_executors(
    target: ModelRunner,
    draft: ModelRunner,
    datastore: Datastore | None = None,
    t_draft: Callable[[int], float] = lambda fed: 1.0,
    noted: bool = False,
    guides: MakeGuide | None = None,
    habits: Habits | None = None,
) -> tuple[TargetExecutor, DraftExecutor]:
    """Executors on two runners in this process; draft distributions are handed over as they are.

    Args:
        t_draft: see `Timing.draft`; which guesses and branches pay depends on it. Any constant is as good as another.
        noted: see `ModelProposer`.
        guides: of texts that are held to a grammar.
        habits: of the target.
    """
    proposer = VirtualProposer(
        draft, target.vocab_size, t_draft, datastore=datastore, noted=lambda: noted, guides=guides
    )
    executor = TargetExecutor(target, datastore=datastore, guides=guides, habits=habits)
    return executor, DraftExecutor(proposer)


def simulate(
    submit: Submit,
    target: Executor,
    draft: Executor,
    timing: Timing,
    *,
    draft_context: int = 1 << 20,
    speeds: Speeds | None = None,
    parts: tuple[Path, Path] | None = None,
) -> Outcome:
    """Runs one request to its end in virtual time.

    Args:
        parts: where to record what target and draft do, as workers would: `trace.chrome` makes a trace of them.
    """
    if parts is None:
        return _Simulation(target, draft, timing, draft_context, speeds).run(submit)
    traced = _TracedSimulation(target, draft, timing, draft_context, speeds)
    return traced.record(submit, parts)


class _Simulation:
    """An event queue over two actors. At equal times the target comes first, and messages before one's own forward:
    a worker looks at its messages whenever a forward is done, before it starts the next.
    """

    def __init__(
        self,
        target: Executor,
        draft: Executor,
        timing: Timing,
        draft_context: int,
        speeds: Speeds | None,
    ) -> None:
        self._coordinator = Coordinator(speeds or known_speeds(timing))
        self._drafter = Drafter(draft_context)
        self._executors = (target, draft)
        self._timing = timing
        self._noise = random.Random(timing.seed)
        self._queue: list[tuple[float, int, bool, int, object]] = []  # time, actor, own forward, order
        self._order = count()
        self._now = 0.0
        self._spread(self._coordinator.speeds.choice.is_spread)  # as the request before has left it
        self._done = False
        self._waiting: list[tuple[Cause, float] | None] = [None, None]  # of each actor: for what, since when
        self.outcome = Outcome()

    def run(self, submit: Submit) -> Outcome:
        self._handle(0, DraftJoined(self._drafter.context))
        self._schedule(0.0, 0, submit, own=False)
        while not self._done:
            self._now, actor, _, _, event = heapq.heappop(self._queue)
            self._end_wait(actor)
            for command in self._handle(actor, event):
                self._carry_out(actor, command)
        self._end_wait(1)
        self.outcome.target_steps = sum(
            n for phase, n in self.outcome.counts.steps.items() if phase is not Phase.PREFILL
        )
        return self.outcome

    def _handle(self, actor: int, event: object) -> list[object]:
        return (self._drafter if actor else self._coordinator).handle(event)

    def _schedule(self, after: float, actor: int, event: object, own: bool) -> None:
        time = round(self._now + after, _DIGITS)
        heapq.heappush(self._queue, (time, actor, own, next(self._order), event))

    def _carry_out(self, actor: int, command: object) -> None:
        kind = type(command)  # a chain of `case` patterns takes three times as long, and this runs for every command
        if kind is Send:
            self._schedule(self._timing.delay, 1 - actor, command.message, own=False)  # type: ignore[attr-defined]
        elif kind is Wait:
            self._waiting[actor] = command.cause, self._now  # type: ignore[attr-defined]
        elif kind is Deliver:
            self._deliver(command.message)  # type: ignore[attr-defined]
        elif kind is End:
            self.outcome.counts, self.outcome.window = command.counts, command.window  # type: ignore[attr-defined]
            self._done = True
        else:
            self._waiting[actor] = None
            event, seconds = self._compute(actor, command)
            if event is not None:
                self._schedule(seconds, actor, event, own=True)

    def _deliver(self, message: object) -> None:
        if isinstance(message, Committed):
            self.outcome.tokens += message.tokens
            self.outcome.provenance += message.provenance
            self.outcome.seconds = self._now
            self.outcome.watch.committed(len(message.tokens), self._now)

    def _end_wait(self, actor: int) -> None:
        """Adds up the wait that an event has broken; the actor goes on waiting unless it then begins something."""
        waiting = self._waiting[actor]
        if waiting is None:
            return
        cause, since = waiting
        self._waiting[actor] = cause, self._now
        if actor == 0:
            self.outcome.watch.waited(cause.value, self._now - since)
        elif cause is Cause.WINDOW:
            self.outcome.watch.draft_waited += self._now - since

    def _compute(self, actor: int, command: object) -> tuple[Event | None, float]:
        event = self._executors[actor].execute(command)
        seconds = self._seconds(command, event)
        if isinstance(event, Forwarded):
            self.outcome.watch.busy += seconds
            event = Forwarded(seconds, self._now + seconds, request=event.request)
        elif isinstance(event, Drafted):
            event = replace(event, seconds=seconds, draw=0.0)
        return event, seconds

    def _spread(self, everywhere: bool) -> None:
        self._t_target = (everywhere and self._timing.t_spread) or self._timing.t_target

    def _seconds(self, command: object, event: object) -> float:
        match command:
            case Forward(tokens=tokens):
                seconds = self._t_target(len(tokens))
            case Spread(everywhere):
                self._spread(everywhere)
                return 0.0
            case Draft():
                assert isinstance(event, Drafted)
                # Who drafts without a model says nothing of what it was fed: a token.
                seconds = (self._timing.t_draft_fed and event.seconds) or self._timing.t_draft
            case _:
                return 0.0
        return seconds * max(0.1, self._noise.gauss(1.0, self._timing.jitter)) if self._timing.jitter else seconds


class _TracedSimulation(_Simulation):
    """Records as two workers would; their clocks are the virtual one."""

    def record(self, submit: Submit, parts: tuple[Path, Path]) -> Outcome:
        self._tracers = [self._tracer(path, role) for path, role in zip(parts, ("target", "draft"), strict=True)]
        target, draft = self._tracers
        self._deciders = [target.deciding(self._coordinator), draft.deciding(self._drafter)]
        self._free_since: list[int | None] = [0, 0]  # None: in a forward
        outcome = self.run(submit)
        for tracer in self._tracers:
            tracer.stop()
        return outcome

    def _tracer(self, path: Path, role: str) -> Tracer:
        config = EngineConfig(target="virtual", draft="virtual").model_dump()
        header = {"role": role, "run": "virtual", "config": config}
        return Tracer(Recorder(path, header | where_and_what(), clock=lambda: round(self._now * 1e9)))

    def _handle(self, actor: int, event: object) -> list[object]:
        since, tracer = self._free_since[actor], self._tracers[actor]
        if since is not None and since < tracer.clock():
            tracer.waited(since, tracer.clock(), event)
        if isinstance(event, Verdict):
            tracer.note("communication", "read", tracer.clock(), messages=[identity(event)])
        if since is not None or isinstance(event, (Forwarded, Drafted)):
            self._free_since[actor] = tracer.clock()
        return self._deciders[actor](event)

    def _carry_out(self, actor: int, command: object) -> None:
        if isinstance(command, Send):
            tracer = self._tracers[actor]
            tracer.note("communication", "send", tracer.clock(), message=identity(command.message))
        super()._carry_out(actor, command)

    def _compute(self, actor: int, command: object) -> tuple[Event | None, float]:
        event, seconds = super()._compute(actor, command)
        start = self._tracers[actor].clock()
        self._tracers[actor].computed(command, event, start, round((self._now + seconds) * 1e9))
        if isinstance(event, (Forwarded, Drafted)):
            self._free_since[actor] = None
        return event, seconds


def known_speeds(timing: Timing) -> Speeds:
    """Speeds as the start-up measurement would have found them."""
    speeds = Speeds()
    speeds.observe_draft(timing.t_draft)
    for fed in (1, 2, 4, 8, 16):
        speeds.observe_target(fed, timing.t_target(fed))
    return speeds
