"""How long a peer has been silent while its listener was listening."""

from __future__ import annotations

import threading
import time

SLACK = 4.0  # announced work may take this many times its measured time before the silence counts


class Silence:
    """Counts seconds since the last sign of life, without those in which the listener itself was stopped.

    After a suspended machine, a paused container or a front in the background wakes up, it must not take its own
    absence for the peer's. So of the time between two looks at most `between_looks` seconds count.

    Args:
        between_looks: seconds; the listener normally looks at least as often.
    """

    def __init__(self, between_looks: float = 1.0) -> None:
        self._most = between_looks
        self._lock = threading.Lock()  # one thread may listen and another look
        self.heard()

    def heard(self, allowance: float = 0.0) -> None:
        """Note a sign of life. `allowance`: seconds of announced work, which do not count as silence."""
        with self._lock:
            self._seconds = -allowance
            self._looked = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of silence so far; reading this is a look."""
        with self._lock:
            now = time.monotonic()
            self._seconds += min(now - self._looked, self._most)
            self._looked = now
            return self._seconds
