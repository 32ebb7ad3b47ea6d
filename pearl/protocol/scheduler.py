"""Scheduling: the queue of waiting requests, their slots, prefill chunks, and batches of requests.

Both workers and the simulator use this file; there is no other queue and no other batching policy.
"""

from collections import deque
from collections.abc import Collection
from typing import Generic, TypeVar

from pearl.protocol.events import Draft, Forward, Open
from pearl.protocol.messages import Submit
from pearl.protocol.sequence import TokenSequence
from pearl.protocol.speeds import Speeds

# Chunked prefill: the most prompt tokens in one forward. Chunks end at multiples of this number,
# and messages are read between chunks. While other requests run, chunks are smaller
# (SHARED_CHUNK), because each token of the other requests waits for a whole chunk.
PREFILL_CHUNK = 512
SHARED_CHUNK = 64
# Maximum delay of a target forward, in draft forwards, for requests whose draft tokens are due.
_GATHERING = 1.2


def prefill_chunk(sequence: TokenSequence, *, is_alone: bool) -> int:
    """Return the number of unfed prompt tokens to feed in the next forward.

    `is_alone`: whether no other request is running.
    """
    chunk = PREFILL_CHUNK if is_alone else SHARED_CHUNK
    count = min(len(sequence.tokens) - sequence.fed, chunk - sequence.fed % chunk)
    if sequence.fed < sequence.prompt:
        # Tokens after the prompt need forwards of another size. Besides, windows must not depend on
        # how many draft tokens come during the prefill.
        count = min(count, sequence.prompt - sequence.fed)
    return count


_Command = TypeVar("_Command", Forward, Draft)


class Batch(Generic[_Command]):
    """Commands of several requests that one forward of a model will compute together.

    The forward starts once the worker has nothing else to do and the `delay` is over.
    """

    def __init__(self) -> None:
        self.commands: list[_Command] = []
        self._start = 0.0  # when the forward begins at the latest; 0 if it is not delayed

    def delay(self, waiting: Collection[int], now: float, speeds: Speeds) -> float:
        """Return how many seconds to delay the forward, so that more requests can join it.

        The requests in `waiting` still wait for draft tokens. One draft forward serves several
        requests, so their tokens arrive almost together. A request that misses this forward waits
        until the forward ends. If the request joins the forward, it saves this time, t_target. But
        the delay holds up every request that is ready now. So the delay is at most t_target *
        (number of waiting requests) / (number of ready requests): its total cost is then no more
        than it can save. The delay is also at most as long as 1.2 draft forwards.

        Args:
            waiting: numbers of the requests that wait for draft tokens.
            now: the time, in seconds of a monotonic clock.
            speeds: the measured forward times.
        """
        if not waiting:
            return 0.0
        if not self._start:
            saved = speeds.t_target(1) * len(waiting) / len(self.commands)
            self._start = now + min(_GATHERING * speeds.t_draft, saved)
        return max(0.0, self._start - now)

    def precedes(self, command: object) -> bool:
        """Return whether the forward must run before `command` is carried out.

        It must run before an `Open`, which may give a request's slot to another request.
        """
        return bool(self.commands) and isinstance(command, Open)

    def take(self) -> list[_Command]:
        """Return the commands of the forward that begins now, and remove them."""
        commands = self.commands
        self.commands = []
        self._start = 0.0
        return commands


class Scheduler:
    """Assigns waiting requests to slots. Clients (`Submit.client`) take turns.

    A slot keeps the sequence and KV cache of its last request, so that its next request can reuse
    the cache of a common prefix.

    Args:
        slots: number of sequences that the target's runner holds.
        piece: how many prompt tokens are computed together; see `Capabilities.prompt_piece`.
    """

    def __init__(self, slots: int = 1, piece: int = 1) -> None:
        self.sequences = [TokenSequence(piece=piece) for _ in range(slots)]
        self._free = list(range(slots))  # least recently released first
        self._queues: dict[str, deque[Submit]] = {}  # by client; the first client is served next

    def submit(self, submit: Submit) -> None:
        self._queues.setdefault(submit.client, deque()).append(submit)

    def cancel(self, request: int) -> bool:
        """Remove a waiting request; return whether it was waiting."""
        for client, queue in self._queues.items():
            for submit in queue:
                if submit.request == request:
                    queue.remove(submit)
                    if not queue:
                        del self._queues[client]
                    return True
        return False

    def admit(self) -> tuple[Submit, int] | None:
        """Take the next request off the queue and assign it a slot; return (request, slot).

        Return None if no request waits or no slot is free. The slot is the free one whose KV cache
        holds the longest prefix of the prompt. If several slots hold equally much, the slot that
        was released first is assigned.
        """
        if not self._queues or not self._free:
            return None
        client, queue = next(iter(self._queues.items()))
        del self._queues[client]
        submit = queue.popleft()
        if queue:
            self._queues[client] = queue  # to the end of the round
        slot = max(self._free, key=lambda free: self.sequences[free].held(submit.prompt))
        self._free.remove(slot)
        return submit, slot

    def release(self, slot: int) -> None:
        self._free.append(slot)
