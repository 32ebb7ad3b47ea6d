"""Several requests at once: tokens per second by the number of slots, in real runs and under a virtual clock."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import median
from typing import Any

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.engine import Engine, Result
from pearl.engine.request import encode, submission
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import TargetExecutor
from pearl.lab.bench.emulation import paced
from pearl.lab.bench.rows import is_emulated
from pearl.lab.bench.runner import Watcher
from pearl.lab.bench.tasks import Task
from pearl.lab.simulate import Timing, VirtualProposer, known_speeds
from pearl.models.replay import load_scripted
from pearl.models.tokenizers import load_tokenizer
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.drafter import Drafter
from pearl.protocol.events import (
    Deliver,
    Draft,
    Drafted,
    DraftJoined,
    End,
    Forward,
    Forwarded,
    Open,
    Send,
    Spread,
    Wait,
)
from pearl.protocol.messages import Committed, Submit

_TARGET, _DRAFT = 0, 1


# ---- under a virtual clock ----


@dataclass
class Together:
    """Texts of requests submitted together, by request. `seconds`: until the last commit."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    seconds: float = 0.0


class Loops:
    """Target and draft as their workers' loops run them. Only forwards take time.

    A forward serves all requests that are ready; a message that arrives meanwhile is read after it.

    Args:
        slots: requests decoded at the same time.
        context: of the draft's model, tokens.
    """

    def __init__(
        self, target: TargetExecutor, draft: DraftExecutor, timing: Timing, slots: int, context: int = 1 << 20
    ) -> None:
        piece = target.runner.capabilities.prompt_piece
        self._machines = Coordinator(known_speeds(timing), slots, piece), Drafter(context, slots, piece)
        self._context = context
        self._target, self._draft, self._timing = target, draft, timing
        self._t_target = timing.t_target
        self._todo: tuple[deque[object], deque[object]] = deque(), deque()
        self._ready: tuple[list[Any], list[Any]] = [], []
        self._inbox: tuple[list[object], list[object]] = [], []
        self._computing = [False, False]
        self._queue: list[tuple[float, int, int, Sequence[object], bool]] = []
        self._order = count()
        self._now, self._left = 0.0, 0
        self._found = Together()

    def run(self, submits: Sequence[Submit]) -> Together:
        """Serve all requests, submitted at once."""
        self._left = len(submits)
        joined = DraftJoined(self._context)
        self._push(0.0, _TARGET, [joined, *submits], ends_forward=False)
        while self._left:
            self._now, actor, _, events, ends_forward = heapq.heappop(self._queue)
            if self._computing[actor] and not ends_forward:
                self._inbox[actor].extend(events)
                continue
            if ends_forward:
                self._computing[actor] = False
                events = [*self._inbox[actor], *events]
                self._inbox[actor].clear()
            for event in events:
                self._todo[actor].extend(self._machines[actor].handle(event))
            self._go_on(actor)
        return self._found

    def _push(self, after: float, actor: int, events: Sequence[object], ends_forward: bool) -> None:
        # At equal times the end of a forward comes last: a loop reads its messages before it begins the next forward.
        order = next(self._order) + (1 << 40) * ends_forward
        heapq.heappush(self._queue, (round(self._now + after, 12), actor, order, events, ends_forward))

    def _go_on(self, actor: int) -> None:
        todo, ready = self._todo[actor], self._ready[actor]
        while todo:
            command = todo.popleft()
            if isinstance(command, Open) and actor == _DRAFT and ready:  # another request may take their slot
                todo.appendleft(command)
                break
            self._carry_out(actor, command)
        if ready:
            self._compute(actor)

    def _carry_out(self, actor: int, command: object) -> None:
        match command:
            case Send(message):
                self._push(self._timing.delay, 1 - actor, [message], ends_forward=False)
            case Deliver(Committed(request, _, tokens)):
                self._found.tokens.setdefault(request, []).extend(tokens)
                self._found.seconds = self._now
            case End():
                self._left -= 1
            case Deliver() | Wait():
                pass
            case Forward() | Draft():
                self._ready[actor].append(command)
            case Spread(everywhere):
                self._t_target = (everywhere and self._timing.t_spread) or self._timing.t_target
            case _:
                event = (self._draft if actor else self._target).execute(command)
                if event is not None:
                    self._todo[actor].extend(self._machines[actor].handle(event))

    def _compute(self, actor: int) -> None:
        commands = list(self._ready[actor])
        self._ready[actor].clear()
        self._computing[actor] = True
        fed = sum(len(command.tokens) for command in commands)
        events: list[Forwarded] | list[Drafted]
        if actor == _TARGET:
            seconds = self._t_target(fed)
            forwarded = self._target.forward(commands)
            events = [replace(one, seconds=seconds, at=self._now + seconds) for one in forwarded]
        else:
            drafted = self._draft.draft(commands)
            seconds = self._timing.draft(fed)
            events = [replace(one, seconds=seconds, draw=0.0) for one in drafted]
        self._push(seconds, actor, events, ends_forward=True)


def simulated(
    config: EngineConfig, decoding: DecodingConfig, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> Together:
    """The texts of an emulated pair, under the virtual clock."""
    target = load_scripted(config.target, "target", config.max_context, config.slots)
    draft = load_scripted(config.draft, "draft", config.max_context, config.slots)
    _, defaults = load_tokenizer(config.target)
    timing = paced(config)
    proposer = VirtualProposer(draft, target.vocab_size, timing.draft, texts=config.slots)
    submits = [
        submission(number, prompt, target.context, each, defaults, decoding)
        for number, (prompt, each) in enumerate(zip(prompts, params, strict=True), start=1)
    ]
    return Loops(TargetExecutor(target), DraftExecutor(proposer), timing, config.slots, draft.context).run(submits)


# ---- real runs ----


@dataclass(frozen=True)
class Served:
    """All texts, submitted together to an engine with this number of slots. Medians over the rounds.

    Attributes:
        rate: tokens per second, of all texts together; `rates`: of each round.
        over_one: rate / rate with the first number of slots, round by round.
        of_simulated: rate / rate under the virtual clock; emulated pairs only.
        each: tokens per second of one text after its first commit, median over the texts.
        p99: inter-token latency, seconds, of one text, median over the texts.
        whole: seconds from the submission of all to the end of a text, median over the texts.
        differing: texts that differ from those with the first number of slots; 0 where a row's bits do not depend on
            other rows.
    """

    slots: int
    rate: float
    rates: tuple[float, ...]
    over_one: float
    of_simulated: float | None
    each: float | None
    p99: float | None
    whole: float
    differing: int


_Round = tuple[float, list[Result]]  # seconds, and the texts


def measure_slots(
    config: EngineConfig,
    decoding: DecodingConfig,
    params: SamplingParams,
    tasks: Sequence[Task],
    slots: Sequence[int],
    rounds: int,
    raw: bool,
    watcher: Watcher,
) -> list[Served]:
    """All numbers of slots in turns, each on an engine of its own; text n has the n-th sample of the seed."""
    done: dict[int, list[_Round]] = {each: [] for each in slots}
    samples = [params.model_copy(update={"sample": number}) for number in range(len(tasks))]
    with ExitStack() as stack:
        engines = {each: stack.enter_context(Engine(config=_with(config, each))) for each in slots}
        prompts = [encode(engines[slots[0]].tokenizer, task.turns[0], raw) for task in tasks]
        watcher.begin("texts", (rounds + 1) * len(slots) * len(tasks))
        for number in range(rounds + 1):  # the first warms up
            at = number % len(slots)
            for each in (*slots[at:], *slots[:at]):
                found = _all_at_once(engines[each], prompts, samples, decoding)
                watcher.advance(len(tasks))
                done[each] += [found] if number else []
    virtual = {
        each: simulated(_with(config, each), decoding, prompts, samples) for each in slots if is_emulated(config)
    }
    return [_served(each, done[each], done[slots[0]], virtual.get(each)) for each in slots]


def _served(slots: int, rounds: Sequence[_Round], first: Sequence[_Round], virtual: Together | None) -> Served:
    rates = tuple(map(_rate, rounds))
    results = [result for _, texts in rounds for result in texts]
    others = [result for _, texts in first for result in texts]
    ideal = sum(map(len, virtual.tokens.values())) / virtual.seconds if virtual else None
    latencies = [s.itl_p99 for s in (result.statistics for result in results) if s.itl_p99 is not None]
    speeds = [s.tokens_per_second for s in (result.statistics for result in results) if s.tokens_per_second]
    return Served(
        slots=slots,
        rate=median(rates),
        rates=rates,
        over_one=median(rate / one for rate, one in zip(rates, map(_rate, first), strict=True)),
        of_simulated=median(rates) / ideal if ideal else None,
        each=median(speeds) if speeds else None,
        p99=median(latencies) if latencies else None,
        whole=median(result.statistics.seconds for result in results),
        differing=sum(one.tokens != other.tokens for one, other in zip(results, others, strict=True)),
    )


def _rate(done: _Round) -> float:
    seconds, results = done
    return sum(len(result.tokens) for result in results) / seconds


def _with(config: EngineConfig, slots: int) -> EngineConfig:
    return config.model_copy(update={"slots": slots})


def _all_at_once(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams], decoding: DecodingConfig
) -> _Round:
    began = time.monotonic()
    streams = [engine.stream(*asked, decoding=decoding) for asked in zip(prompts, params, strict=True)]
    for stream in streams:
        for _ in stream:
            pass
    return time.monotonic() - began, [stream.result for stream in streams]
