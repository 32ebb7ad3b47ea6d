"""Finds the request that each row of vLLM's table belongs to.

Rows have no ids, and they move when other requests end. So a request is recognised by its tokens: a
row continues a request if the row's tokens begin with all tokens seen of that request so far. Two
requests with the same tokens may be mixed up. This does no harm, because the draft would draft the
same for both.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[Any]
_LONGEST_GAP = 1024  # tokens; a row that has grown by more since the last step is a new request


class Match(NamedTuple):
    """The request of a row.

    Attributes:
        number: the request's number.
        start: how many of the request's tokens were seen before; 0 for a new request.
    """

    number: int
    start: int


class _Known:
    """A request, and the tokens seen of it so far, in a buffer that grows."""

    def __init__(self, number: int, tokens: Tokens, row: int) -> None:
        self.number = number
        self.row = row
        self.length = len(tokens)
        self._buffer = np.empty(2 * len(tokens), dtype=tokens.dtype)
        self._buffer[: self.length] = tokens

    def is_continued(self, tokens: Tokens) -> bool:
        """Return whether `tokens` begin with all tokens seen of the request.

        The last token seen is compared first, because it is the likeliest to differ.
        """
        length = self.length
        growth = len(tokens) - length
        if not 0 <= growth <= _LONGEST_GAP or tokens[length - 1] != self._buffer[length - 1]:
            return False
        return bool((tokens[:length] == self._buffer[:length]).all())

    def extend(self, tokens: Tokens, row: int) -> None:
        """Store the new tokens of a row that continues the request.

        `tokens`: all tokens of the row, old and new.
        """
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
        first: number of the first request. Each new request gets the next number.
    """

    def __init__(self, first: int) -> None:
        self._next = first
        self._known: dict[int, _Known] = {}  # by number

    def follow(self, rows: list[Tokens]) -> list[Match]:
        """Return the request of each row, and forget requests that have no row.

        `rows`: all tokens of each row.
        """
        unclaimed = dict(self._known)
        by_row = {known.row: known for known in unclaimed.values()}
        owners = []
        for row, tokens in enumerate(rows):
            known = by_row.get(row)
            if known is not None and not known.is_continued(tokens):
                known = None
            if known is not None:
                del unclaimed[known.number]
            owners.append(known)
        matches = []
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
    """Return the longest of the requests that `tokens` continue; None if they continue none."""
    longest = None
    for known in candidates:
        is_longer = longest is None or known.length > longest.length
        if is_longer and known.is_continued(tokens):
            longest = known
    return longest
