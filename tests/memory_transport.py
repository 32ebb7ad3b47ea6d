"""Endpoints and tensor channels within one process. Messages pass through the codec, as on the wire."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count
from queue import Empty, SimpleQueue
from threading import Condition

import torch

from pearl.errors import TransportError
from pearl.protocol.messages import Message
from pearl.transport.base import MAX_BATCH, SOLE_PEER, Peer, Received
from pearl.transport.codec import encode, received


class MemoryEndpoint:
    """An end of a connection within the process.

    It puts frames into the queues of its peers, under the name by which they know it.
    """

    connected, address = True, "memory"

    def __init__(self, name: Peer, peers: dict[Peer, MemoryEndpoint]) -> None:
        self._name, self._peers = name, peers
        self._queue: deque[tuple[Peer, Sequence[bytes]]] = deque()
        self._changed = Condition()
        self._is_closed = self._is_woken = False

    def send(self, message: Message, peer: Peer | None = None) -> None:
        self.send_frames(encode(message), peer)

    def send_frames(self, frames: Sequence[bytes], peer: Peer | None = None) -> None:
        """Send raw frames. A test can so act as a broken peer."""
        other = self._peers.get(SOLE_PEER if peer is None else peer)
        if other is None or self._is_closed:
            raise TransportError("there is no such peer, or this end was closed")
        with other._changed:
            if other._is_closed:
                raise TransportError("the peer is gone: it closed its end")
            other._queue.append((self._name, frames))
            other._changed.notify_all()

    def receive(self, timeout: float) -> list[Received]:
        if timeout > 0:
            self.wait(timeout)
        with self._changed:
            if self._is_closed:
                raise TransportError("this end was closed")
            taken = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
        return [(peer, received(frames)) for peer, frames in taken]

    def wait(self, timeout: float) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or self._is_woken or self._queue, timeout
            )
            self._is_woken = False

    def wake(self) -> None:
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def close(self, flush: float = 0.0) -> None:
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            self._changed.notify_all()


class MemoryHub:
    """A listener, and any number of connections to it."""

    def __init__(self) -> None:
        self._connections: dict[Peer, MemoryEndpoint] = {}
        self._numbers = count(1)
        self.listener = MemoryEndpoint(SOLE_PEER, self._connections)

    def connect(self) -> MemoryEndpoint:
        name = b"peer-%d" % next(self._numbers)
        return self._connections.setdefault(name, MemoryEndpoint(name, {SOLE_PEER: self.listener}))


class MemoryRows:
    """An end of a tensor channel.

    It does not copy rows, so that a test notices a row that is overwritten or sent twice.
    """

    def __init__(
        self,
        arrivals: SimpleQueue[torch.Tensor],
        departures: SimpleQueue[torch.Tensor],
        timeout: float,
    ) -> None:
        self._arrivals = arrivals
        self._departures = departures
        self._timeout = timeout

    @classmethod
    def pair(cls, timeout: float) -> tuple[MemoryRows, MemoryRows]:
        """Return the target's end and the draft's end."""
        to_target: SimpleQueue[torch.Tensor] = SimpleQueue()
        to_draft: SimpleQueue[torch.Tensor] = SimpleQueue()
        return cls(to_target, to_draft, timeout), cls(to_draft, to_target, timeout)

    def send(self, row: torch.Tensor) -> None:
        self._departures.put(row)

    def receive(self, count: int) -> torch.Tensor:
        try:
            return torch.stack([self._arrivals.get(timeout=self._timeout) for _ in range(count)])
        except Empty:
            raise TransportError("an announced row did not come") from None

    def close(self) -> None:
        pass
