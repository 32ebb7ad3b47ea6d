"""How much a listener takes from each of its peers, decided by the size of a message before it is decoded.

The time to decode a message, and that it was malformed, counts against its peer afterwards. A peer that means well
keeps an account of its own, and waits where it would not be heard.

Pure but for a clock. Knows no sockets and no messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pearl.errors import RemoteProtocolError
from pearl.transport.base import Peer

AT_ONCE = 16 << 20  # bytes from one peer
PER_SECOND = 4 << 20  # bytes from one peer, after that
MESSAGE = 4 << 10  # bytes that a message counts beside its own, for the work it makes: 4,096 at once, 1,024 a second
WORK = 80 << 20  # bytes that a second of decoding counts: a twentieth of a core, for long, and 0.2 s at once
MALFORMED = (
    60 << 10
)  # bytes that a malformed message counts besides, being logged and answered: 256 at once, 64 a second
NEW = 8 * AT_ONCE  # bytes from peers that are new, all together, as one may be new again and again
NEW_PER_SECOND = 4 * PER_SECOND  # bytes from these, after that
NEW_EACH = 256 << 10  # bytes that a new one has however many there are; the rest of its own comes with time
_DECODING = 1.5  # times a message's bytes that its sender reckons with for decoding; it is 0.7 to 1.05
_DECODED = 2 << 10  # bytes beside the message's own, likewise
_MANY = 1024  # peers that are remembered before those are forgotten that have been silent


class Gate:
    """A token bucket for each peer. A peer that overdraws its bucket is told once, and dropped until it is full again.

    The one that is trusted (the draft, whose rate is its model's) has no limit.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._trusted: Peer | None = None
        self._levels: dict[Peer, tuple[float, float]] = {}  # (bytes left, time of that)
        self._shut: set[Peer] = set()
        self._new = (float(NEW), clock())  # as of a peer
        self._looked = clock()

    def trust(self, peer: Peer) -> None:
        """Lift the limit for `peer`; only the last one trusted has none."""
        self._trusted = peer
        self._forget(peer)

    def trusts(self, peer: Peer) -> bool:
        return peer == self._trusted

    def admits(self, peer: Peer, size: int) -> bool:
        """Whether to decode a message of `size` bytes.

        Raises `RemoteProtocolError` for the first that is refused, with the text to tell the peer.
        """
        if peer == self._trusted:
            return True
        now = self._clock()
        if peer not in self._levels:
            self._meet(peer, now)
        left = before = self._left(peer, now)
        if peer in self._shut:
            if left < AT_ONCE:
                return False
            self._shut.discard(peer)
        left -= size + MESSAGE
        self._levels[peer] = (max(left, min(before, 0.0)), now)  # a dropped message adds no debt
        if left < 0:
            self._shut.add(peer)
            raise RemoteProtocolError(
                f"too much at once: a peer may send {AT_ONCE >> 20} MiB, then {PER_SECOND >> 20} MiB a second, each "
                f"message counting {MESSAGE >> 10} KiB more, one that is none {MALFORMED >> 10} KiB, and a second of "
                f"decoding {WORK >> 20} MiB; it is not heard for {(AT_ONCE - self._levels[peer][0]) / PER_SECOND:.0f} s"
            )
        return True

    def decoded(self, peer: Peer, seconds: float, malformed: bool = False) -> None:
        """Charge an admitted message's decoding time to its peer."""
        if peer not in self._levels:
            return
        left, since = self._levels[peer]
        left -= seconds * WORK + malformed * MALFORMED
        self._levels[peer] = (max(left, -AT_ONCE), since)

    def _left(self, peer: Peer, now: float) -> float:
        left, since = self._levels[peer]
        return min(AT_ONCE, left + (now - since) * PER_SECOND)

    def _meet(self, peer: Peer, now: float) -> None:
        if len(self._levels) >= _MANY and now - self._looked > 1:
            self._forget_the_silent(now)
        left, since = self._new
        left = min(NEW, left + (now - since) * NEW_PER_SECOND)
        self._new = (max(0.0, left - AT_ONCE), now)
        self._levels[peer] = (max(NEW_EACH, min(AT_ONCE, left)), now)

    def _forget(self, peer: Peer) -> None:
        self._levels.pop(peer, None)
        self._shut.discard(peer)

    def _forget_the_silent(self, now: float) -> None:
        """Forget peers whose buckets are full again: when they come again they are new."""
        self._looked = now
        for peer in [peer for peer in self._levels if self._left(peer, now) >= AT_ONCE]:
            self._forget(peer)


class Account:
    """What one peer has said, as the listener's `Gate` counts it, by the peer itself. Any thread may say something."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()  # a stream that is collected meanwhile cancels its request
        self._left, self._at = float(AT_ONCE), clock()

    def said(self, size: int) -> None:
        """A message of `size` bytes has been sent."""
        with self._lock:
            self._left = self._now() - size - MESSAGE - _DECODING * (size + _DECODED)

    @property
    def seconds(self) -> float:
        """To wait until a message of any size is heard: for it, and small ones beside, half of the bytes are there."""
        with self._lock:
            self._left = self._now()
            return max(0.0, (AT_ONCE / 2 - self._left) / PER_SECOND)

    def _now(self) -> float:
        before, self._at = self._at, self._clock()
        return min(AT_ONCE, self._left + (self._at - before) * PER_SECOND)
