"""Speeds along an axis (acceptance and speed ratio, jitter, message delay), and where one method stops paying.

All points of an axis meet the same luck, and `sd` has its best gamma at each.  A point is simulated several times, each
with its own luck, which gives it an interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from pearl.lab.experiments.compare import AR, FIXED, STREAM, best, sd_at_best
from pearl.lab.experiments.estimate import Estimate, speedup
from pearl.lab.experiments.workload import Workload, independent, run
from pearl.lab.simulate import Timing
from pearl.protocol.options import RequestOptions

ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
RATIOS = (0.5, 1, 2, 3, 4, 5, 6, 8, 10, 12)
JITTERS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
DELAYS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0)  # of t_target(1), one way
TEXTS = 20  # of a simulation: these acceptance rates times 20 are whole numbers

PEARL, FIXED_C, BEST_C, SD = "pearl, stream", "pearl, fixed(c)", "pearl, best window", "sd, best gamma"


@dataclass(frozen=True)
class Point:
    """One setting: speed-ups over `ar` and over `sd` at the same times, by method.

    Attributes:
        delay: seconds, one way.
        windows: as chosen or found.
    """

    acceptance: float
    ratio: float
    jitter: float
    delay: float
    speedups: dict[str, Estimate]
    windows: dict[str, int]
    over_sd: dict[str, Estimate]

    def lead(self, method: str, other: str | None = None) -> Estimate:
        """Speed of `method` over `SD`, or else over `ar`."""
        return self.over_sd[method] if other == SD else self.speedups[method]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Luck:
    """How a point is simulated: `repeats` simulations of `tokens` tokens, each with its own luck."""

    tokens: int
    repeats: int
    seed: int = 0

    def texts(self, timing: Timing, acceptance: float) -> Workload:
        return independent(timing, acceptance, TEXTS * self.repeats, self.tokens // TEXTS, self.seed, TEXTS)


def over_acceptance_and_ratio(t_draft: float, luck: Luck) -> Iterator[Point]:
    """All acceptance rates and speed ratios, with a constant t_target."""
    for acceptance in ACCEPTANCES:
        texts = luck.texts(Timing(t_draft, lambda fed: t_draft), acceptance)
        for ratio in RATIOS:
            yield point(texts.at(t_target=lambda fed, ratio=ratio: ratio * t_draft))


def over_jitter(timing: Timing, acceptances: Iterable[float], luck: Luck) -> Iterator[Point]:
    for acceptance in acceptances:
        texts = luck.texts(timing, acceptance)
        for jitter in JITTERS:
            yield point(texts.at(jitter=jitter))


def over_delay(
    timing: Timing, acceptances: Iterable[float], luck: Luck, shares: Sequence[float] = DELAYS
) -> Iterator[Point]:
    """Also with PEARL at its best window: the one that it chooses takes no account of the delay."""
    for acceptance in acceptances:
        texts = luck.texts(timing, acceptance)
        window = max(1, round(timing.t_target(1) / timing.t_draft))
        for share in shares:
            one = point(texts.at(delay=share * timing.t_target(1)), window)
            window = one.windows[BEST_C]
            yield one


def point(workload: Workload, best_from: int | None = None) -> Point:
    """One setting. `best_from`: search PEARL's best window near this one; None: do not."""
    timing, plain = workload.timing, run(workload, AR)
    decodings = {PEARL: STREAM, FIXED_C: FIXED, SD: sd_at_best(workload)}
    if best_from is not None:
        decodings[BEST_C] = best(workload, lambda c: RequestOptions("pearl", "stream", c), best_from)
    done = {name: run(workload, decoding) for name, decoding in decodings.items()}
    return Point(
        acceptance=workload.acceptance,
        ratio=timing.t_target(1) / timing.t_draft,
        jitter=timing.jitter,
        delay=timing.delay,
        speedups={name: speedup(totals, plain, workload.block) for name, totals in done.items()},
        windows={name: totals.window for name, totals in done.items()},
        over_sd={name: speedup(totals, done[SD], workload.block) for name, totals in done.items() if name != SD},
    )


def stops_paying(
    points: Sequence[Point],
    axis: str,
    method: str,
    other: str | None = None,
    of: Callable[[Estimate], float] = lambda estimate: estimate.value,
) -> float | None:
    """The value of `axis` from which `method` is slower than `other` (None: `ar`), linearly interpolated.

    None if it never is, 0 if it always is. `of`: the number to take from an estimate.
    """
    lead = [(getattr(p, axis), of(p.lead(method, other)) - 1.0) for p in points]
    if lead[0][1] < 0:
        return 0.0
    for (x0, y0), (x1, y1) in pairwise(lead):
        if y1 < 0:
            return float(x0 + (x1 - x0) * y0 / (y0 - y1))
    return None


def by_acceptance(points: Iterable[Point]) -> dict[float, list[Point]]:
    groups: dict[float, list[Point]] = {}
    for one in points:
        groups.setdefault(one.acceptance, []).append(one)
    return groups
