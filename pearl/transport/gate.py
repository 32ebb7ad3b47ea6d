"""How much a listener takes from each peer, decided by a message's size before it is decoded.

Decoding time and malformed input are charged afterwards. A well-behaved peer keeps an `Account` of its own, and waits
before it exceeds the limit. Knows no sockets and no messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pearl.errors import RemoteProtocolError
from pearl.quota import Bucket
from pearl.transport.base import Peer

AT_ONCE = 16 << 20  # bytes from one peer
PER_SECOND = 4 << 20  # bytes from one peer, after that
MESSAGE = 4 << 10  # bytes charged for each message besides its own: 4,096 messages at once, 1,024 a second
WORK = 80 << 20  # bytes charged for a second of decoding: 5% of a core over time, 0.2 s at once
MALFORMED = 60 << 10  # bytes charged for a malformed message, which is logged and answered: 256 at once, 64 a second
NEW = 8 * AT_ONCE  # bytes from all new peers together: a peer can reconnect as a new one
NEW_PER_SECOND = 4 * PER_SECOND  # bytes from these, after that
NEW_EACH = 256 << 10  # bytes that each new peer has in any case
_DECODING = 1.5  # bytes that a sender reckons for decoding, per byte sent; measured 0.7 to 1.05
_DECODED = 2 << 10  # bytes that it reckons besides, per message
_MANY = 1024  # peers remembered before silent ones are forgotten


class Gate:
    """A token bucket for each peer. A peer that overdraws it gets one error and is dropped until it is full again.

    The trusted peer (the draft, whose rate is limited by its model) has no limit.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._trusted: Peer | None = None
        self._buckets: dict[Peer, Bucket] = {}
        self._shut: set[Peer] = set()
        self._new = Bucket(NEW, NEW_PER_SECOND, clock())
        self._swept = clock()

    def trust(self, peer: Peer) -> None:
        """Lift the limit for `peer`, and for no other."""
        self._trusted = peer
        self._forget(peer)

    def trusts(self, peer: Peer) -> bool:
        return peer == self._trusted

    def admits(self, peer: Peer, size: int) -> bool:
        """Whether to decode a message of `size` bytes.

        Raises `RemoteProtocolError` for the first that is refused, with the text for the peer.
        """
        if peer == self._trusted:
            return True
        now = self._clock()
        bucket = self._buckets.get(peer) or self._meet(peer, now)
        before = bucket.level(now)
        if peer in self._shut:
            if before < AT_ONCE:
                return False
            self._shut.discard(peer)
        if bucket.take(size + MESSAGE, now, least=min(before, 0.0)) >= 0:  # a dropped message adds no debt
            return True
        self._shut.add(peer)
        raise RemoteProtocolError(
            f"too much at once: a peer may send {AT_ONCE >> 20} MiB, then {PER_SECOND >> 20} MiB a second, each "
            f"message counting {MESSAGE >> 10} KiB more, a malformed one {MALFORMED >> 10} KiB, and a second of "
            f"decoding {WORK >> 20} MiB; this one is ignored for {bucket.seconds_until(AT_ONCE, now):.0f} s"
        )

    def decoded(self, peer: Peer, seconds: float, malformed: bool = False) -> None:
        """Charge an admitted message's decoding time to its peer."""
        if (bucket := self._buckets.get(peer)) is not None:
            bucket.take(seconds * WORK + malformed * MALFORMED, self._clock(), least=-AT_ONCE)

    def _meet(self, peer: Peer, now: float) -> Bucket:
        if len(self._buckets) >= _MANY and now - self._swept > 1:
            self._swept = now
            for each in [each for each, bucket in self._buckets.items() if bucket.level(now) >= AT_ONCE]:
                self._forget(each)  # a full bucket is what a new peer has, too
        first = max(NEW_EACH, min(AT_ONCE, self._new.level(now)))
        self._new.take(AT_ONCE, now, least=0.0)
        bucket = self._buckets[peer] = Bucket(AT_ONCE, PER_SECOND, now, level=first)
        return bucket

    def _forget(self, peer: Peer) -> None:
        self._buckets.pop(peer, None)
        self._shut.discard(peer)


class Account:
    """A peer's own count of what the listener's `Gate` charges it. Usable from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()  # reentrant: a stream collected meanwhile sends a Cancel
        self._bucket = Bucket(AT_ONCE, PER_SECOND, clock())

    def sent(self, size: int) -> None:
        """A message of `size` bytes was sent."""
        with self._lock:
            self._bucket.take(size + MESSAGE + _DECODING * (size + _DECODED), self._clock())

    @property
    def seconds(self) -> float:
        """To wait before the next message: until half of the bytes are there, enough for one of any size."""
        with self._lock:
            return self._bucket.seconds_until(AT_ONCE / 2, self._clock())
