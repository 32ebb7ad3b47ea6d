"""What the samples come to, row by row: medians over texts with bootstrap intervals, and what goes into the JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from pearl.lab.bench.interval import Interval, median_of
from pearl.lab.bench.machine import hardware
from pearl.lab.bench.run import AR, Measured, Plan, Sample


@dataclass(frozen=True)
class Figures:
    """One row. Rates are tokens a second after the first commit.

    Attributes:
        rate: the median over texts.
        speedup: the median over texts of the ratio to `ar` on the same text; None where `ar` was not measured.
        by_set: set -> such a speed-up.
        first_seconds: median time to the first token, of first turns.
        acceptance: accepted / judged.
        tokens_per_run: committed up to a correction or bonus, it included.
        of_simulated: of emulated pairs.
    """

    name: str
    devices: str
    texts: int
    tokens: int
    rate: Interval | None
    speedup: Interval | None
    by_set: dict[str, Interval]
    first_seconds: float
    acceptance: float | None
    tokens_per_run: float | None
    window: int
    of_simulated: Interval | None


def figures(plan: Plan, measured: Measured, base: str = AR) -> list[Figures]:
    """In the order of the plan's rows; a row of which nothing was measured is left out."""
    rows = ((row, [s for s in measured.samples if s.row == row.name]) for row in plan.rows)
    plain = {_text(s): s.rate for s in measured.samples if s.row == base and s.rate}
    return [_figures(row.name, row.devices.in_words(), samples, plain) for row, samples in rows if samples]


def _text(sample: Sample) -> tuple[str, int, int]:
    return sample.set, sample.task, sample.repeat


def _figures(
    name: str, devices: str, samples: Sequence[Sample], plain: Mapping[tuple[str, int, int], float]
) -> Figures:
    judged, runs = sum(s.judged for s in samples), sum(s.runs for s in samples)
    accepted = sum(s.accepted for s in samples)
    sets = dict.fromkeys(s.set for s in samples)
    by_set = {name: _speedup([s for s in samples if s.set == name], plain) for name in sets}
    return Figures(
        name=name,
        devices=devices,
        texts=len(samples),
        tokens=sum(s.tokens for s in samples),
        rate=_interval(s.rate for s in samples),
        speedup=_speedup(samples, plain),
        by_set={name: speedup for name, speedup in by_set.items() if speedup},
        first_seconds=median(s.first_seconds for s in samples),
        acceptance=accepted / judged if judged else None,
        tokens_per_run=1 + accepted / runs if runs else None,
        window=samples[-1].window,
        of_simulated=_interval(s.of_simulated for s in samples),
    )


def _speedup(samples: Iterable[Sample], plain: Mapping[tuple[str, int, int], float]) -> Interval | None:
    return _interval(s.rate / other for s in samples if s.rate and (other := plain.get(_text(s))))


def _interval(values: Iterable[float | None]) -> Interval | None:
    known = [value for value in values if value is not None]
    return median_of(known) if known else None


def document(plan: Plan, measured: Measured, seconds: float, stolen: float) -> dict[str, Any]:
    """All of it, for machines: what was asked, where, the figures, and every text."""
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
        "stolen": stolen,
        "gamma": {"best": measured.gamma, "tried": measured.gammas},
        "skipped": measured.skipped,
        "rows": [asdict(row) for row in figures(plan, measured)],
        "texts": [asdict(sample) for sample in measured.samples],
    }
