"""Who may go next where only so many may at a time, and clients are to have turns."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress


class Turnstile:
    """As `asyncio.Semaphore`, but clients take turns: who has come often waits for itself, not others for it.

    Of one client the first to come is the first, so with one client alone it is first come first served.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}  # the client whose turn it is comes first

    def locked(self) -> bool:
        """Whether who came now would wait."""
        return not self._free

    async def acquire(self, client: str = "") -> None:
        """Waits for a place, which `release` gives back."""
        if self._free:  # nobody waits: a place is free only where it found nobody
            self._free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # cancelled just after its turn had come
                self.release()
            else:
                self._forget(client, place)
            raise

    def release(self) -> None:
        for client in list(self._queues):
            queue = self._queues.pop(client)
            while queue:
                place = queue.popleft()
                if place.done():  # cancelled, and not come round to say so
                    continue
                if queue:
                    self._queues[client] = queue  # behind the others
                place.set_result(None)
                return
        self._free += 1

    def _forget(self, client: str, place: asyncio.Future[None]) -> None:
        queue = self._queues.get(client, deque())
        with suppress(ValueError):  # `release` has come by and dropped it
            queue.remove(place)
        if not queue:
            self._queues.pop(client, None)
