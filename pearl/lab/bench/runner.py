"""Run a benchmark. All rows decode the first task, then all decode the second, and so on.

So a slow minute of the machine affects all rows.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from operator import attrgetter
from statistics import median
from typing import Any

from pearl.cache import Watcher
from pearl.config import EngineConfig, RequestOptions
from pearl.engine import Engine
from pearl.engine.stream import Result
from pearl.errors import ConfigError
from pearl.lab.bench.rows import PAIR, SD, SSD, Row, device_of_row
from pearl.lab.bench.tasks import Task
from pearl.metrics import Sums
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.spec.stops import FIXED as FIXED_STOP
from pearl.text.conversation import Conversation

_WARM_UP = 16  # tokens
_MOST_GAMMA = 64
_GAMMA_TASKS = 3  # at least this many tasks are decoded to find the fastest gamma of sd


@dataclass
class TaskSample(Sums):
    """One task, decoded once by one row.

    Attributes:
        texts: the statistics of each turn.
        row: name of the row.
        set: name of the task's set of prompts.
        task: number of the task within its set, from 1.
        results: the result of each turn, with its tokens.
    """

    row: str
    set: str
    task: int
    results: Sequence[Result] = ()

    @property
    def tokens(self) -> int:
        return int(self.total("num_generated_tokens"))

    def as_dict(self) -> dict[str, Any]:
        """Return the sample for JSON: the statistics of its turns, without their tokens."""
        return {
            "row": self.row,
            "set": self.set,
            "task": self.task,
            "texts": self.texts,
            "late_tokens": self.total("late_tokens"),
            "late_seconds": self.total("late_seconds"),
        }

    @property
    def first_seconds(self) -> float:
        """Seconds to the first token of the first turn, without the time in the queue."""
        turn = self.texts[0]
        return turn.seconds_to_first_token - turn.queue_seconds

    @property
    def itl_p50(self) -> float | None:
        """Inter-token latency in seconds: the median of the turns' p50 values; None if unknown."""
        return median_of(map(attrgetter("itl_p50"), self.texts))

    @property
    def itl_p99(self) -> float | None:
        """Inter-token latency in seconds: the largest of the turns' p99 values; None if unknown."""
        latencies = [turn.itl_p99 for turn in self.texts if turn.itl_p99 is not None]
        return max(latencies, default=None)

    @property
    def bias(self) -> float:
        """The sum of `Statistics.bias` over the turns."""
        return sum(turn.bias or 0.0 for turn in self.texts)


def median_of(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if all are."""
    measured = [value for value in values if value is not None]
    if not measured:
        return None
    return median(measured)


@dataclass(frozen=True)
class Plan:
    """The settings of a benchmark.

    Attributes:
        config: the pair.
        rows: the ways to decode each task.
        params: options of all rows, except those that a row replaces.
        raw: whether to take prompts without a chat template.
        together: whether to start the engines of all systems (see `Row`) at once, so that all rows
            take turns. Otherwise one engine runs after the other, which needs less memory.
        gamma: gamma of the rows of sd and ssd that set none; None to measure the fastest gamma and
            use that.
    """

    config: EngineConfig
    rows: Sequence[Row]
    tasks: Sequence[Task]
    params: RequestOptions
    raw: bool = False
    together: bool = True
    gamma: int | None = None

    def params_of(self, row: Row) -> RequestOptions:
        return self.params.overridden_by(row.options)


@dataclass
class Measured:
    """The results of a benchmark.

    Attributes:
        gammas: gamma -> tokens per second of sd, for each gamma that was tried.
        gamma: the gamma of sd and ssd: the planned one, otherwise the fastest; None if no row needed one.
        skipped: turns left out because they do not fit the context.
    """

    samples: list[TaskSample] = field(default_factory=list)
    gammas: dict[int, float] = field(default_factory=dict)
    gamma: int | None = None
    skipped: list[str] = field(default_factory=list)

    def of(self, row: str) -> list[TaskSample]:
        """Return the samples of a row."""
        return [sample for sample in self.samples if sample.row == row]


def measure(plan: Plan, watcher: Watcher) -> Measured:
    """Run the benchmark. Raises `ConfigError`, and whatever starting an engine or decoding raises."""
    if plan.config.habits:
        raise ConfigError(
            "--habits: here the same texts are decoded again and again, and would be known: leave it out"
        )
    return _Run(plan, watcher).run()


class _Run:
    def __init__(self, plan: Plan, watcher: Watcher) -> None:
        self._plan = plan
        self._watcher = watcher
        self._tokenizer, _ = load_tokenizer(plan.config.target)
        self._raw = plan.raw or not self._tokenizer.chat_template
        self._rows = list(plan.rows)
        self._measured = Measured()

    def run(self) -> Measured:
        systems: dict[str, Row] = {}  # system -> its first row
        for row in self._rows:
            systems.setdefault(row.system, row)
        groups = [list(systems)]
        if not self._plan.together:
            groups = [[system] for system in systems]
        for group in groups:
            with ExitStack() as stack:
                engines = {}
                for system in group:
                    self._watcher.say(f"starting {system}")
                    engine = Engine(config=self._config(systems[system]))
                    engines[system] = stack.enter_context(engine)
                self._warm_up(engines)
                if PAIR in engines:
                    self._choose_gamma(engines[PAIR])
                self._take_turns(engines)
        return self._measured

    def _config(self, row: Row) -> EngineConfig:
        """Return the configuration of the engine that decodes a row."""
        config = self._plan.config
        # `forget` empties one slot. Another slot could still hold the prompt, from an earlier row.
        changes: dict[str, Any] = {"trace": None, "slots": 1}
        if row.system != PAIR:
            changes |= {"draft": "none", "target_device": device_of_row(row, config).name}
        return config.model_copy(update=changes)

    def _warm_up(self, engines: Mapping[str, Engine]) -> None:
        for row in self._rows_on(engines):
            short = self._plan.params_of(row).changed(max_tokens=_WARM_UP)
            list(self._decode_turns(engines[row.system], self._plan.tasks[0], short))

    def _rows_on(self, engines: Mapping[str, Engine]) -> list[Row]:
        return [row for row in self._rows if row.system in engines]

    # ---- the gamma of sd ----

    def _choose_gamma(self, pair: Engine) -> None:
        """Set the gamma of the rows of sd and ssd: the plan's or, if that is None, the fastest.

        Rows that set a gamma keep it. Rows with a stop policy get none: the policy ends their
        windows.
        """
        for i, row in enumerate(self._rows):
            options = row.options
            if options.gamma or options.method not in (SD, SSD) or options.draft_stop != FIXED_STOP:
                continue
            if self._measured.gamma is None:
                self._measured.gamma = self._plan.gamma or self._fastest_gamma(pair, row)
            self._rows[i] = replace(row, options=options.changed(gamma=self._measured.gamma))

    def _fastest_gamma(self, pair: Engine, row: Row) -> int:
        """Try gammas 1, 2, ... until the two after the fastest were slower; return the fastest.

        The trial decodes by method sd, with the other options of `row`, a row of sd or ssd.
        """
        count = max(_GAMMA_TASKS, len(set(map(attrgetter("set"), self._plan.tasks))))
        # Sorted by number, so that the first task of each set is one of these tasks.
        tasks = sorted(self._plan.tasks, key=attrgetter("number"))[:count]
        rates = self._measured.gammas
        best = 1
        for gamma in range(1, _MOST_GAMMA + 1):
            params = self._plan.params_of(row).changed_method(SD).changed(gamma=gamma)
            texts = []
            for task in tasks:
                for turn in self._decode_turns(pair, task, params):
                    texts.append(turn.statistics)
            rates[gamma] = Sums(texts=texts).rate or 0.0
            self._watcher.say(f"sd, gamma {gamma}: {rates[gamma]:.1f} tokens/s")
            best = max(rates, key=rates.__getitem__)
            if gamma == best + 2:
                break
        return best

    # ---- the measurement ----

    def _take_turns(self, engines: Mapping[str, Engine]) -> None:
        tasks = self._plan.tasks
        rows = self._rows_on(engines)
        self._watcher.begin("measuring", len(rows) * len(tasks))
        for i, task in enumerate(tasks):
            start = i % len(rows)  # rotate the order of the rows, so that it favours none
            for row in rows[start:] + rows[:start]:
                sample = self._measure_task(engines[row.system], row, task)
                note = f"{row.name}, {task.set} {task.number}"
                if sample is not None:
                    self._measured.samples.append(sample)
                    if sample.rate:
                        note += f": {sample.rate:.1f} tokens/s"
                self._watcher.advance(1, note)

    def _measure_task(self, engine: Engine, row: Row, task: Task) -> TaskSample | None:
        turns = list(self._decode_turns(engine, task, self._plan.params_of(row)))
        if not turns:
            return None
        texts = [turn.statistics for turn in turns]
        return TaskSample(row.name, task.set, task.number, turns, texts=texts)

    def _decode_turns(self, engine: Engine, task: Task, params: RequestOptions) -> Iterator[Result]:
        """Decode the turns of a task, each with the earlier turns and replies before it.

        At a turn that does not fit the context, decoding stops and the turn is noted as skipped.
        """
        conversation = Conversation(self._tokenizer, self._raw)
        seed = (self._plan.params.seed or 0) + task.number  # the same for all rows
        params = params.changed(seed=seed)
        for number, turn in enumerate(task.turns, 1):
            prompt = conversation.prompt(turn)
            if len(prompt) + (params.max_tokens or 1) > engine.context:
                label = f"{task.set} {task.number}, turn {number}"
                if label not in self._measured.skipped:
                    self._measured.skipped.append(label)
                    self._watcher.say(f"{label} does not fit the context: left out")
                return
            if number == 1:  # earlier rows have decoded this prompt: do not reuse their KV
                forget(engine, params, prompt)
            (result,) = engine.generate(prompt, params)
            conversation.add(turn, self._tokenizer.decode(result.tokens))
            yield result


def forget(engine: Engine, options: RequestOptions, prompt: Sequence[int]) -> None:
    """Make sure that no KV cache holds a beginning of `prompt`.

    To this end the engine generates a short text after another prompt. That prompt is a single
    token, which is not the first token of `prompt`. The text is decoded with `options`, but
    greedily and without a grammar.
    """
    params = options.changed(
        temperature=0.0, max_tokens=2, ignore_eos=True, json_schema=None, regex=None
    )
    engine.generate([int(prompt[0] == 0)], params)
