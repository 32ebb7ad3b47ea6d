"""Which row of vLLM's table is which request: rows have no names, and move when others end.

A request is known by its tokens.  A row continues a request if its tokens begin with all tokens that were seen of
that request. Two requests with the same tokens may be taken for one another: a draft knows nothing else of a request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[Any]
_LONGEST_GAP = 1024  # tokens: a row that has grown by more since it was last seen counts as new


class Match(NamedTuple):
    """A row's request: its number, how many of its tokens were seen before, 0 for a new one."""

    number: int
    start: int


class _Known:
    """The tokens seen of a request, in a buffer that grows."""

    def __init__(self, number: int, tokens: Tokens, row: int) -> None:
        self.number = number
        self.row = row
        self.length = len(tokens)
        self._buffer = np.empty(2 * len(tokens), dtype=tokens.dtype)
        self._buffer[: self.length] = tokens

    def is_continued(self, tokens: Tokens) -> bool:
        """Whether `tokens` begin with all that was seen; the last token seen is compared first, because it is the
        likeliest to differ.
        """
        length = self.length
        growth = len(tokens) - length
        if not 0 <= growth <= _LONGEST_GAP or tokens[length - 1] != self._buffer[length - 1]:
            return False
        return bool((tokens[:length] == self._buffer[:length]).all())

    def extend(self, tokens: Tokens, row: int) -> None:
        """Take in the row's tokens, which continue those seen."""
        if len(tokens) > len(self._buffer):
            grown = np.empty(2 * len(tokens), dtype=self._buffer.dtype)
            grown[: self.length] = self._buffer[: self.length]
            self._buffer = grown
        self._buffer[self.length : len(tokens)] = tokens[self.length :]
        self.length = len(tokens)
        self.row = row


class RowTable:
    """Recognises requests from step to step.

    Args:
        first: number of the first request; each new one has the next.
    """

    def __init__(self, first: int) -> None:
        self._next = first
        self._known: dict[int, _Known] = {}  # by number

    def follow(self, rows: list[Tokens]) -> list[Match]:
        """Return the request of each row, given all its tokens; requests without a row are forgotten."""
        unclaimed = dict(self._known)
        by_row = {known.row: known for known in unclaimed.values()}
        owners: list[_Known | None] = []
        for row, tokens in enumerate(rows):
            known = by_row.get(row)
            if known is not None and not known.is_continued(tokens):
                known = None
            if known is not None:
                del unclaimed[known.number]
            owners.append(known)
        matches: list[Match] = []
        for row, tokens in enumerate(rows):
            known = owners[row] or _longest(unclaimed.values(), tokens)
            if known is not None:
                unclaimed.pop(known.number, None)
            matches.append(self._take(known, tokens, row))
        self._known = {match.number: self._known[match.number] for match in matches}
        return matches

    def _take(self, known: _Known | None, tokens: Tokens, row: int) -> Match:
        if known is None:
            number = self._next
            self._next += 1
            self._known[number] = _Known(number, tokens, row)
            return Match(number, 0)
        start = known.length
        known.extend(tokens, row)
        return Match(known.number, start)


def _longest(candidates: Iterable[_Known], tokens: Tokens) -> _Known | None:
    """Return the longest of the requests that the row continues; None if it continues none."""
    longest: _Known | None = None
    for known in candidates:
        is_longer = longest is None or known.length > longest.length
        if is_longer and known.is_continued(tokens):
            longest = known
    return longest
