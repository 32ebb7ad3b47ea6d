"""Summarise samples per row, as medians over texts with bootstrap intervals, and as the JSON document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from pearl.lab.bench.interval import Interval, bootstrapped, median_of
from pearl.lab.bench.machine import Taken, hardware
from pearl.lab.bench.run import AR, AR_ON_ALL, AUTO, Measured, Plan, Sample


@dataclass(frozen=True)
class Figures:
    """The figures of one row.

    Attributes:
        rate: tokens per second after the first commit, median over texts.
        speedup: rate / rate of `ar` on the same text, median over texts; None if `ar` was not measured.
        by_set: set -> the speedup over its texts.
        first_seconds: median seconds to the first token of the first turn.
        itl_p50, itl_p99: inter-token latency, seconds, medians over texts.
        acceptance: accepted / judged draft tokens.
        tokens_per_run: mean tokens committed up to and including a correction or bonus.
        tokens_per_step: tokens per target forward, prefills left out.
        of_simulated: speed / simulated speed; emulated pairs only.
    """

    name: str
    devices: str
    texts: int
    tokens: int
    rate: Interval | None
    speedup: Interval | None
    by_set: dict[str, Interval]
    first_seconds: float
    itl_p50: float | None
    itl_p99: float | None
    acceptance: float | None
    tokens_per_run: float | None
    tokens_per_step: float | None
    window: int
    of_simulated: Interval | None


def figures(plan: Plan, measured: Measured, base: str = AR) -> list[Figures]:
    """The figures of each row, in the plan's order; rows without a sample are left out."""
    rows = ((row, [s for s in measured.samples if s.row == row.name]) for row in plan.rows)
    ar_rates = {_text_key(s): s.rate for s in measured.samples if s.row == base and s.rate}
    return [_figures(row.name, row.devices.in_words(), samples, ar_rates) for row, samples in rows if samples]


@dataclass(frozen=True)
class OverAlone:
    """`auto` over the target alone on the devices on which that is faster: what who has these devices gets of PEARL.

    Attributes:
        base: the row of `ar`, one of `AR` and `AR_ON_ALL`; `devices`: where it ran.
        base_rate, rate: tokens per second of either: all tokens over all seconds of texts that both have written.
        speedup: the ratio of the two; `by_set`: likewise of each set.
    """

    base: str
    devices: str
    base_rate: float
    rate: float
    speedup: Interval
    by_set: dict[str, Interval]

    def __str__(self) -> str:
        by_set = ", ".join(f"{name} {one.value:.2f}" for name, one in self.by_set.items())
        return (
            f"auto makes {self.rate:.1f} tokens/s and the target alone at its fastest (on {self.devices}) "
            f"{self.base_rate:.1f}: {self.speedup.value:.2f} times over the same texts "
            f"({self.speedup.low:.2f} to {self.speedup.high:.2f}{f'; {by_set}' if len(self.by_set) > 1 else ''})"
        )


def over_alone(plan: Plan, measured: Measured) -> OverAlone | None:
    """None unless `auto` and the target alone were measured on one text or more."""
    timed = [sample for sample in measured.samples if sample.rate]
    auto = {_text_key(sample): sample for sample in timed if sample.row == AUTO}
    both = [(one, auto[_text_key(one)]) for one in timed if one.row in (AR, AR_ON_ALL) and _text_key(one) in auto]
    base = max(
        {one.row for one, _ in both}, key=lambda row: _rate(one for one, _ in both if one.row == row), default=""
    )
    pairs = [pair for pair in both if pair[0].row == base]
    if not pairs:
        return None
    devices = next(row.devices.in_words() for row in plan.rows if row.name == base)
    sets = dict.fromkeys(one.set for one, _ in pairs)
    by_set = {name: bootstrapped([pair for pair in pairs if pair[0].set == name], _ratio) for name in sets}
    rates = _rate(one for one, _ in pairs), _rate(one for _, one in pairs)
    return OverAlone(base, devices, *rates, bootstrapped(pairs, _ratio), by_set)


def _rate(samples: Iterable[Sample]) -> float:
    """Tokens per second after the first commit, over all of them."""
    tokens, seconds = map(sum, zip(*((one.late_tokens, one.late_seconds) for one in samples), strict=True))
    return tokens / seconds


def _ratio(pairs: Sequence[tuple[Sample, Sample]]) -> float:
    return _rate(one for _, one in pairs) / _rate(one for one, _ in pairs)


def _text_key(sample: Sample) -> tuple[str, int, int]:
    return sample.set, sample.task, sample.repeat


def _figures(
    name: str, devices: str, samples: Sequence[Sample], ar_rates: Mapping[tuple[str, int, int], float]
) -> Figures:
    judged, runs, steps = (sum(getattr(s, name) for s in samples) for name in ("judged", "runs", "steps"))
    accepted = sum(s.accepted for s in samples)
    sets = dict.fromkeys(s.set for s in samples)
    by_set = {name: _speedup([s for s in samples if s.set == name], ar_rates) for name in sets}
    return Figures(
        name=name,
        devices=devices,
        texts=len(samples),
        tokens=sum(s.tokens for s in samples),
        rate=_interval(s.rate for s in samples),
        speedup=_speedup(samples, ar_rates),
        by_set={name: speedup for name, speedup in by_set.items() if speedup},
        first_seconds=median(s.first_seconds for s in samples),
        itl_p50=_median(s.itl_p50 for s in samples),
        itl_p99=_median(s.itl_p99 for s in samples),
        acceptance=accepted / judged if judged else None,
        tokens_per_run=1 + accepted / runs if runs else None,
        tokens_per_step=sum(s.tokens for s in samples) / steps if steps else None,
        window=samples[-1].window,
        of_simulated=_interval(s.of_simulated for s in samples),
    )


def _speedup(samples: Iterable[Sample], ar_rates: Mapping[tuple[str, int, int], float]) -> Interval | None:
    return _interval(s.rate / other for s in samples if s.rate and (other := ar_rates.get(_text_key(s))))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _interval(values: Iterable[float | None]) -> Interval | None:
    known = [value for value in values if value is not None]
    return median_of(known) if known else None


def document(plan: Plan, measured: Measured, seconds: float, taken: Taken) -> dict[str, Any]:
    """For JSON: settings, hardware, figures, and every sample."""
    over = over_alone(plan, measured)
    return {
        "kind": "bench",
        "settings": {
            "engine": plan.config.model_dump(),
            "sampling": plan.params.model_dump(),
            "repeats": plan.repeats,
            "raw": plan.raw,
            "together": plan.together,
            "sets": {name: sum(task.set == name for task in plan.tasks) for name in {t.set: 0 for t in plan.tasks}},
        },
        "hardware": hardware(),
        "seconds": seconds,
        **asdict(taken),
        "gamma": {"best": measured.gamma, "tried": measured.gammas},
        "skipped": measured.skipped,
        "rows": [asdict(row) for row in figures(plan, measured)],
        "over_alone": asdict(over) if over else None,
        "texts": [asdict(sample) for sample in measured.samples],
    }
