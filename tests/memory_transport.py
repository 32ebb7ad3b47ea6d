"""Endpoints and tensor channels within one process, for tests and simulations.

Messages pass through the codec, so only what the wire allows arrives.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from threading import Condition

import torch

from pearl.errors import TransportError
from pearl.protocol.messages import Message
from pearl.transport.base import MAX_BATCH, SOLE_PEER, Peer, Received, check_row
from pearl.transport.codec import encode, received

_QUEUE = 4096  # messages that an endpoint holds


class MemoryEndpoint:
    """Either end: it puts frames into its peers' queues, under the name that they have for it."""

    connected, seconds_to_wait, address = True, 0.0, "memory"

    def __init__(self, name: Peer, peers: dict[Peer, MemoryEndpoint]) -> None:
        self._name, self._peers = name, peers
        self._queue: deque[tuple[Peer, Sequence[bytes]]] = deque()
        self._changed = Condition()
        self._is_closed = self._is_woken = False

    def send(self, message: Message, peer: Peer | None = None) -> None:
        self.send_frames(encode(message), peer)

    def send_frames(self, frames: Sequence[bytes], peer: Peer | None = None) -> None:
        """Send raw frames, as a broken peer might."""
        other = self._peers.get(SOLE_PEER if peer is None else peer)
        if other is None or self._is_closed:
            raise TransportError("there is no such peer, or this end was closed")
        with other._changed:
            if other._is_closed:
                raise TransportError("the peer is gone: it closed its end")
            if len(other._queue) >= _QUEUE:
                raise TransportError(f"the peer's queue is full ({_QUEUE}): it has stopped receiving")
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
            self._changed.wait_for(lambda: self._is_closed or self._is_woken or self._queue, timeout)
            self._is_woken = False

    def wake(self) -> None:
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def trust(self, peer: Peer) -> None:
        """Does nothing: peers here have no limit but a full queue."""

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


memory_hub = MemoryHub


class MemoryChannel:
    """One end of a tensor channel; see `memory_channels`."""

    peer: MemoryChannel

    def __init__(self, vocab_size: int, timeout: float) -> None:
        self._vocab_size, self._timeout = vocab_size, timeout
        self._rows: SimpleQueue[torch.Tensor] = SimpleQueue()
        self._is_dead = False

    def send(self, row: torch.Tensor) -> None:
        check_row(row, self._vocab_size)
        self._check_alive()
        if self.peer._is_dead:
            raise TransportError("the peer is gone: it closed its end")
        self.peer._rows.put(row.detach().clone())

    def receive(self, count: int) -> torch.Tensor:
        self._check_alive()
        rows: list[torch.Tensor] = []
        deadline = time.monotonic() + self._timeout
        with suppress(Empty):
            while len(rows) < count:
                rows.append(self._rows.get(timeout=max(0.0, deadline - time.monotonic())))
        if len(rows) < count:
            self.close()
            raise TransportError(f"{len(rows)} of {count} rows came within {self._timeout} s")
        return torch.stack(rows) if rows else torch.empty(0, self._vocab_size)

    def _check_alive(self) -> None:
        if self._is_dead:
            raise TransportError("the tensor channel is dead")

    def close(self) -> None:
        self._is_dead = True


def memory_channels(vocab_size: int, timeout: float) -> tuple[MemoryChannel, MemoryChannel]:
    """Both ends of a channel for rows of `vocab_size`; a receive waits at most `timeout` seconds."""
    one, other = MemoryChannel(vocab_size, timeout), MemoryChannel(vocab_size, timeout)
    one.peer, other.peer = other, one
    return one, other
