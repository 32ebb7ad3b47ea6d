"""Estimates with bootstrapped 95% intervals, of any statistic and of speed-ups over many texts."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor, log10
from statistics import median
from typing import Any

from pearl.metrics import Statistics, Sums

_MAX_DIGITS = 3
_RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A value and its 95% interval. `low` and `high` equal `value` if the interval is unknown or has no width."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return value and interval, such as "2.31 (2.28-2.33)".

        If the interval has no width, return the value alone. There are as many decimals, up to 3,
        as show the first significant digit of half the interval's width.
        """
        margin = (self.high - self.low) / 2
        if not margin:
            return f"{self.value:.2f}"
        digits = min(_MAX_DIGITS, max(0, -floor(log10(margin))))
        return f"{self.value:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def bootstrap(
    items: Sequence[Any],
    statistic: Callable[[Sequence[Any]], float] = median,
    resamples: int = _RESAMPLES,
) -> Estimate:
    """Return the statistic of `items`, with its percentile interval over resamples with replacement.

    The resamples depend only on the number of items, so the result is deterministic. Source: Efron 1979, "Bootstrap
    methods: another look at the jackknife".
    """
    noise = random.Random(0)
    values = sorted(statistic(noise.choices(items, k=len(items))) for _ in range(resamples))
    return Estimate(
        statistic(items), values[int(0.025 * resamples)], values[int(0.975 * resamples)]
    )


def speedup(texts: Sums, base: Sums) -> Estimate:
    """Return the speed-up of `texts` over `base`: the ratio of their tokens per second.

    `texts` and `base` have the same texts in the same order. The interval is over texts.
    """
    return bootstrap(list(zip(texts.texts, base.texts, strict=True)), _ratio)


def _ratio(pairs: Sequence[tuple[Statistics, Statistics]]) -> float:
    texts, base = zip(*pairs, strict=True)
    rate = Sums(texts=list(texts)).rate or 0.0
    base_rate = Sums(texts=list(base)).rate
    assert base_rate, "a text takes time"
    return rate / base_rate
