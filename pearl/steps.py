"""Logs, at level debug, how long each step of a process's start took."""

import logging
import time


class Steps:
    """Logs the time and the CPU time of each step of a start, when the step is done.

    The CPU time of the first step counts from the start of the process.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._since = time.monotonic()
        self._cpu = 0.0

    def done(self, step: str) -> None:
        """Log a step, which began when the previous one ended."""
        now = time.monotonic()
        cpu = time.process_time()
        self._log.debug(
            "start: %s: %.2f s, %.2f s of CPU", step, now - self._since, cpu - self._cpu
        )
        self._since = now
        self._cpu = cpu
