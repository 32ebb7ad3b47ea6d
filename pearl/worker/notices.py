"""What a worker logs because of a peer: the first of it at once, then a line now and then that counts the rest.

A peer may send what is wrong as fast as it is heard; the log must neither grow with it nor cost time. Pure but for a
clock and the logger.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from pearl.transport.base import Peer

PERIOD = 10.0  # seconds between two lines about one peer
_MANY = 64  # peers that are told apart within a period; beyond, they share lines


@dataclass
class _Since:
    when: float
    silent: int = 0  # lines that were not written


class Notices:
    """Of all peers of one worker, in one logger."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._peers: dict[Peer | None, _Since] = {}

    def warn(self, peer: Peer, text: str, *args: object) -> None:
        now = self._clock()
        self._forget_the_quiet(now)
        known: Peer | None = peer if peer in self._peers or len(self._peers) < _MANY else None
        since = self._peers.get(known)
        if since is None:
            self._peers[known] = _Since(now)
        elif now - since.when < PERIOD:
            since.silent += 1
            return
        else:
            if since.silent:
                text, args = text + " (and %d more of this peer's)", (*args, since.silent)
            self._peers[known] = _Since(now)
        self._log.warning(text, *args)

    def _forget_the_quiet(self, now: float) -> None:
        """All that have said nothing wrong in the last period; it is looked at only where there are many."""
        if len(self._peers) >= _MANY:
            self._peers = {peer: since for peer, since in self._peers.items() if now - since.when < PERIOD}
