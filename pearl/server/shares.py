"""Fair shares of a bounded resource: a client that takes all of it leaves the others their share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Shares:
    """How much each client holds.

    Up to the bound, first come, first served. Beyond it a client gets at most the bound divided by the number of
    clients that hold any, itself included. So all together may hold more than the bound, in ever smaller shares; a
    client alone never does.
    """

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self.total = 0

    def fits(self, client: str, amount: int, most: int) -> bool:
        """Whether `client` may take `amount` where the bound is `most`."""
        clients = len(self._held) + (client not in self._held)
        return self.total + amount <= most or self._held[client] + amount <= most // clients

    def take(self, client: str, amount: int) -> None:
        self._held[client] += amount
        self.total += amount
        if not self._held[client]:
            del self._held[client]

    def give_back(self, client: str, amount: int) -> None:
        self.take(client, -amount)

    @contextmanager
    def one(self, client: str) -> Iterator[None]:
        self.take(client, 1)
        try:
            yield
        finally:
            self.give_back(client, 1)
