"""Speeds along an axis: acceptance and speed ratio, jitter, message delay; and where one method stops paying.

Every point of an axis meets the same luck, and `sd` has its best gamma found anew at each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from pearl.lab.experiments.compare import AR, FIXED, STREAM, pearl_at_best, sd_at_best
from pearl.lab.experiments.workload import Workload, independent, run
from pearl.lab.simulate import Timing
from pearl.protocol.messages import Decoding

ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
RATIOS = (0.5, 1, 2, 3, 4, 5, 6, 8, 10, 12)
JITTERS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
DELAYS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0)  # of t_target(1), one way
TEXTS = 20  # a multiple of what makes these acceptance rates whole numbers of texts

PEARL, FIXED_C, BEST_C, SD = "pearl, stream", "pearl, fixed(c)", "pearl, best window", "sd, best gamma"


@dataclass(frozen=True)
class Point:
    """Speed-ups over `ar` under the same times. `windows`: as chosen or found. Seconds; `delay` is one way."""

    acceptance: float
    ratio: float
    jitter: float
    delay: float
    speedups: dict[str, float]
    windows: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def over_acceptance_and_ratio(t_draft: float, tokens: int, seed: int) -> Iterator[Point]:
    """With a constant t_target: where does PEARL pay, and how much more than `sd`?"""
    for acceptance in ACCEPTANCES:
        texts = independent(Timing(t_draft, constant(t_draft)), acceptance, TEXTS, tokens // TEXTS, seed)
        for ratio in RATIOS:
            yield point(texts.at(t_target=constant(ratio * t_draft)))


def over_jitter(timing: Timing, acceptances: Iterable[float], tokens: int, seed: int) -> Iterator[Point]:
    for acceptance in acceptances:
        texts = independent(timing, acceptance, TEXTS, tokens // TEXTS, seed)
        for jitter in JITTERS:
            yield point(texts.at(jitter=jitter))


def over_delay(
    timing: Timing, acceptances: Iterable[float], tokens: int, seed: int, shares: Sequence[float] = DELAYS
) -> Iterator[Point]:
    """With PEARL at the best window found beside the one that it chooses: its formula knows no delay."""
    for acceptance in acceptances:
        texts = independent(timing, acceptance, TEXTS, tokens // TEXTS, seed)
        best = max(1, round(timing.t_target(1) / timing.t_draft))
        for share in shares:
            one = point(texts.at(delay=share * timing.t_target(1)), best)
            best = one.windows[BEST_C]
            yield one


def point(workload: Workload, best_from: int | None = None) -> Point:
    """`best_from`: near which window to look for PEARL's best; None: not at all."""
    timing = workload.timing
    plain = run(workload, AR).tokens_per_second
    decodings: dict[str, Decoding] = {PEARL: STREAM, FIXED_C: FIXED, SD: sd_at_best(workload)}
    done = {name: run(workload, decoding) for name, decoding in decodings.items()}
    if best_from is not None:
        done[BEST_C] = run(workload, pearl_at_best(workload, best_from))
    return Point(
        acceptance=workload.acceptance,
        ratio=timing.t_target(1) / timing.t_draft,
        jitter=timing.jitter,
        delay=timing.delay,
        speedups={name: totals.tokens_per_second / plain for name, totals in done.items()},
        windows={name: totals.window for name, totals in done.items()},
    )


def stops_paying(points: Sequence[Point], axis: str, method: str, other: str | None = None) -> float | None:
    """The value of `axis` from which on `method` is slower than `other` (None: than `ar`), between two points by a
    straight line; None where it never is, 0 where it always is.
    """
    lead = [(getattr(p, axis), p.speedups[method] - (p.speedups[other] if other else 1.0)) for p in points]
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


def constant(seconds: float) -> Callable[[int], float]:
    """Of a forward that lasts as long whatever it is fed."""
    return lambda fed: seconds
