"""Run the state machines of target and draft under a virtual clock: no processes, no waiting.

The state machines, `Coordinator` and `Drafter`, are those that the workers run.

Forwards take the times of `Timing`, messages take `Timing.delay`, and all else takes no time. So a
simulated speed is an upper bound on the speed of the runtime. This module must not know the studies
that use it.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from pearl import errors
from pearl.decoding.shaping import MakeGuide
from pearl.drafting.datastore import Datastore
from pearl.drafting.output_ngrams import Habits
from pearl.drafting.proposer import ModelProposer
from pearl.drafting.step import Step
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import Event, TargetExecutor
from pearl.metrics import Statistics, Stopwatch, fold
from pearl.models.heads.head import Head
from pearl.models.heads.runner import StatesRunner
from pearl.models.runner import ModelRunner
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.drafter import Drafter
from pearl.protocol.events import (
    Cause,
    Deliver,
    Drafted,
    DraftJoined,
    End,
    Forward,
    Forwarded,
    Send,
    Verifier,
    Wait,
)
from pearl.protocol.messages import Committed, Provenance, Submit, Verdict
from pearl.protocol.request import Counts
from pearl.protocol.speeds import Speeds

# Decimals of event times in seconds: five forwards of 10 ms must end exactly with one of 50 ms.
_DIGITS = 12


@dataclass(frozen=True)
class Timing:
    """The virtual times of forwards and messages, in seconds.

    Attributes:
        t_draft: time of a draft forward of one token.
        t_target: number of tokens fed -> time of the target forward.
        delay: time of a message, one way.
        jitter: standard deviation of a forward's time / its mean.
        seed: seed of the jitter.
    """

    t_draft: float
    t_target: Callable[[int], float]
    delay: float = 0.0
    jitter: float = 0.0
    seed: int = 0


@dataclass
class Outcome:
    """The results of one simulated request.

    Attributes:
        seconds: virtual time of the last commit.
        counts: the coordinator's counts, such as of rejections.
        watch: the times that a target worker would measure.
        statistics: the statistics that the user of an engine would receive.
    """

    tokens: list[int] = field(default_factory=list)
    provenance: list[Provenance] = field(default_factory=list)
    seconds: float = 0.0
    counts: Counts = field(default_factory=Counts)
    watch: Stopwatch = field(default_factory=Stopwatch)
    statistics: Statistics = field(default_factory=Statistics)


class Executor(Protocol):
    def execute(self, command: object) -> Event | None: ...


class VerifyingExecutor(Executor, Verifier, Protocol):
    """The target's executor, which also judges and samples."""


class VirtualProposer(ModelProposer):
    """The runtime's proposer, which here finds by virtual forward times how many guesses pay.

    Args:
        seconds: number of tokens fed, in all feeds of a forward together -> seconds of the forward.
    """

    def __init__(
        self, draft: ModelRunner, vocab_size: int, seconds: Callable[[int], float], **options: Any
    ) -> None:
        super().__init__(draft, vocab_size, **options)
        self._seconds = seconds

    def collect(self, launched: Step) -> Drafted:
        began, forwarded, done = launched.marks
        forwarded.at = done.at = began.at + self._seconds(launched.fed)
        return super().collect(launched)


def paired_executors(
    target: ModelRunner,
    draft: ModelRunner,
    datastore: Datastore | None = None,
    t_draft: Callable[[int], float] = lambda fed: 1.0,
    guides: MakeGuide | None = None,
    habits: Habits | None = None,
    head: Head | None = None,
) -> tuple[TargetExecutor, DraftExecutor]:
    """Return the runtime's executors of target and draft, on two runners in this process.

    Args:
        t_draft: number of tokens fed -> seconds of a draft forward. These times decide which guesses and branches pay.
        guides: makes the grammar of a request that has one.
        habits, head: arguments of `TargetExecutor`.
    """
    proposer = VirtualProposer(
        draft, target.vocab_size, t_draft, datastore=datastore, guides=guides
    )
    gives_states = isinstance(draft, StatesRunner)
    executor = TargetExecutor(
        target,
        datastore=datastore,
        guides=guides,
        habits=habits,
        head=head,
        gives_states=gives_states,
    )
    return executor, DraftExecutor(proposer)


def simulate(
    submit: Submit, target: VerifyingExecutor, draft: Executor, timing: Timing, **options: Any
) -> Outcome:
    """Run one request to its end in virtual time. `options` are arguments of `Simulation`."""
    return Simulation(target, draft, timing, **options).run(submit)


class _Scheduled(NamedTuple):
    """An event in the queue. The queue is ordered by time, then actor, `is_own` and number.

    Attributes:
        time: virtual time in seconds.
        actor: 0 for the target, 1 for the draft.
        is_own: whether the event is the end of the actor's own forward, and no message.
        number: a number that rises with each new event.
    """

    time: float
    actor: int
    is_own: bool
    number: int
    event: object


class Simulation:
    """An event queue over two actors: 0 is the target, 1 the draft.

    At equal times the target's events come first. An actor's messages come before the end of its
    own forward, as in a worker, which reads messages between two forwards.

    Args:
        draft_context: number of tokens that the draft's context can hold.
        speeds: estimates of forward times and acceptance. A request updates them, so that later
            requests can use them. By default they are those of `known_speeds`.
    """

    def __init__(
        self,
        target: VerifyingExecutor,
        draft: Executor,
        timing: Timing,
        draft_context: int = 1 << 20,
        speeds: Speeds | None = None,
    ) -> None:
        self._speeds = speeds or known_speeds(timing)
        self._coordinator = Coordinator(target, self._speeds)
        self._drafter = Drafter(draft_context)
        self._executors = (target, draft)
        self._timing = timing
        self._noise = random.Random(timing.seed)
        self._queue: list[_Scheduled] = []
        self._order = count()
        self._now = 0.0
        self._is_done = False
        self._window = 0
        self.outcome = Outcome()
        self._watches = (self.outcome.watch, Stopwatch())  # of target and draft

    def run(self, submit: Submit) -> Outcome:
        self._handle(0, DraftJoined(self._drafter.context))
        self._schedule(0.0, 0, submit, own=False)
        while not self._is_done:
            scheduled = heapq.heappop(self._queue)
            self._now = scheduled.time
            for command in self._handle(scheduled.actor, scheduled.event):
                self._carry_out(scheduled.actor, command)
        for watch in self._watches:
            watch.resume(self._now)
        target_watch, draft_watch = self._watches
        target_watch.draft_waited = draft_watch.waits.get(Cause.WINDOW.value, 0.0)
        self.outcome.statistics = fold(
            self.outcome.counts, target_watch, self._speeds, len(submit.prompt), self._window
        )
        return self.outcome

    def _handle(self, actor: int, event: object) -> list[object]:
        return (self._drafter if actor else self._coordinator).handle(event)

    def _schedule(self, after: float, actor: int, event: object, own: bool) -> None:
        time = round(self._now + after, _DIGITS)
        heapq.heappush(self._queue, _Scheduled(time, actor, own, next(self._order), event))

    def _carry_out(self, actor: int, command: object) -> None:
        # Compare types: this runs for every command, and `match` takes three times as long.
        kind = type(command)
        if kind is Send:
            message = command.message  # type: ignore[attr-defined]
            target, draft = self._executors
            if isinstance(message, Verdict) and isinstance(target, TargetExecutor):
                for states in target.states(message):
                    draft.execute(states)  # without delay: the next forward reads them
            self._schedule(self._timing.delay, 1 - actor, message, own=False)
        elif kind is Wait:
            self._watches[actor].resume(self._now)
            self._watches[actor].wait(command.cause.value, self._now)  # type: ignore[attr-defined]
        elif kind is Deliver:
            self._deliver(command.message)  # type: ignore[attr-defined]
        elif kind is End:
            failure = command.failure  # type: ignore[attr-defined]
            if failure is not None:
                raise getattr(errors, failure.kind)(failure.reason)
            self.outcome.counts = command.counts  # type: ignore[attr-defined]
            self._window = command.window  # type: ignore[attr-defined]
            self._is_done = True
        else:
            self._watches[actor].resume(self._now)
            event, seconds = self._compute(actor, command)
            if event is not None:
                self._schedule(seconds, actor, event, own=True)

    def _deliver(self, message: object) -> None:
        if isinstance(message, Committed):
            self.outcome.tokens += message.tokens
            self.outcome.provenance += message.provenance
            self.outcome.seconds = self._now
            self.outcome.watch.committed(len(message.tokens), self._now)

    def _compute(self, actor: int, command: object) -> tuple[Event | None, float]:
        event = self._executors[actor].execute(command)
        if isinstance(event, Forwarded):
            assert isinstance(command, Forward)
            tokens = command.tokens if event.fed is None else event.fed.tokens
            seconds = self._jittered(self._timing.t_target(len(tokens)))
            at = self._now + seconds
            return Forwarded(seconds, at, fed=event.fed, request=event.request), seconds
        if isinstance(event, Drafted):
            seconds = self._jittered(self._timing.t_draft)
            return replace(event, seconds=seconds, draw=0.0), seconds
        return None, 0.0

    def _jittered(self, seconds: float) -> float:
        if self._timing.jitter:
            seconds *= max(0.1, self._noise.gauss(1.0, self._timing.jitter))
        return seconds


def known_speeds(timing: Timing) -> Speeds:
    """Return what an engine would measure at its start if its forwards took these times."""
    speeds = Speeds()
    speeds.observe_draft(timing.t_draft)
    for fed in (1, 2, 4, 8, 16):
        speeds.observe_target(fed, timing.t_target(fed))
    return speeds


def interpolated(times: dict[int, float]) -> Callable[[int], float]:
    """Return a function from the number of tokens fed to seconds of a forward.

    The function is linear between the sizes in `times`. Beyond the largest size it goes on with the
    mean slope between the smallest size and the largest.

    Args:
        times: number of tokens fed -> measured seconds.
    """
    speeds = Speeds()
    for fed, seconds in times.items():
        speeds.observe_target(fed, seconds)
    return cache(speeds.t_target)


def timing_of(t_draft: float, t_target: float) -> Timing:
    """Return a timing with `t_draft` and `t_target` milliseconds for forwards of any size."""
    return Timing(t_draft / 1e3, lambda fed: t_target / 1e3)
