"""Estimates with 95% intervals, bootstrapped: statistics of items, and speed-ups over many texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor, log10
from statistics import median
from typing import Any

from pearl.metrics import Sums

_MAX_DIGITS = 3
_RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A value and its 95% interval. `low` and `high`: equal to `value` if the interval is unknown, or empty."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Such as 2.31 (2.28-2.33): decimals up to the first digit of half the interval's width."""
        if not (margin := (self.high - self.low) / 2):
            return f"{self.value:.2f}"
        digits = min(_MAX_DIGITS, max(0, -floor(log10(margin))))
        return "{:.{d}f} ({:.{d}f}-{:.{d}f})".format(self.value, self.low, self.high, d=digits)


def bootstrap(
    items: Sequence[Any],
    statistic: Callable[[Sequence[Any]], float] = median,
    resamples: int = _RESAMPLES,
) -> Estimate:
    """The statistic of `items`, with its percentile interval over resamples with replacement.

    Deterministic: the resamples depend only on the number of items. Source: Efron 1979, "Bootstrap methods: another
    look at the jackknife".
    """
    noise = random.Random(0)
    drawn = sorted(statistic(noise.choices(items, k=len(items))) for _ in range(resamples))
    return Estimate(statistic(items), drawn[int(0.025 * resamples)], drawn[int(0.975 * resamples)])


def speedup(one: Sums, other: Sums) -> Estimate:
    """Speed of `one` over that of `other` on the same texts: the ratio of their rates over all texts."""
    pairs = zip(one.texts, other.texts, strict=True)
    return bootstrap(
        [[(text.late_tokens, text.late_seconds) for text in pair] for pair in pairs], _ratio
    )


def _ratio(pairs: Sequence[Sequence[tuple[int, float]]]) -> float:
    """Ratio of two rates, each given by (tokens, seconds) of each text."""
    one, other = (
        sum(pair[i][0] for pair in pairs) / sum(pair[i][1] for pair in pairs) for i in (0, 1)
    )
    return one / other
