"""The control channel over a socket file, between the processes of one host.

The target worker listens; the draft and each front connect. A message goes to the kernel in its sender's thread;
ZeroMQ, which serves other hosts, has a thread at each end for that, which costs time (`scripts/bench_control.py`).
Knows frames and peers, not what messages mean.

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

from pearl.errors import ConfigError, TransportError
from pearl.transport.address import check_bind, raise_limit
from pearl.transport.base import MAX_BATCH, SOLE_PEER, Peer
from pearl.transport.codec import MAX_FRAME, MAX_FRAMES
from pearl.transport.endpoint import BaseEndpoint, Frames
from pearl.transport.keys import Keys

_QUEUE = 1 << 16  # messages queued for a peer that does not read: more than a text has, so a front may read slowly
_CHUNK = 1 << 18  # bytes of one read
_BUFFER = 4 << 20  # bytes of the send buffer (the kernel may cap it), so that a large row is sent in one call
_RETRY_SECONDS = 0.01  # between two attempts to connect, or to accept where there is no descriptor left
_ABSENT = (FileNotFoundError, ConnectionRefusedError, BlockingIOError)  # no listener yet, or its backlog is full


class _Pipe:
    """One connection: bytes read that are no whole message yet, and messages that the kernel has not taken yet."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self.socket = connection
        self.unsent: deque[bytes | memoryview] = deque()
        self.is_broken = False  # nothing can be sent any more; what the peer has sent may still be read
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

    def message(self) -> Frames | None:
        """The frames of the first message that was read, if it is whole. Raises `OSError` for a wrong header."""
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


class _End(BaseEndpoint):
    """Its connections by the names of their peers."""

    def __init__(self) -> None:
        super().__init__()
        self._pipes: dict[Peer, _Pipe] = {}

    def _add(self, peer: Peer, connection: socket.socket) -> None:
        self._pipes[peer] = _Pipe(connection)
        self._poll.register(connection, select.POLLIN)

    def _lose(self, peer: Peer) -> None:
        pipe = self._pipes.pop(peer)
        self._poll.unregister(pipe.socket)
        pipe.socket.close()

    def _meet(self) -> None:
        """Take new connections, or make one."""

    def _exchange(self, peer: Peer, reads: bool = True) -> None:
        """Send what waits, and read; a peer that is gone is lost once all that it has sent was read."""
        pipe = self._pipes[peer]
        if pipe.unsent:
            try:
                pipe.flush()
            except OSError:
                pipe.is_broken = True
                pipe.unsent.clear()
            self._poll.modify(pipe.socket, select.POLLIN | (select.POLLOUT if pipe.unsent else 0))
        if reads:
            try:
                pipe.read()
            except OSError:
                self._lose(peer)

    def _send(self, peer: Peer, frames: Sequence[bytes]) -> None:
        pipe = self._pipes.get(peer)
        if pipe is None or pipe.is_broken:
            raise TransportError("the peer is gone")
        if len(pipe.unsent) >= _QUEUE:
            raise TransportError("the peer's queue is full: it has stopped receiving")
        self._queue(peer, frames)
        if pipe.is_broken:
            raise TransportError("the peer is gone")
        if pipe.unsent:
            self._rouse()  # the thread that waits sends the rest

    def _queue(self, peer: Peer, frames: Sequence[bytes]) -> None:
        header = struct.pack(f"<{1 + len(frames)}I", len(frames), *map(len, frames))
        self._pipes[peer].unsent.append(b"".join((header, *frames)))
        self._exchange(peer, reads=False)

    def _take(self) -> list[tuple[Peer, Frames]]:
        self._meet()
        found = self._messages(MAX_BATCH)  # left from the last time
        if not found:
            for peer, pipe in [*self._pipes.items()]:
                if self._may_read(pipe.socket):
                    self._exchange(peer)
            found = self._messages(MAX_BATCH)
        self._ready = None
        if len(found) == MAX_BATCH:
            self._rouse()  # the kernel does not signal again what has been read
        return found

    def _may_read(self, connection: socket.socket) -> bool:
        return self._ready is None or connection.fileno() in self._ready

    def _messages(self, most: int) -> list[tuple[Peer, Frames]]:
        """Up to `most` that have been read; a peer that fills them comes last the next time."""
        found: list[tuple[Peer, Frames]] = []
        for peer, pipe in [*self._pipes.items()]:
            try:
                while len(found) < most and (frames := pipe.message()) is not None:
                    found.append((peer, frames))
            except OSError:
                self._lose(peer)
                continue
            if len(found) == most:
                self._pipes[peer] = self._pipes.pop(peer)
                break
        return found

    @property
    def _has_unsent(self) -> bool:
        return any(pipe.unsent for pipe in self._pipes.values())

    def close(self, flush: float = 0.0) -> None:
        deadline = time.monotonic() + flush
        with self._lock:
            if self._is_closed:
                return
            while self._has_unsent and time.monotonic() < deadline:
                time.sleep(_RETRY_SECONDS)
                self._meet()
                for peer in [*self._pipes]:
                    self._exchange(peer, reads=False)
            super().close()
            for peer in [*self._pipes]:
                self._lose(peer)


class SocketListener(_End):
    """The end that others connect to. A peer has a new name with every connection."""

    is_listener = True

    def __init__(self, address: str, keys: Keys | None = None) -> None:
        """Raises `ConfigError` as `check_bind` does. `keys` are not needed."""
        check_bind(address)
        super().__init__()
        raise_limit()
        self.address, self._file, self._numbers = address, Path(address.removeprefix("ipc://")), count(1)
        self._door = socket.socket(socket.AF_UNIX)
        self._door.setblocking(False)
        self._is_shut = False  # for lack of descriptors
        try:
            self._door.bind(str(self._file))
        except OSError as error:
            super().close()
            self._door.close()
            raise ConfigError(f"cannot bind {address}: {error.strerror}") from None
        self._file.chmod(0o600)  # whatever the umask was
        self._door.listen()
        self._poll.register(self._door, select.POLLIN)

    def _meet(self) -> None:
        try:
            while self._may_read(self._door):
                self._add(b"%d" % next(self._numbers), self._door.accept()[0])
        except BlockingIOError:
            pass
        except OSError:  # no descriptor is left: others come in once a peer is gone, not in a busy loop
            if not self._is_shut:
                self._poll.unregister(self._door)
            self._is_shut = True

    def _lose(self, peer: Peer) -> None:
        super()._lose(peer)
        if self._is_shut and not self._is_closed:
            self._poll.register(self._door, select.POLLIN)
            self._is_shut = False

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
        self._failure = "" if os.path.isabs(self._path) else "it names no socket file"
        if not self._failure:
            self._meet()
        if self._failure:
            self.close()
            raise ConfigError(f"cannot connect to {address}: {self._failure}")

    def _meet(self) -> None:
        if self._early is None:
            return
        try:
            self._socket.connect(self._path)
        except _ABSENT:
            return
        except OSError as error:
            self._early, self._failure = None, error.strerror or str(error)
            return
        self._add(SOLE_PEER, self._socket)
        early, self._early = self._early, None
        for frames in early:
            self._queue(SOLE_PEER, frames)

    def _send(self, peer: Peer, frames: Sequence[bytes]) -> None:
        self._meet()
        if self._early is None:
            super()._send(peer, frames)
        elif len(self._early) < _QUEUE:
            self._early.append(frames)
        else:
            raise TransportError("there is no listener, and the queue for it is full")

    def _wait(self, timeout: float) -> bool:
        return super()._wait(timeout if self._early is None else min(timeout, _RETRY_SECONDS))

    @property
    def _has_unsent(self) -> bool:
        return bool(self._early) or super()._has_unsent

    @property
    def connected(self) -> bool:
        """False once it has been cut off; True while there is no listener yet."""
        return self._early is not None or (SOLE_PEER in self._pipes and not self._pipes[SOLE_PEER].is_broken)

    def close(self, flush: float = 0.0) -> None:
        super().close(flush)
        self._socket.close()


listen, connect = SocketListener, SocketConnection
