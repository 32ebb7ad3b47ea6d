"""Estimates with 95% intervals: means, and speed-ups as ratios of rates over many texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10, sqrt
from statistics import mean, stdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pearl.lab.experiments.workload import Totals

_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t, 97.5%, for 1, 2, ... degrees of freedom
_MAX_DIGITS = 3


@dataclass(frozen=True)
class Estimate:
    """A value and half the width of its 95% interval; None: unknown."""

    value: float
    margin: float | None

    @property
    def low(self) -> float:
        return self.value - (self.margin or 0.0)

    @property
    def high(self) -> float:
        return self.value + (self.margin or 0.0)

    def ties(self, other: float) -> bool:
        """Whether the interval contains `other`."""
        return self.margin is not None and self.low <= other <= self.high

    @property
    def digits(self) -> int:
        """Significant decimals: up to the margin's first digit; 2 if the margin is unknown."""
        if self.margin is None:
            return 2
        return _MAX_DIGITS if not self.margin else min(_MAX_DIGITS, max(0, -floor(log10(self.margin))))

    def __str__(self) -> str:
        value = f"{self.value:.{self.digits}f}"
        return value + (f" ± {self.margin:.{self.digits}f}" if self.margin else "")


def mean_of(values: Sequence[float], least: float = 0.0) -> Estimate:
    """The mean of independent values. `least`: lower bound of the margin."""
    return Estimate(mean(values), max(least, 1.96 * stdev(values) / sqrt(len(values))))


def speedup(totals: Totals, other: Totals, block: int) -> Estimate:
    """Speed of `totals` over that of `other` on the same texts: the ratio of their rates over all texts.

    The interval is a jackknife over blocks (Quenouille 1956, Tukey 1958).  Texts of a block do not count singly: their
    luck is drawn together and balances, so their spread does not show the noise of their sum.

    Args:
        block: texts of a block.
    """
    pairs = list(zip(totals.texts, other.texts, strict=True))
    blocks = [pairs[i : i + block] for i in range(0, len(pairs), block)]
    value, count = _ratio(pairs), len(blocks)
    if count < 2:
        return Estimate(value, None)
    without = [_ratio([pair for each in blocks[:i] + blocks[i + 1 :] for pair in each]) for i in range(count)]
    error = sqrt((count - 1) / count * sum((each - mean(without)) ** 2 for each in without))
    student = _T[count - 2] if count - 1 <= len(_T) else 1.96 + 2.75 / (count - 1)
    return Estimate(value, student * error)


def _ratio(pairs: Sequence[tuple[tuple[int, float], tuple[int, float]]]) -> float:
    """Ratio of two rates, each given by (tokens, seconds) of each text."""
    rates = (sum(pair[i][0] for pair in pairs) / sum(pair[i][1] for pair in pairs) for i in (0, 1))
    return next(rates) / next(rates)
