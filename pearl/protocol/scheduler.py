"""Which requests run in which slots, which of those that wait comes next, and what goes into one forward.

The only queue of requests and the only batching policy, for product and simulator.
"""

from __future__ import annotations

from collections import deque

from pearl.protocol.messages import Submit
from pearl.protocol.sequence import TokenSequence
from pearl.protocol.speeds import Speeds

# Tokens of a long prompt in one forward, up to a multiple of it: messages are looked at between two. Beside other
# requests it is fed in smaller chunks, as each of their tokens then waits for one.
PREFILL_CHUNK, SHARED_CHUNK = 512, 64
_GATHERING = 1.2  # draft forwards that a target forward is delayed for requests whose draft tokens are due


def prefill_chunk(sequence: TokenSequence, *, is_alone: bool) -> int:
    """How many unfed tokens of a prompt to feed in one forward."""
    chunk = PREFILL_CHUNK if is_alone else SHARED_CHUNK
    count = min(len(sequence.unfed), chunk - sequence.fed % chunk)
    if sequence.piece > 1 and sequence.fed < sequence.prompt:  # later tokens are computed in forwards of another size
        count = min(count, sequence.prompt - sequence.fed)
    return count


def seconds_to_gather(asked: int, waiting: int, speeds: Speeds) -> float:
    """How long to delay a target forward that `asked` requests are ready for, so that `waiting` others can join.

    The draft's tokens for several requests come of one draft forward, in a message for each. A request that misses the
    target's forward waits for a whole one; the delay is never longer than what it can save all of them, shared.
    """
    return min(_GATHERING * speeds.t_draft, speeds.t_target(1) * waiting / asked)


class Scheduler:
    """Hands out slots. A slot keeps the sequence of its last request, whose cache the next one may begin with.

    Clients (`Submit.client`) take turns, so that none waits for all that another has submitted.

    Args:
        slots: sequences that the target's runner holds.
        piece: see `Capabilities.prompt_piece`.
    """

    def __init__(self, slots: int = 1, piece: int = 1) -> None:
        self.sequences = [TokenSequence(piece=piece) for _ in range(slots)]
        self.is_held = False  # nothing is admitted: a recording begins or ends first
        self._free = list(range(slots))  # the one released first comes first
        self._queues: dict[str, deque[Submit]] = {}  # by client; the one whose turn it is comes first

    @property
    def waiting(self) -> list[Submit]:
        """What would be admitted in which order, if clients submitted nothing more."""
        queues, found = [list(queue) for queue in self._queues.values()], []
        while queues:
            found += [queue.pop(0) for queue in queues]
            queues = [queue for queue in queues if queue]
        return found

    def submit(self, submit: Submit) -> None:
        self._queues.setdefault(submit.client, deque()).append(submit)

    def cancel(self, request: int) -> bool:
        """Forget a request that waits; whether there was one."""
        for client, queue in self._queues.items():
            for submit in queue:
                if submit.request == request:
                    queue.remove(submit)
                    if not queue:
                        del self._queues[client]
                    return True
        return False

    def admit(self) -> tuple[Submit, int] | None:
        """The next request and its slot; None where none waits, no slot is free or nothing is admitted.

        Its slot is the one whose cache has most of its prompt, of several that with the oldest text.
        """
        if not self._queues or not self._free or self.is_held:
            return None
        client, queue = next(iter(self._queues.items()))
        del self._queues[client]
        submit = queue.popleft()
        if queue:
            self._queues[client] = queue  # behind the others
        slot = max(self._free, key=lambda free: self.sequences[free].held(submit.prompt))
        self._free.remove(slot)
        return submit, slot

    def release(self, slot: int) -> None:
        self._free.append(slot)
