"""What a draft's row says beside its token, and how often that comes true: learned while texts are written.

The draft weighs its branches by it, the target the runners-up that it feeds beside the draft's tokens; each learns for
itself.  Pure arithmetic.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pearl.config.records import Position, Record

RIVALS = 4  # tokens of a row that are considered beside the one drawn
_SHARES = 8
_RATE_WEIGHT = 0.03  # of a new outcome in a rate

# Acceptance rate of a drafted token by its share among the likeliest of its row, in eighths; and how often, if it is
# rejected, the target commits the best of the others, the second, and so on. Measured on answers of the embedded pair.
_AGREED = (0.15, 0.15, 0.18, 0.24, 0.35, 0.43, 0.6, 0.75)
_RIGHT = (0.22, 0.11, 0.07, 0.06)


class Seen(Record, frozen=True):
    """The draft's row about a token drawn from it.

    Attributes:
        share: probability of the token among the likeliest, in eighths.
        rivals: its runners-up, the likeliest first.
    """

    share: Annotated[int, Meta(ge=0, lt=_SHARES)]
    rivals: Annotated[tuple[Position, ...], Meta(max_length=RIVALS)] = ()


class Foresight:
    """How often the target commits drafted tokens, and their runners-up if not."""

    def __init__(self) -> None:
        self._agreed = list(_AGREED)
        self._right = list(_RIGHT)

    def learn(self, seen: Seen, token: int, committed: int) -> None:
        """Take in that the target has decided on `committed` where `token` was drafted."""
        hit = committed == token
        self._agreed[seen.share] += _RATE_WEIGHT * (hit - self._agreed[seen.share])
        if not hit:
            for rank, rival in enumerate(seen.rivals):
                self._right[rank] += _RATE_WEIGHT * ((rival == committed) - self._right[rank])

    def agrees(self, seen: Seen) -> float:
        """Probability that the target commits the drafted token, given all before it."""
        return self._agreed[seen.share]

    def others(self, seen: Seen) -> list[tuple[float, int]]:
        """(probability, rival) for each rival."""
        rejected = 1 - self.agrees(seen)
        pairs = zip(self._right, seen.rivals, strict=False)
        return [(rejected * chance, rival) for chance, rival in pairs]
