"""Rate-limited warnings about peers: the first at once, then one per period with the number of the others.

A peer may send faults as fast as it likes; the log must neither grow with them nor cost time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import inf

from pearl.transport.base import Peer

PERIOD = 10.0  # seconds between two lines about one peer
_MANY = 64  # peers told apart within a period; further ones share lines


class Notices:
    """Warnings about all peers of one worker."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._peers: dict[Peer, tuple[float, int]] = {}  # when a line was written, and lines left out since

    def warn(self, peer: Peer, text: str, *args: object) -> None:
        now = self._clock()
        if peer not in self._peers and len(self._peers) >= _MANY:
            self._peers = {known: last for known, last in self._peers.items() if now - last[0] < PERIOD}
            peer = peer if len(self._peers) < _MANY else b""
        when, silent = self._peers.get(peer, (-inf, 0))
        if now - when < PERIOD:
            self._peers[peer] = when, silent + 1
            return
        self._peers[peer] = now, 0
        more = f" (and {silent} more of this peer's)" if silent else ""
        self._log.warning(f"{text}%s", *args, more)
