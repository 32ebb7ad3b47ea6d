"""Several requests at once: tokens a second by the number of slots, on real runs and under a virtual clock."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from statistics import median
from typing import Any

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.engine import Engine, Result
from pearl.engine.request import encode, submission
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import TargetExecutor
from pearl.lab.bench.emulation import paced
from pearl.lab.bench.run import Watcher, emulated
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
    """What came of requests that were submitted together. `seconds`: until the last one's last token."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    seconds: float = 0.0


class Loops:
    """Target and draft as their workers' loops run them: a forward is for all requests that are ready, a message that
    comes meanwhile is read at its end, and nothing but forwards takes time.

    Args:
        slots: requests that are worked on side by side.
        context: tokens that the draft's model holds.
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
        """Serves all of them, submitted at once."""
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
        # Of one moment what ends a forward comes last: a loop reads its messages before it begins the next.
        order = next(self._order) + (1 << 40) * ends_forward
        heapq.heappush(self._queue, (round(self._now + after, 12), actor, order, events, ends_forward))

    def _go_on(self, actor: int) -> None:
        todo, ready = self._todo[actor], self._ready[actor]
        while todo:
            command = todo.popleft()
            if isinstance(command, Open) and actor == _DRAFT and ready:  # perhaps another request takes their slot
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
    """What an engine with so many slots made of all texts, submitted together. Medians over the rounds.

    Attributes:
        rate: tokens a second, of all texts together; `rates`: of each round.
        over_one: times that of the first number of slots, round by round.
        of_simulated: the rate over that under the virtual clock, of an emulated pair.
        each: tokens a second of a text while it is written, median over the texts.
        p99: seconds between two tokens of one text that 99% do not exceed, median over the texts.
        whole: seconds from the submission of all to the end of a text, median over the texts.
        differing: texts that are not those of the first number of slots; 0 where a row's bits do not depend on others.
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


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
    found: dict[int, list[tuple[float, list[Result]]]] = {count: [] for count in slots}
    samples = [params.model_copy(update={"sample": number}) for number in range(len(tasks))]
    with ExitStack() as stack:
        engines = {each: stack.enter_context(Engine(config=_with(config, each))) for each in slots}
        prompts = [encode(engines[slots[0]].tokenizer, task.turns[0], raw) for task in tasks]
        watcher.begin("texts", (rounds + 1) * len(slots) * len(tasks))
        for number in range(rounds + 1):  # the first warms up
            at = number % len(slots)
            for each in (*slots[at:], *slots[:at]):
                done = _all_at_once(engines[each], prompts, samples, decoding)
                watcher.advance(len(tasks))
                found[each] += [done] if number else []
    virtual = {
        each: simulated(_with(config, each), decoding, prompts, samples) if emulated(config) else None for each in slots
    }
    first = [tokens / seconds for seconds, tokens in map(_sums, found[slots[0]])]
    alone = [result for _, texts in found[slots[0]] for result in texts]
    served = []
    for each in slots:
        rates = tuple(tokens / seconds for seconds, tokens in map(_sums, found[each]))
        results = [result for _, texts in found[each] for result in texts]
        by_clock = virtual[each]
        ideal = sum(map(len, by_clock.tokens.values())) / by_clock.seconds if by_clock else None
        gaps = [s.itl_p99 for s in (result.statistics for result in results) if s.itl_p99 is not None]
        speeds = [s.tokens_per_second for s in (result.statistics for result in results) if s.tokens_per_second]
        served.append(
            Served(
                each,
                median(rates),
                rates,
                median(rate / one for rate, one in zip(rates, first, strict=True)),
                median(rates) / ideal if ideal else None,
                median(speeds) if speeds else None,
                median(gaps) if gaps else None,
                median(result.statistics.seconds for result in results),
                sum(one.tokens != other.tokens for one, other in zip(results, alone, strict=True)),
            )
        )
    return served


def _with(config: EngineConfig, slots: int) -> EngineConfig:
    return config.model_copy(update={"slots": slots})


def _sums(done: tuple[float, list[Result]]) -> tuple[float, int]:
    seconds, results = done
    return seconds, sum(len(result.tokens) for result in results)


def _all_at_once(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams], decoding: DecodingConfig
) -> tuple[float, list[Result]]:
    """Seconds, and the texts."""
    began = time.monotonic()
    streams = [engine.stream(*asked, decoding=decoding) for asked in zip(prompts, params, strict=True)]
    for stream in streams:
        for _ in stream:
            pass
    return time.monotonic() - began, [stream.result for stream in streams]
