"""Endpoints and tensor channels within one process, for tests and simulations.

Messages pass through the codec, so only what the wire allows arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count
from threading import Condition
from typing import Generic, TypeVar

import torch

from pearl.errors import TransportError
from pearl.protocol.messages import Message
from pearl.transport.base import MAX_BATCH, SOLE_PEER, Peer, Received, check_row
from pearl.transport.codec import encode, received

_QUEUE = 4096  # items that a pipe holds
_Item = TypeVar("_Item")


class _Pipe(Generic[_Item]):
    """A bounded queue, closed by its reader."""

    def __init__(self) -> None:
        self._items: deque[_Item] = deque()
        self._changed = Condition()
        self._is_closed = self._is_woken = False

    def put(self, item: _Item) -> None:
        """Never blocks. Raises `TransportError` if the reader has closed the pipe or it is full."""
        with self._changed:
            if self._is_closed:
                raise TransportError("the peer is gone: it closed its end")
            if len(self._items) >= _QUEUE:
                raise TransportError(f"the peer's queue is full ({_QUEUE}): it has stopped receiving")
            self._items.append(item)
            self._changed.notify_all()

    def take(self, least: int, most: int, timeout: float) -> list[_Item]:
        """Up to `most` items, once there are `least` or after `timeout` seconds."""
        self.wait(timeout, least)
        with self._changed:
            if self._is_closed:
                raise TransportError("this end was closed")
            return [self._items.popleft() for _ in range(min(most, len(self._items)))]

    def wait(self, timeout: float, least: int = 1) -> None:
        with self._changed:
            if timeout > 0:
                self._changed.wait_for(lambda: self._is_closed or self._is_woken or len(self._items) >= least, timeout)
                self._is_woken = False

    def wake(self) -> None:
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._items.clear()
            self._changed.notify_all()


_Inbox = _Pipe[tuple[Peer, Sequence[bytes]]]


class MemoryEndpoint:
    """Either end: it reads `inbox` and writes into its peers' inboxes, under the name that they have for it."""

    connected, seconds_to_wait, address = True, 0.0, "memory"

    def __init__(self, name: Peer, peers: dict[Peer, _Inbox]) -> None:
        self.inbox: _Inbox = _Pipe()
        self._name, self._peers = name, peers
        self._is_closed = False
        self.wait, self.wake = self.inbox.wait, self.inbox.wake

    def send(self, message: Message, peer: Peer | None = None) -> None:
        self.send_frames(encode(message), peer)

    def send_frames(self, frames: Sequence[bytes], peer: Peer | None = None) -> None:
        """Send raw frames, as a broken peer might."""
        inbox = self._peers.get(SOLE_PEER if peer is None else peer)
        if inbox is None or self._is_closed:
            raise TransportError("there is no such peer, or this end was closed")
        inbox.put((self._name, frames))

    def receive(self, timeout: float) -> list[Received]:
        return [(peer, received(frames)) for peer, frames in self.inbox.take(1, MAX_BATCH, timeout)]

    def trust(self, peer: Peer) -> None:
        """Does nothing: peers here have no limit but a full queue."""

    def close(self, flush: float = 0.0) -> None:
        self._is_closed = True
        self.inbox.close()


class MemoryHub:
    """A listener, and any number of connections to it."""

    def __init__(self) -> None:
        self._inboxes: dict[Peer, _Inbox] = {}
        self._numbers = count(1)
        self.listener = MemoryEndpoint(SOLE_PEER, self._inboxes)

    def connect(self) -> MemoryEndpoint:
        name = b"peer-%d" % next(self._numbers)
        connection = MemoryEndpoint(name, {SOLE_PEER: self.listener.inbox})
        self._inboxes[name] = connection.inbox
        return connection


memory_hub = MemoryHub


class MemoryChannel:
    """One end of a tensor channel; see `memory_channels`."""

    def __init__(
        self, inbox: _Pipe[torch.Tensor], outbox: _Pipe[torch.Tensor], vocab_size: int, timeout: float
    ) -> None:
        self._inbox, self._outbox = inbox, outbox
        self._vocab_size, self._timeout = vocab_size, timeout
        self._is_dead = False

    def send(self, row: torch.Tensor) -> None:
        check_row(row, self._vocab_size)
        self._check_alive()
        self._outbox.put(row.detach().clone())

    def receive(self, count: int) -> torch.Tensor:
        self._check_alive()
        rows = self._inbox.take(count, count, self._timeout)
        if len(rows) < count:
            self.close()
            raise TransportError(f"{len(rows)} of {count} rows came within {self._timeout} s")
        return torch.stack(rows) if rows else torch.empty(0, self._vocab_size)

    def _check_alive(self) -> None:
        if self._is_dead:
            raise TransportError("the tensor channel is dead")

    def close(self) -> None:
        self._is_dead = True
        self._inbox.close()


def memory_channels(vocab_size: int, timeout: float) -> tuple[MemoryChannel, MemoryChannel]:
    """Both ends of a channel for rows of `vocab_size`; a receive waits at most `timeout` seconds."""
    one: _Pipe[torch.Tensor] = _Pipe()
    other: _Pipe[torch.Tensor] = _Pipe()
    return MemoryChannel(one, other, vocab_size, timeout), MemoryChannel(other, one, vocab_size, timeout)
