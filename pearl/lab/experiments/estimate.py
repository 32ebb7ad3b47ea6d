"""How sure a simulated speed-up is: a ratio of rates over many texts, and its 95% interval.

Texts whose luck was drawn together (a block of a Latin hypercube) say nothing about the noise of their sum, for they
balance each other; blocks do, for each has luck of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pearl.lab.experiments.workload import Totals

_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t, 97.5%, by degrees of freedom from 1 on
_MOST_DIGITS = 3  # behind the point


@dataclass(frozen=True)
class Estimate:
    """A value and half the width of its 95% interval; None where one block is all there is."""

    value: float
    margin: float | None

    @property
    def low(self) -> float:
        return self.value - (self.margin or 0.0)

    @property
    def high(self) -> float:
        return self.value + (self.margin or 0.0)

    def ties(self, other: float) -> bool:
        """Whether the interval holds `other`."""
        return self.margin is not None and self.low <= other <= self.high

    @property
    def digits(self) -> int:
        """Decimals that the margin leaves: its first digit is the last that is told. 2 where it is not known."""
        if self.margin is None:
            return 2
        return _MOST_DIGITS if not self.margin else min(_MOST_DIGITS, max(0, -floor(log10(self.margin))))

    def rounded(self) -> str:
        return f"{self.value:.{self.digits}f}"

    def __str__(self) -> str:
        return self.rounded() + (f" ± {self.margin:.{self.digits}f}" if self.margin else "")


def speedup(totals: Totals, other: Totals, block: int) -> Estimate:
    """How many times as fast `totals` is as `other` was on the same texts: the ratio of their rates over all texts.

    Args:
        block: texts of a block.

    The interval is a jackknife over blocks (Quenouille 1956, Tukey 1958).
    """
    pairs = list(zip(totals.texts, other.texts, strict=True))
    blocks = [pairs[i : i + block] for i in range(0, len(pairs), block)]
    value, count = _ratio(pairs), len(blocks)
    if count < 2:
        return Estimate(value, None)
    without = [_ratio([pair for other_ in blocks[:i] + blocks[i + 1 :] for pair in other_]) for i in range(count)]
    middle = sum(without) / count
    error = sqrt((count - 1) / count * sum((each - middle) ** 2 for each in without))
    return Estimate(value, _student(count - 1) * error)


def _ratio(pairs: Sequence[tuple[tuple[int, float], tuple[int, float]]]) -> float:
    """Of the rates of the first and the second; each has (tokens, seconds) for each text."""
    mine, others = ([pair[i] for pair in pairs] for i in (0, 1))
    return _rate(mine) / _rate(others)


def _rate(texts: Sequence[tuple[int, float]]) -> float:
    return sum(tokens for tokens, _ in texts) / sum(seconds for _, seconds in texts)


def _student(degrees: int) -> float:
    return _T[degrees - 1] if degrees <= len(_T) else 1.96 + 2.75 / degrees
