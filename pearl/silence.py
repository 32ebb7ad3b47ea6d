"""Measures how long a peer has been silent, without the time in which the listener itself was stopped."""

import threading
import time

SLACK = 4.0  # announced work may take this many times its measured time before the silence counts


class Silence:
    """Counts the seconds since a peer's last sign of life, without the time in which the listener was stopped.

    A listener that wakes up, after its machine was suspended or its container paused for example, must not mistake its
    own pause for the peer's silence. So at most `between_looks` seconds count between two reads of `seconds`.

    Args:
        between_looks: seconds; a running listener reads `seconds` at least this often.
    """

    def __init__(self, between_looks: float = 1.0) -> None:
        self._most = between_looks
        self._lock = threading.Lock()  # one thread may call `heard` while another reads `seconds`
        self.heard()

    def heard(self, allowance: float = 0.0) -> None:
        """Note a sign of life. `allowance`: seconds of announced work, which do not count as silence."""
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
