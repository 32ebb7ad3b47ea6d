"""Rate-limited warnings about peers: the first at once, then one per period with the number of the others.

A peer may send faults as fast as it likes; the log must neither grow with them nor cost time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from pearl.transport.base import Peer

PERIOD = 10.0  # seconds between two lines about one peer
_MANY = 64  # peers told apart within a period; further ones share lines


@dataclass
class _Since:
    when: float
    silent: int = 0  # lines not written since


class Notices:
    """Warnings about all peers of one worker."""

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
        """Forget peers without a warning in the last period, once there are many."""
        if len(self._peers) >= _MANY:
            self._peers = {peer: since for peer, since in self._peers.items() if now - since.when < PERIOD}
