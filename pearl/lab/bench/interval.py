"""Bootstrap confidence intervals."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

_Item = TypeVar("_Item")
DRAWS = 2000  # resamples


@dataclass(frozen=True)
class Interval:
    """A statistic and the 95% percentile bootstrap interval around it."""

    value: float
    low: float
    high: float


def median_of(values: Sequence[float], draws: int = DRAWS) -> Interval:
    """The median with its interval."""
    return bootstrapped(values, median, draws)


def bootstrapped(items: Sequence[_Item], statistic: Callable[[Sequence[_Item]], float], draws: int = DRAWS) -> Interval:
    """The statistic of `items`, with its 95% interval over `draws` resamples with replacement.

    Deterministic: the resamples depend only on the number of items. Source: Efron 1979, "Bootstrap methods: another
    look at the jackknife".
    """
    noise = random.Random(0)
    drawn = sorted(statistic(noise.choices(items, k=len(items))) for _ in range(draws))
    return Interval(statistic(items), drawn[int(0.025 * draws)], drawn[int(0.975 * draws)])
