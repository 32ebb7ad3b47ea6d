"""How fast requests are refused: who sends one bad request after another must not take the time of others' texts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

BURST = 50  # refusals that are told at once
A_SECOND = 50.0  # and so many each second from then on
LONGEST = 5.0  # seconds that one refusal is held back


class Pace:
    """Holds refusals back once there are too many: a connection has one request at a time, so it must wait.

    Args:
        clock, sleep: of the event loop; others in tests.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._left, self._at = float(BURST), clock()

    async def keep(self) -> None:
        """Wait until one more may be told."""
        now = self._clock()
        self._left = min(float(BURST), self._left + (now - self._at) * A_SECOND) - 1
        self._at = now
        if self._left < 0:
            await self._sleep(min(LONGEST, -self._left / A_SECOND))
        self._left = max(self._left, -LONGEST * A_SECOND)  # what is held back no longer is not counted for ever
