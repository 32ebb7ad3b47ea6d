"""How long a peer has been silent, as far as its listener could hear. Knows no processes and no messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SLACK = 4.0  # how much slower than measured announced work may be before its silence counts


class Silence:
    """Counts seconds between signs of life, but only those in which the listener itself was there to hear one.

    A machine that was suspended, a container that was paused, a front in the background of its terminal: who wakes up
    must not take its own absence for the peer's.  So of the time between two looks at most `between_looks` counts.

    Args:
        between_looks: seconds; the listener looks at least as often as that, as a rule.
    """

    def __init__(self, between_looks: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = between_looks, clock
        self._lock = threading.Lock()  # one thread may listen, and another look
        self.heard()

    def heard(self, allowance: float = 0.0) -> None:
        """A sign of life. `allowance`: seconds that it has asked for, being busy; they do not count as silence."""
        with self._lock:
            self._seconds, self._looked = -allowance, self._clock()

    @property
    def seconds(self) -> float:
        """Of silence so far; a look."""
        with self._lock:
            now = self._clock()
            self._seconds += min(now - self._looked, self._most)
            self._looked = now
            return self._seconds
