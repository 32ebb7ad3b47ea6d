"""The steps of a start in a process's log: how long each one took, at level debug."""

from __future__ import annotations

import logging
import time


class Steps:
    """Logs each step when it is done. The first one has also the CPU time since the process began."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._since = time.monotonic()
        self._cpu = 0.0

    def done(self, what: str) -> None:
        """The step `what`, which began where the one before it ended."""
        now = time.monotonic()
        cpu = time.process_time()
        self._log.debug(
            "start: %s: %.2f s, %.2f s of CPU", what, now - self._since, cpu - self._cpu
        )
        self._since = now
        self._cpu = cpu
