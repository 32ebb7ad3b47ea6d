"""Speeds along an axis: acceptance and speed ratio, jitter, message delay, foreseen rejections, hits of the draft's
lookup; and where one method stops paying.

Every point of an axis meets the same luck, and `sd` has its best gamma found anew at each. A point is simulated several
times, each with luck of its own: what it says has an interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

from pearl.lab import theory
from pearl.lab.experiments.compare import AR, FIXED, STREAM, pearl_at_best, sd_at_best
from pearl.lab.experiments.estimate import Estimate, speedup
from pearl.lab.experiments.workload import Workload, independent, run
from pearl.lab.simulate import Executor, ForesightDraft, LookupDraft, Timing
from pearl.protocol.options import RequestOptions
from pearl.spec.methods import DRAFT_LOOKUP

ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
RATIOS = (0.5, 1, 2, 3, 4, 5, 6, 8, 10, 12)
JITTERS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
DELAYS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0)  # of t_target(1), one way
FORESEEN = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
HITS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
TEXTS = 20  # of a simulation: a multiple of what makes these acceptance rates whole numbers of texts

PEARL, FIXED_C, BEST_C, SD = "pearl, stream", "pearl, fixed(c)", "pearl, best window", "sd, best gamma"
CLOSED = "fixed(c), closed form"


@dataclass(frozen=True)
class Point:
    """Speed-ups over `ar` under the same times, and of PEARL over `sd`. `windows`: as chosen or found. Seconds; `delay`
    is one way.

    `foreseen`: share of the rejections behind which a full window waits. `lookup`: how often a token that the draft has
    looked up is what it says itself.
    """

    acceptance: float
    ratio: float
    jitter: float
    delay: float
    speedups: dict[str, Estimate]
    windows: dict[str, int]
    over_sd: dict[str, Estimate] = field(default_factory=dict)
    foreseen: float = 0.0
    lookup: float = 0.0

    def lead(self, method: str, other: str | None = None) -> Estimate:
        """How many times as fast `method` is as `sd`, or else as `ar`."""
        return self.over_sd[method] if other == SD else self.speedups[method]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Luck:
    """What a point is simulated with: `repeats` simulations of `tokens` tokens each, every one with luck of its own."""

    tokens: int
    repeats: int
    seed: int = 0

    def texts(self, timing: Timing, acceptance: float) -> Workload:
        return independent(timing, acceptance, TEXTS * self.repeats, self.tokens // TEXTS, self.seed, TEXTS)


def over_acceptance_and_ratio(t_draft: float, luck: Luck) -> Iterator[Point]:
    """With a constant t_target: where does PEARL pay, and how much more than `sd`?"""
    for acceptance in ACCEPTANCES:
        texts = luck.texts(Timing(t_draft, constant(t_draft)), acceptance)
        for ratio in RATIOS:
            yield point(texts.at(t_target=constant(ratio * t_draft)))


def over_jitter(timing: Timing, acceptances: Iterable[float], luck: Luck) -> Iterator[Point]:
    for acceptance in acceptances:
        texts = luck.texts(timing, acceptance)
        for jitter in JITTERS:
            yield point(texts.at(jitter=jitter))


def over_delay(
    timing: Timing, acceptances: Iterable[float], luck: Luck, shares: Sequence[float] = DELAYS
) -> Iterator[Point]:
    """With PEARL at the best window found beside the one that it chooses: its formula knows no delay."""
    for acceptance in acceptances:
        texts = luck.texts(timing, acceptance)
        best = max(1, round(timing.t_target(1) / timing.t_draft))
        for share in shares:
            one = point(texts.at(delay=share * timing.t_target(1)), best)
            best = one.windows[BEST_C]
            yield one


def over_foreseen(timing: Timing, acceptances: Iterable[float], luck: Luck) -> Iterator[Point]:
    """What branches can give at most: behind each foreseen rejection a full window waits, and costs nothing."""
    c = max(1, round(timing.t_target(1) / timing.t_draft))
    for acceptance in acceptances:
        texts = luck.texts(timing, acceptance)
        for share in FORESEEN:
            one = _drafted(texts, partial(ForesightDraft, share, c - 1), branches=1)
            closed = {CLOSED: Estimate(theory.pearl_foreseen_tokens_per_step(acceptance, c, share), 0.0)}
            yield replace(one, foreseen=share, speedups=one.speedups | closed)


def over_lookup(timing: Timing, acceptances: Iterable[float], luck: Luck) -> Iterator[Point]:
    """What the draft's lookup gives, where a forward fed guesses lasts no longer than one without."""
    for acceptance in acceptances:
        texts = luck.texts(timing, acceptance)
        for hit in HITS:
            yield replace(_drafted(texts, partial(LookupDraft, hit, DRAFT_LOOKUP)), lookup=hit)


def _drafted(workload: Workload, draft: Callable[[int, int], Executor], branches: int = 0) -> Point:
    """PEARL with either window and another draft than that of coins; `branches`: how many that may send at a time."""
    timing, plain = workload.timing, run(workload, AR)
    ways = {name: decoding.changed(branches=branches) for name, decoding in ((PEARL, STREAM), (FIXED_C, FIXED))}
    done = {name: run(workload, decoding, draft=draft) for name, decoding in ways.items()}
    return Point(
        workload.acceptance,
        timing.t_target(1) / timing.t_draft,
        timing.jitter,
        timing.delay,
        {name: speedup(totals, plain, workload.block) for name, totals in done.items()},
        {name: totals.window for name, totals in done.items()},
    )


def point(workload: Workload, best_from: int | None = None) -> Point:
    """`best_from`: near which window to look for PEARL's best; None: not at all."""
    timing = workload.timing
    plain = run(workload, AR)
    decodings: dict[str, RequestOptions] = {PEARL: STREAM, FIXED_C: FIXED, SD: sd_at_best(workload)}
    done = {name: run(workload, decoding) for name, decoding in decodings.items()}
    if best_from is not None:
        done[BEST_C] = run(workload, pearl_at_best(workload, best_from))
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
    """The value of `axis` from which on `method` is slower than `other` (None: than `ar`), between two points by a
    straight line; None where it never is, 0 where it always is.

    Args:
        of: what of an estimate counts: its value, or an end of its interval.
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


def constant(seconds: float) -> Callable[[int], float]:
    """Of a forward that lasts as long whatever it is fed."""
    return lambda fed: seconds
