"""Estimates with 95% intervals: bootstrapped statistics, and speed-ups as ratios of rates over many texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor, log10, sqrt
from statistics import mean, median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pearl.lab.experiments.workload import Totals

_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t, 97.5%, for 1, 2, ... degrees of freedom
_MAX_DIGITS = 3
_RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A value and its 95% interval. `low` and `high`: equal to `value` if the interval is unknown, or empty."""

    value: float
    low: float
    high: float

    @property
    def margin(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2

    @property
    def digits(self) -> int:
        """Significant decimals: up to the margin's first digit; 2 without an interval."""
        return min(_MAX_DIGITS, max(0, -floor(log10(self.margin)))) if self.margin else 2

    def __str__(self) -> str:
        """Such as 2.31 (2.28-2.33)."""
        value, low, high = (f"{each:.{self.digits}f}" for each in (self.value, self.low, self.high))
        return f"{value} ({low}-{high})" if self.margin else value


def about(value: float, margin: float) -> Estimate:
    return Estimate(value, value - margin, value + margin)


def bootstrap(
    items: Sequence[Any], statistic: Callable[[Sequence[Any]], float] = median, resamples: int = _RESAMPLES
) -> Estimate:
    """The statistic of `items`, with its percentile interval over resamples with replacement.

    Deterministic: the resamples depend only on the number of items. Source: Efron 1979, "Bootstrap methods: another
    look at the jackknife".
    """
    noise = random.Random(0)
    drawn = sorted(statistic(noise.choices(items, k=len(items))) for _ in range(resamples))
    return Estimate(statistic(items), drawn[int(0.025 * resamples)], drawn[int(0.975 * resamples)])


def speedup(totals: Totals, other: Totals, block: int) -> Estimate:
    """Speed of `totals` over that of `other` on the same texts: the ratio of their rates over all texts.

    The interval is a jackknife over blocks (Quenouille 1956, Tukey 1958).  Texts of a block do not count singly: their
    luck is drawn together and balances, so their spread does not show the noise of their sum.

    Args:
        block: texts of a block.
    """
    pairs = list(zip(*([(s.late_tokens, s.late_seconds) for s in one.texts] for one in (totals, other)), strict=True))
    blocks = [pairs[i : i + block] for i in range(0, len(pairs), block)]
    value, count = _ratio(pairs), len(blocks)
    if count < 2:
        return about(value, 0.0)
    without = [_ratio([pair for each in blocks[:i] + blocks[i + 1 :] for pair in each]) for i in range(count)]
    error = sqrt((count - 1) / count * sum((each - mean(without)) ** 2 for each in without))
    student = _T[count - 2] if count - 1 <= len(_T) else 1.96 + 2.75 / (count - 1)
    return about(value, student * error)


def _ratio(pairs: Sequence[tuple[tuple[int, float], tuple[int, float]]]) -> float:
    """Ratio of two rates, each given by (tokens, seconds) of each text."""
    rates = (sum(pair[i][0] for pair in pairs) / sum(pair[i][1] for pair in pairs) for i in (0, 1))
    return next(rates) / next(rates)
