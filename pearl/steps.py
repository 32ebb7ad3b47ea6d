"""The steps of a start in a process's log: how long each one took, at level debug."""

from __future__ import annotations

import logging
import time


class Steps:
    """Logs each step when it is done. The CPU time of the first includes all since the process began."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._since = time.monotonic()
        self._cpu = 0.0

    def done(self, step: str) -> None:
        """Log a step, which began where the previous one ended."""
        now = time.monotonic()
        cpu = time.process_time()
        self._log.debug(
            "start: %s: %.2f s, %.2f s of CPU", step, now - self._since, cpu - self._cpu
        )
        self._since = now
        self._cpu = cpu
