"""A benchmark: rows (a method on devices) decode the same tasks in turn, so that a slow minute hits all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Protocol

from pearl.client.conversation import Conversation
from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.errors import ModelError, RequestError
from pearl.lab.bench.emulation import paced, simulated
from pearl.lab.bench.machine import Stolen
from pearl.lab.bench.systems import Decoded, Devices, Generate, OurSystem, System, devices_of
from pearl.lab.bench.tasks import Task
from pearl.lab.experiments.recorded import interpolated
from pearl.lab.theory import MOST_GAMMA, sd_best_gamma
from pearl.metrics import Statistics
from pearl.models.checkpoint import is_toy
from pearl.models.tokenizer import load_tokenizer

AR, SD, PEARL, FIXED = "ar", "sd", "pearl", "pearl, fixed"
_PAIR, _ALL = "pair", "all devices"
_WARM_UP = 16  # tokens
_TUNING_TASKS = 3


@dataclass(frozen=True)
class Row:
    """`system`: which of the systems decodes it. `decoding` means nothing to `generate`."""

    name: str
    system: str
    devices: Devices
    decoding: DecodingConfig = field(default_factory=DecodingConfig)


@dataclass(frozen=True)
class Sample:
    """One task, decoded once by one row: the sums over its turns, but `first_seconds`, which is the first turn's.

    Attributes:
        late_tokens, late_seconds: after each turn's first commit.
        stolen: share of the cores' time that the host took meanwhile.
        of_simulated: times as fast as the same text under the virtual clock, prefill and all; of emulated pairs.
    """

    row: str
    set: str
    task: int
    repeat: int
    tokens: int
    seconds: float
    first_seconds: float
    late_tokens: int
    late_seconds: float
    stolen: float
    judged: int = 0
    accepted: int = 0
    runs: int = 0
    window: int = 0
    of_simulated: float | None = None

    @property
    def rate(self) -> float | None:
        """Tokens a second after the first commit."""
        return self.late_tokens / self.late_seconds if self.late_tokens and self.late_seconds else None


class Watcher(Protocol):
    """Who is told how far it is."""

    def begin(self, what: str, total: int) -> None: ...

    def advance(self, count: int, note: str = "") -> None: ...

    def say(self, message: str) -> None: ...


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        repeats: of all rows, or of each by its name.
        together: all systems loaded at once, taking turns; otherwise one system after the other, for want of memory.
        most_stolen: an emulated run that lost more of the cores' time is repeated; of up to `attempts` the least
            disturbed counts.
    """

    config: EngineConfig
    rows: Sequence[Row]
    tasks: Sequence[Task]
    params: SamplingParams
    raw: bool = False
    repeats: int | Mapping[str, int] = 1
    together: bool = True
    gamma: int | None = None
    most_stolen: float = 0.01
    attempts: int = 1

    def repeats_of(self, row: Row) -> int:
        return self.repeats if isinstance(self.repeats, int) else self.repeats[row.name]


@dataclass
class Measured:
    """`gammas`: of sd, tried: gamma -> tokens a second. `skipped`: tasks whose prompt did not fit the context."""

    samples: list[Sample] = field(default_factory=list)
    gammas: dict[int, float] = field(default_factory=dict)
    gamma: int | None = None
    skipped: list[str] = field(default_factory=list)


def rows_for(config: EngineConfig, baselines: bool, rule: str = "ratio") -> list[Row]:
    """All rows that this pair can have.

    `ar` has the target's devices; a second row has all that PEARL uses, where that is more. So have the outside
    baselines (`baselines`), which know no toy.
    """
    target, draft = devices_of(config)
    both = target | draft
    methods = {
        AR: {"method": "ar"},
        SD: {"method": "sd"},
        "pearl-no-pre-verify": {"method": "pearl-no-pre-verify"},
        "pearl-no-post-verify": {"method": "pearl-no-post-verify"},
        FIXED: {"method": "pearl", "window": "fixed"},
        PEARL: {"method": "pearl"},
    }
    alone = {AR}
    rows = [
        Row(name, _PAIR, target if name in alone else both, DecodingConfig(**settings, rule=rule))
        for name, settings in methods.items()
    ]
    if both != target and not emulated(config):
        rows.append(Row("ar, all devices", _ALL, both, DecodingConfig(method="ar")))
    if baselines:
        rows.append(Row("generate", "generate", target))
        if both != target:
            rows.append(Row("generate, all devices", "generate, all", both))
        rows.append(Row("generate, assisted", "assisted", both))
    return rows


def emulated(config: EngineConfig) -> bool:
    """Whether the pair is toys of given speed, which the virtual clock can run too."""
    toys = is_toy(config.target) and is_toy(config.draft)
    return bool(toys and config.target_pace and config.draft_pace)


def measure(plan: Plan, watcher: Watcher) -> Measured:
    """Raises what starting an engine or decoding may raise."""
    return _Run(plan, watcher).run()


class _Run:
    def __init__(self, plan: Plan, watcher: Watcher) -> None:
        self._plan, self._watcher = plan, watcher
        self._tokenizer, self._defaults = load_tokenizer(plan.config.target)
        probe = [{"role": "user", "content": "."}]
        self._raw = plan.raw or self._tokenizer.apply_chat(probe) is None
        self._rows = list(plan.rows)
        self._measured = Measured()
        self._context: int | None = None  # of our engines; the same for all

    def run(self) -> Measured:
        names = list(dict.fromkeys(row.system for row in self._rows))
        for group in [names] if self._plan.together else [[name] for name in names]:
            with ExitStack() as stack:
                opened = {name: self._opened(name, stack) for name in group}
                systems = {name: system for name, system in opened.items() if system is not None}
                if not systems:
                    continue
                self._warm_up(systems)
                if _PAIR in systems:
                    self._choose_gamma(systems[_PAIR])
                self._take_turns(systems)
        return self._measured

    def _opened(self, name: str, stack: ExitStack) -> System | None:
        self._watcher.say(f"starting {'the pair' if name == _PAIR else name}")
        config = self._plan.config.model_copy(update={"trace": None})
        devices = next(row.devices for row in self._rows if row.system == name)
        system: System
        if name == _PAIR:
            system = OurSystem(config)
        elif name == _ALL:
            ranks = {"target_tp": max(1, len(devices.gpus)), "draft_tp": 1}
            wide = ranks | {"draft": "none", "target_device": devices.name}
            try:
                system = OurSystem(config.model_copy(update=wide))
            except ModelError as error:  # so many GPUs cannot share it
                self._watcher.say(f"{name} is left out: {error}")
                return None
        else:
            system = Generate(config, devices, self._defaults, assisted=name == "assisted")
        stack.callback(system.close)
        if isinstance(system, OurSystem):
            self._context = system.engine.context
        return system

    def _warm_up(self, systems: Mapping[str, System]) -> None:
        short = self._plan.params.model_copy(update={"max_tokens": _WARM_UP})
        for row in self._of(systems):
            list(self._turns(systems[row.system], row.decoding, self._plan.tasks[0], 0, short))

    def _of(self, systems: Mapping[str, System]) -> list[Row]:
        return [row for row in self._rows if row.system in systems]

    # ---- sd at its best ----

    def _choose_gamma(self, pair: System) -> None:
        """By trying: from the best that theory has for the measured speeds, uphill until both neighbours are slower."""
        at = next((i for i, row in enumerate(self._rows) if row.decoding.method == "sd"), None)
        if at is None:
            return
        if self._plan.gamma is None and emulated(self._plan.config):
            best = self._best_in_theory(pair)  # there it is exact, and the runtime's own work does not move it
        else:
            best = self._plan.gamma or self._climb(pair, self._best_in_theory(pair))
        self._measured.gamma = best
        decoding = self._rows[at].decoding.model_copy(update={"gamma": best})
        self._rows[at] = replace(self._rows[at], decoding=decoding)

    def _best_in_theory(self, pair: System) -> int:
        """For the speeds and the acceptance rate of one text."""
        s = self._a_text_of(pair)
        acceptance = s.draft_acceptance_rate or 0.0
        if emulated(self._plan.config):
            timing = paced(self._plan.config)
            return sd_best_gamma(acceptance, timing.t_draft, timing.t_target)
        times = interpolated({int(fed): seconds for fed, seconds in s.t_target.items()})
        return sd_best_gamma(acceptance, s.t_draft, times)

    def _a_text_of(self, pair: System) -> Statistics:
        for task in self._plan.tasks:
            for decoded in self._turns(pair, DecodingConfig(method="pearl"), task, 0, self._plan.params):
                assert decoded.statistics is not None
                return decoded.statistics
        raise RequestError("no prompt fits the context: shorten them, lower max_tokens, or raise max_context")

    def _climb(self, pair: System, start: int) -> int:
        some = _spread(self._plan.tasks, _TUNING_TASKS)
        rates, top, before = self._measured.gammas, start, 0
        while top != before:
            before = top
            new = [g for g in (top - 1, top, top + 1) if 1 <= g <= MOST_GAMMA and g not in rates]
            totals = {g: [0, 0.0] for g in new}
            for task in some:  # the candidates take turns too
                for g in new:
                    decoding = DecodingConfig(method="sd", gamma=g)
                    for decoded in self._turns(pair, decoding, task, 0, self._plan.params):
                        totals[g][0] += decoded.late_tokens
                        totals[g][1] += decoded.late_seconds
            rates |= {g: tokens / seconds if seconds else 0.0 for g, (tokens, seconds) in totals.items()}
            self._watcher.say(f"sd's gamma: {', '.join(f'{g}: {r:.1f} tokens/s' for g, r in sorted(rates.items()))}")
            top = max(rates, key=lambda g: rates[g])
        return top

    # ---- the measurement ----

    def _take_turns(self, systems: Mapping[str, System]) -> None:
        plan = self._plan
        repeats = {row: plan.repeats_of(row) for row in self._of(systems)}
        self._watcher.begin("measuring", sum(repeats.values()) * len(plan.tasks))
        for repeat in range(max(repeats.values())):
            rows = [row for row in repeats if repeats[row] > repeat]
            for i, task in enumerate(plan.tasks):
                start = (i + repeat) % len(rows)  # who comes first changes, so that nobody gains by its place
                for row in rows[start:] + rows[:start]:
                    sample = self._sample(systems[row.system], row, task, repeat)
                    if sample is not None:
                        self._measured.samples.append(sample)
                    note = f"{row.name}, {task.set} {task.number}"
                    self._watcher.advance(1, f"{note}: {sample.rate:.1f} tokens/s" if sample and sample.rate else note)

    def _sample(self, system: System, row: Row, task: Task, repeat: int) -> Sample | None:
        attempts: list[Sample] = []
        while len(attempts) < self._plan.attempts:
            stolen = Stolen()
            turns = list(self._turns(system, row.decoding, task, repeat, self._plan.params))
            if not turns:
                return None
            sample = _sample(row, task, repeat, turns, stolen.share)
            attempts.append(sample)
            if sample.stolen <= self._plan.most_stolen:
                break
        best = min(attempts, key=lambda sample: sample.stolen)  # the least disturbed, not the fastest
        if emulated(self._plan.config):
            params = self._seeded(self._plan.params, task, repeat)
            virtual = simulated(self._plan.config, row.decoding, self._first_prompt(task), params)
            rate = len(virtual.tokens) / virtual.seconds
            best = replace(best, of_simulated=best.tokens / best.seconds / rate)
        return best

    def _first_prompt(self, task: Task) -> list[int]:
        return Conversation(self._tokenizer, self._raw).prompt(task.turns[0])

    def _turns(
        self, system: System, decoding: DecodingConfig, task: Task, repeat: int, params: SamplingParams
    ) -> Iterator[Decoded]:
        """The replies, one after the other; each row answers its own. Ends early where the context is full."""
        conversation, params = Conversation(self._tokenizer, self._raw), self._seeded(params, task, repeat)
        for number, turn in enumerate(task.turns, 1):
            prompt = conversation.prompt(turn)
            if not self._fits(len(prompt), params):
                self._skip(f"{task.set} {task.number}, turn {number}")
                return
            if number == 1:  # the rows decode the same prompts, one after the other
                system.forget(decoding, prompt)
            decoded = system.decode(decoding, prompt, params)
            ended = bool(decoded.tokens) and decoded.tokens[-1] in self._defaults.eos
            reply = self._tokenizer.decode(decoded.tokens)
            conversation.add(turn, prompt, reply, decoded.tokens, "eos" if ended else "length")
            yield decoded

    def _seeded(self, params: SamplingParams, task: Task, repeat: int) -> SamplingParams:
        """One seed a task and repeat, the same for all rows."""
        return params.model_copy(update={"seed": (params.seed or 0) + 1000 * repeat + task.number})

    def _fits(self, prompt: int, params: SamplingParams) -> bool:
        return self._context is None or prompt + (params.max_tokens or 1) <= self._context

    def _skip(self, what: str) -> None:
        if what not in self._measured.skipped:
            self._measured.skipped.append(what)
            self._watcher.say(f"{what} does not fit the context: left out")


def _spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """Some of them, of as many sets as there are."""
    first = {task.set: task for task in reversed(tasks)}
    rest = [task for task in tasks if task not in first.values()]
    return [*reversed(first.values()), *rest][: max(count, len(first))]


def _sample(row: Row, task: Task, repeat: int, turns: Sequence[Decoded], stolen: float) -> Sample:
    known = [t.statistics for t in turns if t.statistics is not None]
    return Sample(
        row=row.name,
        set=task.set,
        task=task.number,
        repeat=repeat,
        tokens=sum(len(t.tokens) for t in turns),
        seconds=sum(t.seconds for t in turns),
        first_seconds=turns[0].first_seconds,
        late_tokens=sum(t.late_tokens for t in turns),
        late_seconds=sum(t.late_seconds for t in turns),
        stolen=stolen,
        judged=sum(s.num_judged_draft_tokens for s in known),
        accepted=sum(s.num_accepted_draft_tokens for s in known),
        runs=sum(sum(s.acceptance_histogram.values()) for s in known),
        window=known[-1].window if known else 0,
    )
