"""Figures of benchmark rows: medians over texts with bootstrap intervals, and the JSON document."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median, pstdev
from typing import Any

import torch

from pearl.config import EngineConfig
from pearl.engine.stream import Result
from pearl.lab.bench.machine import Conditions
from pearl.lab.bench.rows import Row, device_of_row
from pearl.lab.bench.runner import Measured, Plan, TaskSample
from pearl.lab.studies.estimate import Estimate, bootstrap
from pearl.lab.studies.recorded_texts import rows_along
from pearl.metrics import Statistics, Sums
from pearl.models.runner import ModelRunner
from pearl.spec.methods import METHODS
from pearl.spec.rules import RULES
from pearl.worker.build import make_runner
from pearl.worker.placement import place

_TextKey = tuple[str, int]
_EXACT = Estimate(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Rejections:
    """Rejections of the texts whose expected number is known: `expected`, with standard deviation `sd`.

    Attributes:
        bias: as in `Figures`, but per verified token.
    """

    count: int
    expected: float
    sd: float
    judged: int
    bias: float | None

    def __str__(self) -> str:
        return f"{self.count}: {self.expected:.1f}, sd {self.sd:.1f}, of {self.judged}"


@dataclass(frozen=True)
class Figures:
    """The figures of one row.

    Attributes:
        rule: its acceptance rule; empty: none, all tokens are the target's own draws.
        exact: whether its texts have the target's distribution.
        rate: tokens per second after the first commit, median over texts.
        speedup: rate / rate of the row's base on the same text, median over texts; None if that was not measured.
        by_set: set -> the speedup over its texts.
        first_seconds: median seconds to the first token of the first turn.
        itl_p50, itl_p99: inter-token latency, seconds, medians over texts.
        acceptance: accepted / judged draft tokens.
        tokens_per_run: mean tokens committed up to and including a correction or bonus.
        accepted_in_runs: mean and standard deviation of the accepted tokens of a run.
        tokens_per_step: as `Statistics.tokens_per_step`.
        bias: total variation distance between the distribution sampled from and the target's, per committed token.
        perplexity: of the texts under the target, at temperature 1 and unfiltered.
    """

    name: str
    devices: str = ""
    rule: str = ""
    exact: bool = True
    texts: int = 0
    tokens: int = 0
    rate: Estimate | None = None
    speedup: Estimate | None = None
    by_set: dict[str, Estimate] = field(default_factory=dict)
    first_seconds: float = 0.0
    itl_p50: float | None = None
    itl_p99: float | None = None
    acceptance: float | None = None
    tokens_per_run: float | None = None
    accepted_in_runs: tuple[float, float] | None = None
    tokens_per_step: float | None = None
    window: int = 0
    bias: Estimate = _EXACT
    rejections: Rejections | None = None
    perplexity: Estimate | None = None


def figures(
    plan: Plan, measured: Measured, surprise: Callable[[Result], float] | None = None
) -> list[Figures]:
    """Return the figures of each row, in the plan's order; rows without a sample are left out.

    Args:
        surprise: see `Surprise`; None: no perplexity.
    """
    rows = []
    for row in plan.rows:
        samples = [sample for sample in measured.samples if sample.row == row.name]
        if samples:
            texts = [text for name, text in measured.texts if name == row.name]
            rows.append(_figures(plan, row, samples, _base_rates(row, measured), texts, surprise))
    return rows


def _base_rates(row: Row, measured: Measured) -> dict[_TextKey, float]:
    """Return the rate at which the row's base decoded each text."""
    rates = {}
    for sample in measured.samples:
        if sample.row == row.base and sample.rate:
            rates[_text_key(sample)] = sample.rate
    return rates


def _figures(
    plan: Plan,
    row: Row,
    samples: Sequence[TaskSample],
    base_rates: Mapping[_TextKey, float],
    texts: Sequence[Result],
    surprise: Callable[[Result], float] | None,
) -> Figures:
    totals = Sums(texts=_statistics(samples))
    return Figures(
        name=row.name,
        devices=device_of_row(row, plan.config).in_words,
        rule=_rule(row),
        exact=_is_exact(plan, row),
        texts=len(samples),
        tokens=totals.total("num_generated_tokens"),
        rate=_interval(sample.rate for sample in samples),
        speedup=_speedup(samples, base_rates),
        by_set=_speedup_by_set(samples, base_rates),
        first_seconds=_first_seconds(samples),
        itl_p50=_itl_p50(samples),
        itl_p99=_itl_p99(samples),
        acceptance=totals.acceptance_rate,
        tokens_per_run=totals.mean_run_length,
        accepted_in_runs=_accepted_in_runs(totals),
        tokens_per_step=totals.tokens_per_step,
        window=samples[-1].texts[-1].window,
        bias=_bias(samples),
        rejections=_rejections(totals),
        perplexity=_perplexity_of(texts, surprise),
    )


# ---- one function a column ----


def _drafts(row: Row) -> bool:
    return METHODS[row.options.method].drafts


def _rule(row: Row) -> str:
    return RULES[row.options.rule_in_use].name if _drafts(row) else ""


def _is_exact(plan: Plan, row: Row) -> bool:
    temperature = plan.params_of(row).temperature
    if temperature is None:
        temperature = 1.0
    return not _drafts(row) or RULES[row.options.rule_in_use].at(temperature).is_exact


def _speedup_by_set(
    samples: Sequence[TaskSample], base_rates: Mapping[_TextKey, float]
) -> dict[str, Estimate]:
    by_set = {}
    for name in dict.fromkeys(sample.set for sample in samples):
        speedup = _speedup([sample for sample in samples if sample.set == name], base_rates)
        if speedup:
            by_set[name] = speedup
    return by_set


def _first_seconds(samples: Iterable[TaskSample]) -> float:
    """Return the median time to the first token of the first turn, without the time in the queue."""
    seconds = []
    for sample in samples:
        turn = sample.texts[0]
        seconds.append(turn.seconds_to_first_token - turn.queue_seconds)
    return median(seconds)


def _itl_p50(samples: Iterable[TaskSample]) -> float | None:
    """Return the median over the samples of the median over a sample's turns."""
    return _median(_median(turn.itl_p50 for turn in sample.texts) for sample in samples)


def _itl_p99(samples: Iterable[TaskSample]) -> float | None:
    """Return the median over the samples of the largest value of a sample's turns."""
    largest = []
    for sample in samples:
        latencies = [turn.itl_p99 for turn in sample.texts if turn.itl_p99 is not None]
        largest.append(max(latencies, default=None))
    return _median(largest)


def _accepted_in_runs(totals: Sums) -> tuple[float, float] | None:
    runs: list[int] = []
    for text in totals.texts:
        for length, count in text.run_histogram.items():
            runs += [length] * count
    return (fmean(runs), pstdev(runs)) if runs else None


def _bias(samples: Iterable[TaskSample]) -> Estimate:
    biases = []
    for sample in samples:
        biases.append((sum(turn.bias or 0.0 for turn in sample.texts), sample.tokens))
    return bootstrap(biases, _per_token)


def _rejections(totals: Sums) -> Rejections | None:
    texts = [text for text in totals.texts if text.expected_rejections is not None]
    if not texts:
        return None
    judged = totals.total("num_judged_draft_tokens")
    variance = sum((text.expected_rejections_sd or 0.0) ** 2 for text in texts)
    bias = sum(text.bias or 0.0 for text in texts)
    return Rejections(
        count=sum(text.num_rejections for text in texts),
        expected=sum(text.expected_rejections or 0.0 for text in texts),
        sd=math.sqrt(variance),
        judged=judged,
        bias=bias / judged if judged else None,
    )


def _perplexity_of(
    texts: Iterable[Result], surprise: Callable[[Result], float] | None
) -> Estimate | None:
    if surprise is None:
        return None
    return perplexity([(surprise(text), len(text.tokens)) for text in texts if text.tokens])


def perplexity(surprises: Sequence[tuple[float, int]]) -> Estimate | None:
    """Return exp(sum of surprises / sum of lengths), from the (surprise, length) of each text."""
    if not surprises:
        return None
    return bootstrap(surprises, lambda texts: math.exp(_per_token(texts)))


def _per_token(items: Sequence[tuple[float, int]]) -> float:
    return sum(value for value, _ in items) / max(1, sum(count for _, count in items))


def _statistics(samples: Iterable[TaskSample]) -> list[Statistics]:
    return [turn for sample in samples for turn in sample.texts]


def _speedup(
    samples: Iterable[TaskSample], base_rates: Mapping[_TextKey, float]
) -> Estimate | None:
    speedups = []
    for sample in samples:
        base_rate = base_rates.get(_text_key(sample))
        if sample.rate and base_rate:
            speedups.append(sample.rate / base_rate)
    return _interval(speedups)


def _text_key(sample: TaskSample) -> _TextKey:
    return sample.set, sample.task


def _median(values: Iterable[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return median(measured) if measured else None


def _interval(values: Iterable[float | None]) -> Estimate | None:
    measured = [value for value in values if value is not None]
    return bootstrap(measured) if measured else None


# ---- perplexity ----


class Surprise:
    """The negative log likelihood of texts under the target, by its own forward in this process."""

    def __init__(self, config: EngineConfig, runner: ModelRunner | None = None) -> None:
        self.runner = runner or make_runner(config.model("target"), place(config, "target"))
        #: by (prompt, text), so that equal texts are read once
        self._nats: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def __call__(self, text: Result) -> float:
        """Return the text's surprise in nats, at temperature 1 and unfiltered."""
        key = (tuple(text.prompt_tokens), tuple(text.tokens))
        if key not in self._nats:
            self._nats[key] = self._read(text)
        return self._nats[key]

    @torch.inference_mode()
    def _read(self, text: Result) -> float:
        tokens = iter(text.tokens)
        log_likelihood = 0.0
        for rows in rows_along(self.runner, text.prompt_tokens, text.tokens):
            for row in rows:
                log_likelihood += float(torch.log_softmax(row.double(), -1)[next(tokens)])
        return -log_likelihood


# ---- the document ----


def document(
    plan: Plan, measured: Measured, rows: Sequence[Figures], conditions: Conditions
) -> dict[str, Any]:
    """Return settings, conditions, figures and every sample, for JSON."""
    texts = []
    for sample in measured.samples:
        late = {name: sample.total(name) for name in ("late_tokens", "late_seconds")}
        texts.append(asdict(sample) | late)
    return {
        "settings": {
            "engine": plan.config.model_dump(),
            "options": plan.params.by_flag(),
            "ways": {row.name: row.options.in_use().by_flag() for row in plan.rows},
            "raw": plan.raw,
            "together": plan.together,
            "sets": dict(Counter(task.set for task in plan.tasks)),
        },
        **conditions.as_dict(),
        "gamma": {"best": measured.gamma, "tried": measured.gammas},
        "skipped": measured.skipped,
        "rows": rows,
        "texts": texts,
    }
