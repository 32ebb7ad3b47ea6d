"""Estimates of how often the target commits a drafted token, and how often a runner-up instead.

A runner-up is a token that the draft found likely but did not draw. The estimates depend on what
the draft's distribution says of the token (`Seen`), and are updated during generation.

The draft uses them to choose which branches (continuations after a runner-up) to prepare. The
target uses them to choose which runners-up to verify together with the drafted tokens. Draft and
target learn separately. This file holds arithmetic only.
"""

from typing import Annotated

from msgspec import Meta

from pearl.config.records import Position, Record

RIVALS = 4  # runners-up considered per position: the likeliest tokens besides the drawn one
_SHARES = 8
_RATE_WEIGHT = 0.03  # weight of a new outcome in a rate's moving average

# _AGREED: acceptance rate of a drafted token, by `Seen.share`. _RIGHT: how often the target, if it rejects the token,
# commits the likeliest runner-up, the second, and so on. Both were measured on answers of the embedded pair.
_AGREED = (0.15, 0.15, 0.18, 0.24, 0.35, 0.43, 0.6, 0.75)
_RIGHT = (0.22, 0.11, 0.07, 0.06)


class Seen(Record, frozen=True):
    """What the draft's distribution for one position says about the token drawn from it.

    Attributes:
        share: which eighth of [0, 1] the token's share is in, from 0 to 7. The share is the token's
            probability among the likeliest tokens only (see `DraftHalf.likeliest`).
        rivals: the token's runners-up, the likeliest first.
    """

    share: Annotated[int, Meta(ge=0, lt=_SHARES)]
    rivals: Annotated[tuple[Position, ...], Meta(max_length=RIVALS)] = ()


class Foresight:
    """Rates at which the target commits a drafted token, or else one of its runners-up."""

    def __init__(self) -> None:
        self._agreed = list(_AGREED)
        self._right = list(_RIGHT)

    def learn(self, seen: Seen, token: int, committed: int) -> None:
        """Update the rates: `token` was drafted, and the target has committed `committed`."""
        hit = committed == token
        self._agreed[seen.share] += _RATE_WEIGHT * (hit - self._agreed[seen.share])
        if not hit:
            for rank, rival in enumerate(seen.rivals):
                self._right[rank] += _RATE_WEIGHT * ((rival == committed) - self._right[rank])

    def agrees(self, seen: Seen) -> float:
        """Return the probability that the target commits the drafted token.

        The probability assumes that the target commits all tokens before the drafted token.
        """
        return self._agreed[seen.share]

    def others(self, seen: Seen) -> list[tuple[float, int]]:
        """Return (probability that the target commits the runner-up, runner-up) for each runner-up.

        The probabilities assume that the target commits all tokens before this position.
        """
        rejected = 1 - self.agrees(seen)
        pairs = zip(self._right, seen.rivals, strict=False)
        return [(rejected * chance, rival) for chance, rival in pairs]
