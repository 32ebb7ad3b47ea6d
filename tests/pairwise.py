"""Chooses cases of a product so that any two values of two axes occur together in some case.

If two settings fail together, at least one of the cases shows it.
"""

from collections.abc import Iterable
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return cases of `itertools.product(*axes)` that contain each pair of values.

    A greedy choice keeps the number of cases small.
    """
    values = [list(axis) for axis in axes]
    return [
        tuple(axis[at] for axis, at in zip(values, case, strict=True))
        for case in _cases(*map(len, values))
    ]


@cache
def _cases(*sizes: int) -> list[tuple[int, ...]]:
    """Return the chosen cases as indices, for axes of these sizes.

    Again and again, the case with the most missing pairs is chosen. A set of pairs is stored as the
    bits of a number.
    """
    cases = list(product(*map(range, sizes)))
    numbers: dict[object, int] = {}
    pairs = []
    for case in cases:
        bits = 0
        for pair in combinations(enumerate(case), 2):
            bits |= 1 << numbers.setdefault(pair, len(numbers))
        pairs.append(bits)
    missing = (1 << len(numbers)) - 1
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda case: (pairs[case] & missing).bit_count())
        missing &= ~pairs[best]
        chosen.append(cases[best])
    return chosen


# For a test that loops over `combined(*axes)`: pairs each time, and all with the tests marked `long`.
combined = pytest.mark.parametrize(
    "combined", [pairwise, pytest.param(product, marks=pytest.mark.long)]
)
