"""Which requests are worked on, in which slots; the others wait in the order in which they came."""

from __future__ import annotations

from collections import deque

from pearl.protocol.messages import Submit
from pearl.protocol.sequence import TokenSequence


class Scheduler:
    """Hands out slots. A slot keeps the sequence of its last request, whose cache the next one may begin with.

    Args:
        slots: sequences that the target's runner holds.
        piece: see `Capabilities.prompt_piece`.
    """

    def __init__(self, slots: int = 1, piece: int = 1) -> None:
        self.sequences = [TokenSequence(piece=piece) for _ in range(slots)]
        self._free = list(range(slots))  # first the one that was released first
        self._waiting: deque[Submit] = deque()

    def submit(self, submit: Submit) -> None:
        self._waiting.append(submit)

    def cancel(self, request: int) -> bool:
        """Forget a request that waits; whether there was one."""
        left = deque(submit for submit in self._waiting if submit.request != request)
        found, self._waiting = len(left) < len(self._waiting), left
        return found

    def admit(self) -> tuple[Submit, int] | None:
        """The next request that can begin, and its slot; None where none waits or no slot is free.

        Its slot is the one whose cache has most of its prompt, of several that with the oldest text.
        """
        if not self._waiting or not self._free:
            return None
        submit = self._waiting.popleft()
        slot = max(self._free, key=lambda free: self.sequences[free].held(submit.prompt))
        self._free.remove(slot)
        return submit, slot

    def release(self, slot: int) -> None:
        self._free.append(slot)
