"""Cases of a product in which each two values of two axes meet: where two settings together go wrong, one shows it."""

from collections.abc import Iterable
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """As `itertools.product`, with as few cases as a greedy choice finds."""
    values = [list(axis) for axis in axes]
    return [
        tuple(axis[at] for axis, at in zip(values, case, strict=True))
        for case in _cases(*map(len, values))
    ]


@cache
def _cases(*sizes: int) -> list[tuple[int, ...]]:
    """Choose, again and again, the case with the most missing pairs. A set of pairs is the bits of a number."""
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
