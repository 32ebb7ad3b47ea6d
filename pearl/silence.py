"""Measures how long a peer has been silent, leaving out time in which the listener was stopped."""

import threading
import time

# Announced work may take this many times its measured time before silence counts.
SLACK = 4.0


class Silence:
    """Counts the seconds since a peer's last sign of life, while the listener itself was running.

    A listener may be stopped, for example because its machine is suspended or its container paused.
    It must not mistake its own pause for the peer's silence. So at most `between_looks` seconds
    count between two reads of `seconds`.

    Args:
        between_looks: seconds within which a running listener reads `seconds` again.
    """

    def __init__(self, between_looks: float = 1.0) -> None:
        self._most = between_looks
        self._lock = threading.Lock()  # one thread may call `heard` while another reads `seconds`
        self.heard()

    def heard(self, allowance: float = 0.0) -> None:
        """Record a sign of life.

        `allowance`: seconds of work that the peer has announced, which will not count as silence.
        """
        with self._lock:
            self._seconds = -allowance
            self._looked = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of silence so far. Reading this property counts the time since the previous read."""
        with self._lock:
            now = time.monotonic()
            self._seconds += min(now - self._looked, self._most)
            self._looked = now
            return self._seconds
