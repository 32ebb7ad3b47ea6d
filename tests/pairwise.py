"""Cases of a product in which each two values of two axes meet: where two settings together go wrong, one shows it."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """As `itertools.product`, with as few cases as a greedy choice finds."""
    values = [list(axis) for axis in axes]
    places = list(product(*(range(len(axis)) for axis in values)))
    pairs = [set(combinations(enumerate(place), 2)) for place in places]
    missing, chosen = set().union(*pairs), []
    while missing:
        best = max(range(len(places)), key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        chosen.append(tuple(axis[at] for axis, at in zip(values, places[best], strict=True)))
    return chosen


# For a test that loops over `combined(*axes)`: pairs each time, and all with the tests marked `long`.
combined = pytest.mark.parametrize("combined", [pairwise, pytest.param(product, marks=pytest.mark.long)])
