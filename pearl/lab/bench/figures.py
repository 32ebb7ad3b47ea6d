"""The figures of a benchmark's rows, with bootstrap intervals over texts; also as JSON."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from operator import attrgetter
from statistics import pstdev
from typing import Any

import torch

from pearl.config import EngineConfig
from pearl.config.option_names import by_flag
from pearl.engine.stream import Result
from pearl.lab.bench.machine import Conditions
from pearl.lab.bench.rows import Row, device_of_row
from pearl.lab.bench.runner import Measured, Plan, TaskSample, median_of
from pearl.lab.studies.estimate import Estimate, bootstrap
from pearl.lab.studies.recorded_texts import rows_along
from pearl.metrics import Sums
from pearl.models.runner import ModelRunner
from pearl.spec.methods import METHODS
from pearl.spec.rules import RULES
from pearl.worker.build import make_runner
from pearl.worker.placement import place

_EXACT = Estimate(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Rejections:
    """Rejections, counted in the texts for which the expected number of rejections is known.

    Attributes:
        count: number of rejections.
        expected: expected number of rejections.
        sd: standard deviation of the number of rejections around the expected one.
        judged: number of judged draft tokens.
        bias: total variation distance between the sampled distribution and the target's, per judged
            draft token; None if no token was judged.
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

    A run is a series of accepted draft tokens, with the correction or bonus token after it.

    Attributes:
        rule: the row's acceptance rule; empty for a method without a draft.
        exact: whether the row's texts have the target's distribution.
        rate: tokens per second after the first commit, median over texts.
        speedup: rate / rate of the row's base on the same text, median over texts; None if the base
            was not measured.
        by_set: name of a prompt set -> speedup over the texts of this set.
        first_seconds: median seconds to the first token of the first turn.
        itl_p50, itl_p99: inter-token latency, seconds, medians over texts.
        acceptance: accepted / judged draft tokens.
        tokens_per_run: mean tokens of a run, including the correction or bonus.
        accepted_in_runs: `Sums.accepted_per_run`, and the standard deviation of the number of
            accepted tokens over the runs that have ended.
        tokens_per_step: tokens committed per forward of the target, without the prefill and its
            token.
        window: the window in the last text, in tokens.
        bias: total variation distance between the sampled distribution and the target's, per
            committed token.
        perplexity: perplexity of the texts under the target at temperature 1, without top-k, top-p
            and min-p.
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
        surprise: function from a text to its negative log likelihood in nats, such as `Surprise`.
            None to leave out perplexity.
    """
    rows = []
    for row in plan.rows:
        samples = measured.of(row.name)
        if samples:
            rows.append(_figures(plan, row, samples, measured.of(row.base), surprise))
    return rows


def _figures(
    plan: Plan,
    row: Row,
    samples: Sequence[TaskSample],
    base: Sequence[TaskSample],
    surprise: Callable[[Result], float] | None,
) -> Figures:
    totals = Sums(texts=[])
    for sample in samples:
        totals.texts += sample.texts
    speedups = _speedups(samples, base)
    biases = list(map(attrgetter("bias", "tokens"), samples))
    return Figures(
        name=row.name,
        devices=device_of_row(row, plan.config).in_words,
        rule=_rule(row),
        exact=_is_exact(plan, row),
        texts=len(samples),
        tokens=totals.total("num_generated_tokens"),
        rate=_interval(map(attrgetter("rate"), samples)),
        speedup=_interval(chain.from_iterable(speedups.values())),
        by_set={name: bootstrap(ratios) for name, ratios in speedups.items()},
        first_seconds=median_of(map(attrgetter("first_seconds"), samples)) or 0.0,
        itl_p50=median_of(map(attrgetter("itl_p50"), samples)),
        itl_p99=median_of(map(attrgetter("itl_p99"), samples)),
        acceptance=totals.acceptance_rate,
        tokens_per_run=totals.mean_run_length,
        accepted_in_runs=_accepted_in_runs(totals),
        tokens_per_step=totals.tokens_per_step,
        window=samples[-1].texts[-1].window,
        bias=bootstrap(biases, _per_token),
        rejections=_rejections(totals),
        perplexity=_perplexity_of(samples, surprise),
    )


# ---- columns ----


def _rule(row: Row) -> str:
    """Return the acceptance rule; empty for a method without a draft."""
    if METHODS[row.options.method].drafts:
        return row.options.rule_in_use
    return ""


def _is_exact(plan: Plan, row: Row) -> bool:
    rule = _rule(row)
    temperature = plan.params_of(row).temperature
    if temperature is None:
        temperature = 1.0
    return not rule or RULES[rule].at(temperature).is_exact


def _speedups(samples: Sequence[TaskSample], base: Sequence[TaskSample]) -> dict[str, list[float]]:
    """Return for each prompt set the speedups of its texts: rate / the base's rate on this text."""
    base_rates = {(sample.set, sample.task): sample.rate for sample in base}
    speedups: dict[str, list[float]] = {}
    for sample in samples:
        base_rate = base_rates.get((sample.set, sample.task))
        if sample.rate and base_rate:
            speedups.setdefault(sample.set, []).append(sample.rate / base_rate)
    return speedups


def _accepted_in_runs(totals: Sums) -> tuple[float, float] | None:
    mean = totals.accepted_per_run
    runs = []
    for text in totals.texts:
        for length, count in text.run_histogram.items():
            runs += [length] * count
    if mean is None or not runs:
        return None
    return mean, pstdev(runs)


def _rejections(totals: Sums) -> Rejections | None:
    texts = [text for text in totals.texts if text.expected_rejections is not None]
    if not texts:
        return None
    judged = totals.total("num_judged_draft_tokens")
    rejected = Sums(texts=texts)
    variance = 0.0
    bias = 0.0
    for text in texts:
        variance += (text.expected_rejections_sd or 0.0) ** 2
        bias += text.bias or 0.0
    return Rejections(
        count=rejected.total("num_rejections"),
        expected=rejected.total("expected_rejections"),
        sd=math.sqrt(variance),
        judged=judged,
        bias=bias / judged if judged else None,
    )


def _perplexity_of(
    samples: Iterable[TaskSample], surprise: Callable[[Result], float] | None
) -> Estimate | None:
    if surprise is None:
        return None
    surprises = []
    for sample in samples:
        for text in sample.results:
            if text.tokens:
                surprises.append((surprise(text), len(text.tokens)))
    return perplexity(surprises)


def perplexity(surprises: Sequence[tuple[float, int]]) -> Estimate | None:
    """Return exp(sum of surprises / sum of lengths); None if there are no texts.

    Args:
        surprises: (surprise in nats, number of tokens) of each text.
    """
    if not surprises:
        return None
    return bootstrap(surprises, lambda texts: math.exp(_per_token(texts)))


def _per_token(items: Sequence[tuple[float, int]]) -> float:
    values, counts = zip(*items, strict=True)
    return sum(values) / max(1, sum(counts))


def _interval(values: Iterable[float | None]) -> Estimate | None:
    measured = [value for value in values if value is not None]
    if not measured:
        return None
    return bootstrap(measured)


# ---- perplexity ----


class Surprise:
    """Computes the surprise of texts: their negative log likelihood under the target, in nats.

    It loads the target in this process.
    """

    def __init__(self, config: EngineConfig, runner: ModelRunner | None = None) -> None:
        self.runner = runner or make_runner(config.model("target"), place(config, "target"))
        self._nats = cache(self._read)  # equal texts are read once

    def __call__(self, text: Result) -> float:
        """Return the text's surprise at temperature 1, without top-k, top-p and min-p."""
        return self._nats(tuple(text.prompt_tokens), tuple(text.tokens))

    @torch.inference_mode()
    def _read(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> float:
        log_likelihood = 0.0
        rows = chain.from_iterable(rows_along(self.runner, prompt, tokens))
        for row, token in zip(rows, tokens, strict=True):
            log_likelihood += float(torch.log_softmax(row.double(), -1)[token])
        return -log_likelihood


# ---- the document ----


def document(
    plan: Plan, measured: Measured, rows: Sequence[Figures], conditions: Conditions
) -> dict[str, Any]:
    """Return the settings, the conditions, the figures and every sample, for JSON."""
    return {
        "settings": {
            "engine": plan.config.model_dump(),
            "options": by_flag(plan.params),
            "ways": {row.name: by_flag(row.options.in_use()) for row in plan.rows},
            "raw": plan.raw,
            "together": plan.together,
            "sets": Counter(map(attrgetter("set"), plan.tasks)),
        },
        **conditions.as_dict(),
        "gamma": {"best": measured.gamma, "tried": measured.gammas},
        "skipped": measured.skipped,
        "rows": rows,
        "texts": [sample.as_dict() for sample in measured.samples],
    }
