"""Quotas: how much of a total a client may hold, and whose turn is next.

The one mechanism behind the limits of the target's queue and of the HTTP server; each brings its own numbers. Knows no
messages and no sockets.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager


class Shares:
    """How much of a bounded total each client holds.

    Up to the bound it is first come, first served. Beyond it a client may still hold its share: the bound divided by
    the number of clients that hold anything, itself included. So one client cannot lock the others out; together they
    may exceed the bound, by ever smaller shares.
    """

    def __init__(self) -> None:
        self._held: Counter[object] = Counter()
        self.total = 0

    def fits(self, client: object, amount: int, most: int, share: int | None = None) -> bool:
        """Whether `client` may take `amount` more. `share`: a fixed share instead of an equal one."""
        if share is None:
            share = most // (len(self._held) + (client not in self._held))
        return self.total + amount <= most or self._held[client] + amount <= share

    def take(self, client: object, amount: int) -> None:
        self._held[client] += amount
        self.total += amount
        if not self._held[client]:
            del self._held[client]

    @contextmanager
    def held(self, client: object) -> Iterator[None]:
        """While the client holds one."""
        self.take(client, 1)
        try:
            yield
        finally:
            self.take(client, -1)


class FairSemaphore:
    """As `asyncio.Semaphore`, but waiting clients take turns; one client's own waiters are served in order."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the next client first

    async def acquire(self, client: str = "") -> None:
        if self._free:  # then nobody waits
            self._free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # cancelled after its turn had come
                self.release()
            raise

    def release(self) -> None:
        for client in list(self._waiting):
            queue = self._waiting.pop(client)
            while queue:
                place = queue.popleft()
                if not place.done():  # else it was cancelled
                    if queue:
                        self._waiting[client] = queue  # behind the other clients
                    place.set_result(None)
                    return
        self._free += 1
