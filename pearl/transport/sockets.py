"""The control channel over a socket file, between the processes of one host.

The target worker listens; the draft and each front connect. A message goes to the kernel in its sender's thread.
ZeroMQ, which serves other hosts, has a thread at each end for that, and a message and its answer take four times as
long (`scripts/bench_control.py`). Knows frames and peers, not what messages mean.

A message is the number of its frames and the bytes of each (uint32, little-endian), then the frames. The file is
protected by its directory (see `address`), so no keys are needed.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from pearl.errors import ConfigError, LocalProtocolError, TransportError
from pearl.protocol.messages import Message
from pearl.transport.address import check_bind, raise_limit
from pearl.transport.base import MAX_BATCH, SOLE_PEER, Peer, Received
from pearl.transport.codec import MAX_FRAME, MAX_FRAMES, encode, received
from pearl.transport.keys import Keys
from pearl.transport.polled import Polled

_QUEUE = 1 << 16  # messages queued for a peer that does not read: more than a text has, so a front may read slowly
_IN_TURN = 16  # messages of one peer before it is the next peer's turn
_CHUNK = 1 << 18  # bytes of one read
_BACKLOG = 128  # connections that wait to be accepted
_RETRY_SECONDS = 0.01  # between two attempts to connect, or to accept where there is no descriptor left
_ABSENT = (FileNotFoundError, ConnectionRefusedError, BlockingIOError)  # no listener yet, or its backlog is full


class _Pipe:
    """One connection: bytes read that are no whole message yet, and messages that the kernel has not taken yet."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.unsent: deque[bytes | memoryview] = deque()
        self._read = bytearray()

    def flush(self) -> None:
        """Send what the kernel takes. Raises `OSError` if the peer is gone."""
        with suppress(BlockingIOError):
            while self.unsent:
                first = self.unsent[0]
                sent = self.socket.send(first)
                if sent == len(first):
                    self.unsent.popleft()
                else:
                    self.unsent[0] = memoryview(first)[sent:]

    def read(self) -> None:
        """Read what has arrived, or part of it. Raises `OSError` if the peer is gone."""
        with suppress(BlockingIOError):
            if not (data := self.socket.recv(_CHUNK)):
                raise ConnectionResetError
            self._read += data

    def messages(self, most: int) -> list[list[bytes]]:
        """Up to `most` of those that have been read. Raises `OSError` if the peer breaks the format."""
        found: list[list[bytes]] = []
        while len(found) < most and (frames := self._message()) is not None:
            found.append(frames)
        return found

    def _message(self) -> list[bytes] | None:
        """The frames of the first message, if it is there."""
        with memoryview(self._read) as data:
            if len(data) < 4:
                return None
            (number,) = struct.unpack_from("<I", data)
            if not 1 <= number <= MAX_FRAMES:
                raise ConnectionAbortedError
            start = 4 + 4 * number
            if len(data) < start:
                return None
            sizes = struct.unpack_from(f"<{number}I", data, 4)
            if max(sizes) > MAX_FRAME:
                raise ConnectionAbortedError
            if len(data) < start + sum(sizes):
                return None
            frames = []
            for size in sizes:
                frames.append(bytes(data[start : start + size]))
                start += size
        del self._read[:start]
        return frames


class _End(Polled[tuple[Peer, list[bytes]]]):
    """Its connections by the names of their peers."""

    def __init__(self) -> None:
        super().__init__()
        self._pipes: dict[Peer, _Pipe] = {}
        self._has_more = False  # messages may have been read that the system does not signal again

    def _add(self, peer: Peer, connection: socket.socket) -> _Pipe:
        pipe = self._pipes[peer] = _Pipe(connection)
        self._poll.register(connection, select.POLLIN)
        return pipe

    def _lose(self, peer: Peer) -> None:
        pipe = self._pipes.pop(peer)
        self._poll.unregister(pipe.socket)
        pipe.socket.close()

    def _send(self, peer: Peer, frames: Sequence[bytes]) -> None:
        if (pipe := self._pipes.get(peer)) is None:
            raise TransportError("the peer is gone")
        if len(pipe.unsent) >= _QUEUE:
            raise TransportError("the peer's queue is full: it has stopped receiving")
        is_idle = not pipe.unsent
        pipe.unsent.append(b"".join((struct.pack(f"<{1 + len(frames)}I", len(frames), *map(len, frames)), *frames)))
        self._flush(peer, pipe)
        if pipe.unsent and is_idle:  # the thread that waits sends the rest
            self._poll.modify(pipe.socket, select.POLLIN | select.POLLOUT)
            self._rouse()

    def _flush(self, peer: Peer, pipe: _Pipe) -> None:
        try:
            pipe.flush()
        except OSError as error:
            self._lose(peer)
            raise TransportError(f"the peer is gone ({error.strerror})") from None

    def _take(self) -> list[tuple[Peer, list[bytes]]]:
        ready, self._ready = self._ready, None
        if ready is None:
            ready = [descriptor for descriptor, _ in self._poll.poll(0)]
        with self._lock:
            self._check_open()
            self._meet(ready)
            found = self._messages(MAX_BATCH) if self._has_more else []
            if len(found) < MAX_BATCH:
                for peer, pipe in [*self._pipes.items()]:
                    if pipe.socket.fileno() in ready:
                        self._exchange(peer, pipe)
                found += self._messages(MAX_BATCH - len(found))
            self._has_more = len(found) == MAX_BATCH
            if self._has_more:
                self._rouse()
        return found

    def _exchange(self, peer: Peer, pipe: _Pipe) -> None:
        """Read, and send what waits."""
        try:
            if pipe.unsent:
                pipe.flush()
                if not pipe.unsent:
                    self._poll.modify(pipe.socket, select.POLLIN)
            pipe.read()
        except OSError:
            self._lose(peer)

    def _messages(self, most: int) -> list[tuple[Peer, list[bytes]]]:
        """Up to `most` of those that have been read; the peers take turns."""
        found: list[tuple[Peer, list[bytes]]] = []
        before = -1
        while before < len(found) < most:
            before = len(found)
            for peer, pipe in [*self._pipes.items()]:
                try:
                    found += [(peer, frames) for frames in pipe.messages(min(_IN_TURN, most - len(found)))]
                except OSError:
                    self._lose(peer)
        return found

    def _meet(self, ready: Sequence[int] = ()) -> None:
        """Take new connections, or make one."""

    @property
    def _has_unsent(self) -> bool:
        return any(pipe.unsent for pipe in self._pipes.values())

    def close(self, flush: float = 0.0) -> None:
        if self._is_closed:
            return
        deadline = time.monotonic() + flush
        with self._lock:
            while self._has_unsent and time.monotonic() < deadline:
                time.sleep(_RETRY_SECONDS)
                self._meet()
                for peer, pipe in [*self._pipes.items()]:
                    with suppress(TransportError):
                        self._flush(peer, pipe)
            super().close()
            for peer in [*self._pipes]:
                self._lose(peer)


class SocketListener(_End):
    """The end that others connect to. A peer has a new name with every connection."""

    def __init__(self, address: str, keys: Keys | None = None) -> None:
        """Raises `ConfigError` as `check_bind` does. `keys` are not needed."""
        check_bind(address)
        super().__init__()
        raise_limit()
        self.address, self._file, self._numbers = address, Path(address.removeprefix("ipc://")), count(1)
        self._door = socket.socket(socket.AF_UNIX)
        try:
            self._door.bind(str(self._file))
        except OSError as error:
            super().close()
            self._door.close()
            raise ConfigError(f"cannot bind {address}: {error.strerror}") from None
        self._file.chmod(0o600)  # whatever the umask was
        self._door.setblocking(False)
        self._door.listen(_BACKLOG)
        self._poll.register(self._door, select.POLLIN)

    def _meet(self, ready: Sequence[int] = ()) -> None:
        try:
            while self._door.fileno() in ready:
                self._add(b"%d" % next(self._numbers), self._door.accept()[0])
        except BlockingIOError:
            pass
        except OSError:  # no descriptor is left
            time.sleep(_RETRY_SECONDS)

    def send(self, message: Message, peer: Peer | None = None) -> None:
        if peer is None:
            raise LocalProtocolError("a listener must name the peer to which it sends")
        frames = encode(message)
        with self._lock:
            self._check_open()
            self._send(peer, frames)

    def receive(self, timeout: float) -> list[Received]:
        return [(peer, received(frames, to_target=True)) for peer, frames in self._receive(timeout)]

    def close(self, flush: float = 0.0) -> None:
        if not self._is_closed:
            super().close(flush)
            self._door.close()
            self._file.unlink(missing_ok=True)


class SocketConnection(_End):
    """The end that connects. Until the listener exists, messages wait in the queue.

    It does not reconnect after a disconnection: another engine might answer.
    """

    def __init__(self, address: str, keys: Keys | None = None) -> None:
        super().__init__()
        self.address, self._path = address, address.removeprefix("ipc://")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        self._early: list[Sequence[bytes]] | None = []  # sent before there was a listener; None: there is one
        try:
            if not os.path.isabs(self._path):
                raise OSError("it names no socket file")
            self._meet()
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot connect to {address}: {error.strerror or error}") from None

    def _meet(self, ready: Sequence[int] = ()) -> None:
        if self._early is None:
            return
        with suppress(*_ABSENT):
            self._socket.connect(self._path)
            self._add(SOLE_PEER, self._socket)
            early, self._early = self._early, None
            for frames in early:
                self._send(SOLE_PEER, frames)

    @property
    def _has_unsent(self) -> bool:
        return bool(self._early) or super()._has_unsent

    def _wait(self, timeout: float) -> bool:
        return super()._wait(timeout if self._early is None else min(timeout, _RETRY_SECONDS))

    def send(self, message: Message, peer: Peer | None = None) -> None:
        frames = encode(message)
        with self._lock:
            self._check_open()
            self._meet()
            if self._early is None:
                self._send(SOLE_PEER, frames)
            elif len(self._early) < _QUEUE:
                self._early.append(frames)
            else:
                raise TransportError("there is no listener, and the queue for it is full")

    def receive(self, timeout: float) -> list[Received]:
        return [(peer, received(frames)) for peer, frames in self._receive(timeout)]

    @property
    def connected(self) -> bool:
        """False once it has been cut off; True while there is no listener yet."""
        return self._early is not None or SOLE_PEER in self._pipes

    def close(self, flush: float = 0.0) -> None:
        super().close(flush)
        self._socket.close()


listen, connect = SocketListener, SocketConnection
