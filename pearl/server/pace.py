"""Limits the rate of refusals, so that a flood of bad requests does not slow down others' texts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

BURST = 50  # refusals that are sent without delay
A_SECOND = 50.0  # the rate after that
LONGEST = 5.0  # seconds of delay at most


class Pace:
    """Delays refusals beyond the rate: a token bucket. A connection has one request at a time, so its client waits.

    Args:
        clock, sleep: of the event loop, except in tests.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._left, self._at = float(BURST), clock()

    async def keep(self) -> None:
        """Wait until one more refusal may be sent."""
        now = self._clock()
        self._left = min(float(BURST), self._left + (now - self._at) * A_SECOND) - 1
        self._at = now
        if self._left < 0:
            await self._sleep(min(LONGEST, -self._left / A_SECOND))
        self._left = max(self._left, -LONGEST * A_SECOND)  # so that a flood is forgotten
