"""Figures of benchmark rows: medians over texts with bootstrap intervals, and the JSON document."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median, pstdev
from typing import Any

import torch

from pearl.config import EngineConfig
from pearl.engine.stream import Result
from pearl.lab.bench.machine import Conditions
from pearl.lab.bench.rows import Row, device_of_row
from pearl.lab.bench.runner import Measured, Plan, Sample
from pearl.lab.studies.estimate import Estimate, bootstrap
from pearl.lab.studies.recorded_texts import rows_along
from pearl.metrics import Sums
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
        bias: as in `Figures`, but per judged token.
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
    """The figures of each row, in the plan's order; rows without a sample are left out.

    Args:
        surprise: see `Surprise`; None: no perplexity.
    """
    found = []
    for row in plan.rows:
        samples = [s for s in measured.samples if s.row == row.name]
        base_rates = {
            _text_key(s): s.rate for s in measured.samples if s.row == row.base and s.rate
        }
        texts = [text for name, text in measured.texts if name == row.name and text.tokens]
        read = [(surprise(text), len(text.tokens)) for text in texts] if surprise else []
        if samples:
            found.append(_figures(plan, row, samples, base_rates, read))
    return found


def _figures(
    plan: Plan,
    row: Row,
    samples: Sequence[Sample],
    base_rates: Mapping[_TextKey, float],
    read: Sequence[tuple[float, int]],
) -> Figures:
    """`read`: surprise and length of each text."""
    temperature = plan.params_of(row).temperature
    rule, drafts = RULES[row.options.rule_in_use], METHODS[row.options.method].drafts
    together = Sums(texts=[text for s in samples for text in s.texts])
    tokens = together.total("num_generated_tokens")
    sets = dict.fromkeys(s.set for s in samples)
    runs = [
        length
        for text in together.texts
        for length, n in text.run_histogram.items()
        for _ in range(n)
    ]
    by_set = {name: _speedup([s for s in samples if s.set == name], base_rates) for name in sets}
    return Figures(
        name=row.name,
        devices=device_of_row(row, plan.config).in_words,
        rule=rule.name if drafts else "",
        exact=rule.at(1.0 if temperature is None else temperature).is_exact or not drafts,
        texts=len(samples),
        tokens=tokens,
        rate=_interval(s.rate for s in samples),
        speedup=_speedup(samples, base_rates),
        by_set={name: speedup for name, speedup in by_set.items() if speedup},
        first_seconds=median(
            s.texts[0].seconds_to_first_token - s.texts[0].queue_seconds for s in samples
        ),
        itl_p50=_median(_median(text.itl_p50 for text in s.texts) for s in samples),
        itl_p99=_median(
            max((t.itl_p99 for t in s.texts if t.itl_p99 is not None), default=None)
            for s in samples
        ),
        acceptance=together.acceptance_rate,
        tokens_per_run=together.mean_run_length,
        accepted_in_runs=(fmean(runs), pstdev(runs)) if runs else None,
        tokens_per_step=together.tokens_per_step,
        window=samples[-1].texts[-1].window,
        bias=bootstrap(
            [(sum(text.bias or 0.0 for text in s.texts), s.tokens) for s in samples], _per_token
        ),
        rejections=_rejections(together),
        perplexity=perplexity(read),
    )


def _rejections(together: Sums) -> Rejections | None:
    judged = together.total("num_judged_draft_tokens")
    known = [text for text in together.texts if text.expected_rejections is not None]
    if not known:
        return None
    return Rejections(
        count=sum(text.num_rejections for text in known),
        expected=sum(text.expected_rejections or 0.0 for text in known),
        sd=math.sqrt(sum((text.expected_rejections_sd or 0.0) ** 2 for text in known)),
        judged=judged,
        bias=sum(text.bias or 0.0 for text in known) / judged if judged else None,
    )


def perplexity(read: Sequence[tuple[float, int]]) -> Estimate | None:
    """From the surprise and the length of each text."""
    return bootstrap(read, lambda items: math.exp(_per_token(items))) if read else None


def _per_token(items: Sequence[tuple[float, int]]) -> float:
    return sum(value for value, _ in items) / max(1, sum(count for _, count in items))


def _speedup(samples: Iterable[Sample], base_rates: Mapping[_TextKey, float]) -> Estimate | None:
    return _interval(
        s.rate / base for s in samples if s.rate and (base := base_rates.get(_text_key(s)))
    )


def _text_key(sample: Sample) -> _TextKey:
    return sample.set, sample.task


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _interval(values: Iterable[float | None]) -> Estimate | None:
    known = [value for value in values if value is not None]
    return bootstrap(known) if known else None


# ---- perplexity ----


class Surprise:
    """The negative log likelihood of texts under the target, by its own forward in this process."""

    def __init__(self, config: EngineConfig, runner: ModelRunner | None = None) -> None:
        self.runner = runner or make_runner(config.model("target"), place(config, "target"))
        self._known: dict[
            tuple[tuple[int, ...], tuple[int, ...]], float
        ] = {}  # equal texts are read once

    def __call__(self, text: Result) -> float:
        """Nats, at temperature 1 and unfiltered."""
        key = (tuple(text.prompt_tokens), tuple(text.tokens))
        if key not in self._known:
            tokens = iter(text.tokens)
            with torch.inference_mode():
                self._known[key] = -sum(
                    float(torch.log_softmax(row.double(), -1)[next(tokens)])
                    for rows in rows_along(self.runner, text.prompt_tokens, text.tokens)
                    for row in rows
                )
        return self._known[key]


# ---- the document ----


def document(
    plan: Plan, measured: Measured, found: Sequence[Figures], conditions: Conditions
) -> dict[str, Any]:
    """For JSON: settings, conditions, figures, and every sample."""
    return {
        "settings": {
            "engine": plan.config.model_dump(),
            "options": plan.params.by_flag(),
            "ways": {row.name: row.options.in_use().by_flag() for row in plan.rows},
            "raw": plan.raw,
            "together": plan.together,
            "sets": {
                name: sum(task.set == name for task in plan.tasks)
                for name in {t.set: 0 for t in plan.tasks}
            },
        },
        **conditions.as_dict(),
        "gamma": {"best": measured.gamma, "tried": measured.gammas},
        "skipped": measured.skipped,
        "rows": found,
        "texts": [
            asdict(each) | {name: each.total(name) for name in ("late_tokens", "late_seconds")}
            for each in measured.samples
        ],
    }
