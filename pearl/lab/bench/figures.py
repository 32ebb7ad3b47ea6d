"""Figures of benchmark rows: medians over texts with bootstrap intervals, and the JSON document."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from pearl.config import EngineConfig, SamplingParams
from pearl.lab.bench.machine import Conditions
from pearl.lab.bench.rows import Row
from pearl.lab.bench.runner import Measured, Plan, Sample
from pearl.lab.bench.systems import Decoded
from pearl.lab.experiments.estimate import Estimate, bootstrap
from pearl.lab.experiments.texts import rows_along
from pearl.metrics import Sums
from pearl.models.runner import ModelRunner
from pearl.spec.methods import METHODS
from pearl.spec.rules import RULES
from pearl.worker.build import make_runner
from pearl.worker.placement import place

_TextKey = tuple[str, int, int]


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
        tokens_per_step: tokens per target forward, prefills left out.
        of_simulated: speed / simulated speed; emulated pairs only.
        bias: total variation distance between the distribution sampled from and the target's, per committed token.
        perplexity: of the texts under the target, at temperature 1 and unfiltered.
    """

    name: str
    devices: str
    rule: str
    exact: bool
    texts: int
    tokens: int
    rate: Estimate | None
    speedup: Estimate | None
    by_set: dict[str, Estimate]
    first_seconds: float
    itl_p50: float | None
    itl_p99: float | None
    acceptance: float | None
    tokens_per_run: float | None
    tokens_per_step: float | None
    window: int
    of_simulated: Estimate | None
    bias: Estimate
    perplexity: Estimate | None


def figures(plan: Plan, measured: Measured, surprise: Callable[[Decoded], float] | None = None) -> list[Figures]:
    """The figures of each row, in the plan's order; rows without a sample are left out.

    Args:
        surprise: see `Surprise`; None: no perplexity.
    """
    found = []
    for row in plan.rows:
        samples = [s for s in measured.samples if s.row == row.name]
        base_rates = {_text_key(s): s.rate for s in measured.samples if s.row == row.base and s.rate}
        texts = [text for text in measured.texts if text.row == row.name and text.tokens]
        read = [(surprise(text), len(text.tokens)) for text in texts] if surprise else []
        if samples:
            found.append(_figures(row, row.params or plan.params, samples, base_rates, read))
    return found


def _figures(
    row: Row,
    params: SamplingParams,
    samples: Sequence[Sample],
    base_rates: Mapping[_TextKey, float],
    read: Sequence[tuple[float, int]],
) -> Figures:
    """`read`: surprise and length of each text."""
    rule, drafts = RULES[row.decoding.rule_in_use], METHODS[row.decoding.method].drafts
    together = Sums(texts=[text for s in samples for text in s.texts])
    tokens, steps = together.total("num_generated_tokens"), together.total("steps")
    sets = dict.fromkeys(s.set for s in samples)
    by_set = {name: _speedup([s for s in samples if s.set == name], base_rates) for name in sets}
    return Figures(
        name=row.name,
        devices=row.devices.in_words(),
        rule=rule.name if drafts else "",
        exact=rule.at(1.0 if params.temperature is None else params.temperature).is_exact or not drafts,
        texts=len(samples),
        tokens=tokens,
        rate=_interval(s.rate for s in samples),
        speedup=_speedup(samples, base_rates),
        by_set={name: speedup for name, speedup in by_set.items() if speedup},
        first_seconds=median(s.texts[0].seconds_to_first_token - s.texts[0].queue_seconds for s in samples),
        itl_p50=_median(_median(text.itl_p50 for text in s.texts) for s in samples),
        itl_p99=_median(max((t.itl_p99 for t in s.texts if t.itl_p99 is not None), default=None) for s in samples),
        acceptance=together.acceptance_rate,
        tokens_per_run=together.mean_run_length,
        tokens_per_step=tokens / steps if steps else None,
        window=samples[-1].texts[-1].window,
        of_simulated=_interval(s.of_simulated for s in samples),
        bias=bootstrap([(sum(text.bias or 0.0 for text in s.texts), s.tokens) for s in samples], _per_token),
        perplexity=bootstrap(read, lambda items: math.exp(_per_token(items))) if read else None,
    )


def _per_token(items: Sequence[tuple[float, int]]) -> float:
    return sum(value for value, _ in items) / max(1, sum(count for _, count in items))


def _speedup(samples: Iterable[Sample], base_rates: Mapping[_TextKey, float]) -> Estimate | None:
    return _interval(s.rate / base for s in samples if s.rate and (base := base_rates.get(_text_key(s))))


def _text_key(sample: Sample) -> _TextKey:
    return sample.set, sample.task, sample.repeat


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
        self._runner = runner or make_runner(config.model("target"), place(config, "target"))
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}  # equal texts are read once

    def __call__(self, text: Decoded) -> float:
        """Nats, at temperature 1 and unfiltered."""
        key = (text.prompt, text.tokens)
        if key not in self._known:
            tokens = iter(text.tokens)
            with torch.inference_mode():
                self._known[key] = -sum(
                    float(torch.log_softmax(row.double(), -1)[next(tokens)])
                    for rows in rows_along(self._runner, text.prompt, text.tokens)
                    for row in rows
                )
        return self._known[key]


# ---- the document ----


def document(
    kind: str, plan: Plan, measured: Measured, found: Sequence[Figures], conditions: Conditions
) -> dict[str, Any]:
    """For JSON: settings, conditions, figures, and every sample. `kind`: "bench" or "compare"."""
    return {
        "kind": kind,
        "settings": {
            "engine": plan.config.model_dump(),
            "sampling": plan.params.model_dump(),
            "ways": {row.name: row.decoding.in_use().model_dump() for row in plan.rows},
            "repeats": plan.repeats,
            "raw": plan.raw,
            "together": plan.together,
            "sets": {name: sum(task.set == name for task in plan.tasks) for name in {t.set: 0 for t in plan.tasks}},
        },
        **conditions.as_dict(),
        "gamma": {"best": measured.gamma, "tried": measured.gammas},
        "skipped": measured.skipped,
        "rows": [asdict(row) for row in found],
        "texts": [
            asdict(each) | {name: each.total(name) for name in ("late_tokens", "late_seconds")}
            for each in measured.samples
        ],
    }
