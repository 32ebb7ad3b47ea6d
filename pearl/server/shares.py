"""What each client has of something that has a bound: who takes all of it leaves the others their share."""

from __future__ import annotations

from collections import Counter


class Shares:
    """How much each client has.

    Up to the bound, who comes first has it. Beyond it a client gets no more than its share, the bound over the number
    of clients that have any, itself included: who has filled it is refused, and another is not. So all of them may have
    more than the bound together, though the share of each newcomer is smaller. A client alone has all, and no more.
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
