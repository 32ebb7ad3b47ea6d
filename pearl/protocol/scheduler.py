"""Which requests are worked on, in which slots; the others wait in the order in which they came."""

from __future__ import annotations

from collections import deque

from pearl.protocol.messages import Submit
from pearl.protocol.sequence import TokenSequence


class Scheduler:
    """Hands out slots. A slot keeps the sequence of its last request, whose cache the next one may begin with.

    Args:
        slots: sequences that the target's runner holds.
    """

    def __init__(self, slots: int = 1) -> None:
        self.sequences = [TokenSequence() for _ in range(slots)]
        self._free = list(range(slots))
        self._waiting: deque[Submit] = deque()

    def submit(self, submit: Submit) -> None:
        self._waiting.append(submit)

    def cancel(self, request: int) -> bool:
        """Forget a request that waits; whether there was one."""
        left = deque(submit for submit in self._waiting if submit.request != request)
        found, self._waiting = len(left) < len(self._waiting), left
        return found

    def admit(self) -> tuple[Submit, int] | None:
        """The next request that can begin, and its slot; None where none waits or no slot is free."""
        if not self._waiting or not self._free:
            return None
        return self._waiting.popleft(), self._free.pop(0)

    def release(self, slot: int) -> None:
        self._free.append(slot)
        self._free.sort()
