"""The control channel over ZeroMQ, on this machine only: the one file that imports zmq.

The target worker binds a `ZmqListener` (ROUTER), draft and fronts make a `ZmqConnection` (DEALER) each.
Knows frames and peers, not what messages mean.

ZeroMQ authenticates nobody here, so the address is what protects an engine: a socket file in a private
directory, which only this user can reach, or a port of the loopback, which every user of this machine can:
prefer ipc.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import stat
import tempfile
import threading
import time
from collections.abc import Sequence
from math import ceil
from pathlib import Path

import zmq

from pearl.errors import ConfigError, LocalProtocolError, TransportError
from pearl.protocol.messages import Message
from pearl.transport.base import MAX_BATCH, SOLE_PEER, Peer, Received
from pearl.transport.codec import MAX_FRAME, encode, received

_QUEUE = 1 << 16  # messages that may wait on either side: more than a text has, so that a front may be slow
_MAX_IPC_PATH = 107  # bytes: sun_path of a Unix socket less its final zero
_write = ctypes.PyDLL(None).write
# As enums they cost twice the time.
_EVENTS, _POLLIN, _NOBLOCK, _SNDMORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK), int(zmq.SNDMORE)
_LOOPBACK = re.compile(r"tcp://(127\.0\.0\.1|\[::1\]):(\*|\d{1,5})")


def private_directory() -> Path:
    """A fresh directory `pearl-XXXXXXXX` of mode 0700; whoever asked for it removes it."""
    return Path(tempfile.mkdtemp(prefix="pearl-", dir=_runtime_directory()))


def bind_address(control: str, directory: Path) -> str:
    """The address for a listener: `control` "ipc" (a socket file in `directory`) or "tcp" (a free port)."""
    if control == "ipc":
        return f"ipc://{directory / 'control'}"
    if control == "tcp":
        return "tcp://127.0.0.1:*"
    raise ConfigError(f"control channel {control!r} is unknown: choose ipc or tcp")


def private_directories() -> list[Path]:
    """Those of this user that `private_directory` has made, newest first."""
    found = [path for path in _runtime_directory().glob("pearl-*") if is_private(path)]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def is_local(address: str) -> bool:
    """Whether `address` leads to this machine only: a socket file in a private directory, or the loopback."""
    if address.startswith("ipc://"):
        return is_private(Path(address.removeprefix("ipc://")).parent)
    return _LOOPBACK.fullmatch(address) is not None


def check_bind(address: str) -> None:
    """Raises `ConfigError` where more than this machine could reach `address`, or it cannot be bound."""
    if address.startswith("ipc://"):
        _check_socket_file(Path(address.removeprefix("ipc://")))
    elif not _LOOPBACK.fullmatch(address):
        raise ConfigError(
            f"refusing to bind {address}: who can reach it could use the engine. Until connections can be "
            "secured only ipc:// in a private directory and tcp://127.0.0.1 or tcp://[::1] are allowed"
        )


def _check_socket_file(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > _MAX_IPC_PATH:
        raise ConfigError(
            f"the socket path {path} has {length} bytes, a Unix socket at most {_MAX_IPC_PATH}: "
            "set TMPDIR or XDG_RUNTIME_DIR to a shorter directory, or use tcp"
        )
    if not path.is_absolute() or not is_private(path.parent):
        raise ConfigError(
            f"refusing to bind {path}: its directory must be absolute, owned by this user and of mode 0700; "
            "others are refused until connections can be secured"
        )
    if os.path.lexists(path):  # ZeroMQ would silently take the address from whoever listens there
        raise ConfigError(f"{path} exists: an engine listens there, or one was killed; then remove the file")


def is_private(directory: Path) -> bool:
    """Whether only this user can reach what is in `directory`."""
    try:
        status = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _runtime_directory() -> Path:
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    return runtime if runtime.is_absolute() and is_private(runtime) else Path(tempfile.gettempdir())


def _readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


class _Socket:
    """What both ends share: a socket with a context of its own, so that closing one waits for no other."""

    def __init__(self, kind: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._closed = False
        self._socket.setsockopt(zmq.LINGER, 0)  # should it be dropped unclosed, nothing may wait for it
        self._socket.setsockopt(zmq.SNDHWM, _QUEUE)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUE)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)  # a frame; who sends a longer one is disconnected
        self._wakeup, self._waker = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(self._waker, False)
        self._woken = False
        self._more = False  # something is known to be there to be read
        self._lock = threading.Lock()  # the socket itself is for one thread at a time
        self._glance, self._poll = select.poll(), select.poll()  # one who waits in a poll keeps it from others
        for poll in (self._glance, self._poll):
            poll.register(self._wakeup, select.POLLIN)
            poll.register(int(self._socket.getsockopt(zmq.FD)), select.POLLIN)

    def _send(self, frames: Sequence[bytes]) -> None:
        with self._lock:
            self._check_open()
            try:
                for frame in frames[:-1]:
                    self._socket.send(frame, _NOBLOCK | _SNDMORE)
                self._socket.send(frames[-1], _NOBLOCK)
            except zmq.Again:
                raise TransportError("the peer's queue is full: it has stopped receiving") from None
            except zmq.ZMQError as error:
                raise TransportError(f"the peer is gone ({error.strerror})") from None
            finally:
                self._pass_on()

    def _receive(self, timeout: float) -> list[list[bytes]]:
        """Frames of what has arrived; waits for the first only."""
        messages, deadline, woken = self._take(), time.monotonic() + timeout, False
        while not messages and not woken and (left := deadline - time.monotonic()) > 0:
            woken = self._wait(left)
            messages = self._take()
        return messages

    def _take(self) -> list[list[bytes]]:
        messages: list[list[bytes]] = []
        with self._lock:
            self._check_open()
            if not self._more and not self._glance.poll(0):  # a fifth of the time, and between two forwards the rule
                return messages
            while len(messages) < MAX_BATCH and _readable(self._socket):
                messages.append(self._socket.recv_multipart(_NOBLOCK))
            self._pass_on()
        return messages

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("this end of the control channel was closed")

    def _pass_on(self) -> None:
        """Remembers, and tells who waits, that more can be read: the file descriptor says so once, and has told us."""
        self._more = _readable(self._socket)
        if self._more:
            self._rouse()

    def wait(self, timeout: float) -> None:
        self._wait(timeout)

    def _wait(self, timeout: float) -> bool:
        """Whether `wake` was called. The file descriptor may also tell of what is no message."""
        if any(ready == self._wakeup for ready, _ in self._poll.poll(ceil(timeout * 1000))):
            os.read(self._wakeup, _QUEUE)
        woken, self._woken = self._woken, False
        return woken

    def wake(self) -> None:
        self._woken = True
        self._rouse()

    def _rouse(self) -> None:
        # `os.write` would let go of the interpreter, and the thread that it wakes take it at once: so the waker goes on
        # first with what it is doing. To a pipe that is full this writes nothing, and there is no need to.
        _write(self._waker, b"!", 1)

    def close(self, flush: float = 0.0) -> None:
        """Ends the connection. What is queued has `flush` seconds to leave; 0: it is dropped."""
        if not self._closed:
            self._closed = True
            self._socket.close(linger=int(flush * 1000))
            self._context.term()  # bounded: waits for that linger only
            os.close(self._wakeup)
            os.close(self._waker)


class ZmqListener(_Socket):
    """The end that others connect to. A peer is named by its ZeroMQ identity, new with every connection."""

    def __init__(self, address: str) -> None:
        """Binds `address`; `.address` is the real one, port included. Raises `ConfigError`: `check_bind`."""
        check_bind(address)
        super().__init__(zmq.ROUTER)
        self._file: Path | None = None
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else what is sent to a vanished peer is dropped
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot bind {address}: {error.strerror}") from None
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._file = Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None
        if self._file is not None:
            self._file.chmod(0o600)  # whatever the umask was

    def send(self, message: Message, peer: Peer | None = None) -> None:
        if peer is None:
            raise LocalProtocolError("a listener must name the peer to which it sends")
        self._send([peer, *encode(message)])

    def receive(self, timeout: float) -> list[Received]:
        return [(frames[0], received(frames[1:])) for frames in self._receive(timeout)]

    def close(self, flush: float = 0.0) -> None:
        if self._file is not None and not self._closed:
            self._file.unlink(missing_ok=True)  # ZeroMQ leaves it behind
        super().close(flush)


class ZmqConnection(_Socket):
    """The end that connects. The listener need not be there yet: until it is, messages wait in the queue.

    Once connected and cut off it stays so: what would answer a reconnection is not the engine we knew.
    """

    def __init__(self, address: str) -> None:
        super().__init__(zmq.DEALER)
        self._lost = False
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        # A DEALER queues for a peer that is gone as for one that is slow. Its monitor tells the two apart.
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self.address = address
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot connect to {address}: {error.strerror}") from None

    def send(self, message: Message, peer: Peer | None = None) -> None:
        if not self.connected:
            raise TransportError(f"the peer at {self.address} is gone")
        self._send(encode(message))

    def receive(self, timeout: float) -> list[Received]:
        return [(SOLE_PEER, received(frames)) for frames in self._receive(timeout)]

    @property
    def connected(self) -> bool:
        """False once it has been cut off; an address where nobody listens yet may still become a connection."""
        with self._lock:
            self._lost = self._lost or (not self._closed and _readable(self._monitor))
        return not self._lost

    def close(self, flush: float = 0.0) -> None:
        if not self._closed:
            self._socket.disable_monitor()
            self._monitor.close()
            super().close(flush)
