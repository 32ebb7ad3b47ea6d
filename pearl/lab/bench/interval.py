"""Bootstrap confidence intervals."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

_RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A statistic and the 95% percentile bootstrap interval around it."""

    value: float
    low: float
    high: float

    def in_words(self, digits: int = 2) -> str:
        return f"{self.value:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def bootstrap(
    items: Sequence[Any], statistic: Callable[[Sequence[Any]], float] = median, resamples: int = _RESAMPLES
) -> Interval:
    """The statistic of `items`, with its 95% interval over resamples with replacement.

    Deterministic: the resamples depend only on the number of items. Source: Efron 1979, "Bootstrap methods: another
    look at the jackknife".
    """
    noise = random.Random(0)
    drawn = sorted(statistic(noise.choices(items, k=len(items))) for _ in range(resamples))
    return Interval(statistic(items), drawn[int(0.025 * resamples)], drawn[int(0.975 * resamples)])
