"""Checks at load time that the bits of a row do not depend on the rows computed beside it, on the CPU at hand.

Which kernel serves a shape differs between instruction sets.  Must not know models: it gets products and shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 31)  # rows that are compared with _TOGETHER
_TOGETHER = 48
_CANDIDATES = (1, 2, 4, 8, 16)


class Heads(NamedTuple):
    """The shape of attention: query heads, key-value heads, dimensions of a head."""

    query: int
    kv: int
    dim: int


def least_rows(product: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> int:
    """Return the least number of rows (1 to 16) from which on a row's bits are independent of the others; 0: none.

    Args:
        product: [n, in] -> [n, ...].
        rows: `probe_rows`.
    """
    together = product(rows[:_TOGETHER])

    def agrees(count: int) -> bool:
        return all(
            torch.equal(product(rows[start : start + count].contiguous()), together[start : start + count])
            for start in (0, 5)
        )

    differing = [size for size in _SIZES if not agrees(size)]
    return next((least for least in _CANDIDATES if all(size < least for size in differing)), 0)


def irregular(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """[count, width] of normal random numbers, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, width, generator=generator).to(dtype)


def probe_rows(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows for `least_rows`."""
    return irregular(_TOGETHER, width, dtype)
