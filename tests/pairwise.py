"""Chooses cases of a product so that any two values of two axes occur together in some case.

If two settings fail together, at least one of the cases shows it.
"""

from collections.abc import Iterable
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest

Value = tuple[int, int]  # the number of an axis, and of one of its values


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

    Each case begins with a pair of values that is still missing. For each further axis, the value
    with the most missing pairs beside the case's other values is added.
    """
    values = [[(axis, at) for at in range(size)] for axis, size in enumerate(sizes)]
    pairs: list[frozenset[Value]] = []
    for axes in combinations(values, 2):
        pairs += map(frozenset, product(*axes))
    missing = set(pairs)
    chosen = []
    for pair in pairs:
        if pair not in missing:
            continue
        case = dict(pair)
        for axis in values:
            if axis[0][0] not in case:
                case.update([max(axis, key=lambda value: _met(missing, value, case))])
        missing -= set(map(frozenset, combinations(case.items(), 2)))
        chosen.append(tuple(case[axis] for axis in range(len(sizes))))
    return chosen


def _met(missing: set[frozenset[Value]], value: Value, case: dict[int, int]) -> int:
    """Return how many missing pairs the value makes with those of the case."""
    return sum(frozenset((value, other)) in missing for other in case.items())


# For a test that loops over `combined(*axes)`: pairs each time, and all with the tests marked `long`.
combined = pytest.mark.parametrize(
    "combined", [pairwise, pytest.param(product, marks=pytest.mark.long)]
)
