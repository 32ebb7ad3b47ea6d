"""What the ends of the control channel share: they send and receive messages, and one of their threads may wait."""

from __future__ import annotations

import ctypes
import os
import select
import threading
import time
from collections.abc import Sequence
from math import ceil

from pearl.errors import LocalProtocolError, TransportError
from pearl.protocol.messages import Message
from pearl.transport.base import SOLE_PEER, Peer, Received
from pearl.transport.codec import encode, received

Frames = list[bytes]
_write = ctypes.PyDLL(None).write


class BaseEndpoint:
    """An end of the control channel; a transport has `_send`, `_take`, and descriptors that `_poll` watches."""

    is_listener = False

    def __init__(self) -> None:
        self._is_closed = False
        self._wakeup, self._waker = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(self._waker, False)
        self._is_woken = False
        self._ready: set[int] | None = None  # descriptors that the last wait reported; None: they have been looked at
        self._lock = threading.Lock()  # sockets are for one thread at a time
        self._poll = select.poll()
        self._poll.register(self._wakeup, select.POLLIN)

    def _send(self, peer: Peer, frames: Sequence[bytes]) -> None:
        """Raises `TransportError`. Called with the lock."""
        raise NotImplementedError

    def _take(self) -> list[tuple[Peer, Frames]]:
        """What has arrived. Called with the lock."""
        raise NotImplementedError

    def send(self, message: Message, peer: Peer | None = None) -> None:
        if peer is None and self.is_listener:
            raise LocalProtocolError("a listener must name the peer to which it sends")
        frames = encode(message)
        with self._lock:
            self._check_open()
            self._send(SOLE_PEER if peer is None else peer, frames)

    def receive(self, timeout: float) -> list[Received]:
        found, deadline, is_woken = self._taken(), time.monotonic() + timeout, False
        while not found and not is_woken and (left := deadline - time.monotonic()) > 0:
            is_woken = self._wait(left)
            found = self._taken()
        return [(peer, received(frames, to_target=self.is_listener)) for peer, frames in found]

    def _taken(self) -> list[tuple[Peer, Frames]]:
        with self._lock:
            self._check_open()
            return self._take()

    def wait(self, timeout: float) -> None:
        self._wait(timeout)

    def _wait(self, timeout: float) -> bool:
        """Whether `wake` was called. A descriptor may also signal what is no message."""
        self._ready = {descriptor for descriptor, _ in self._poll.poll(ceil(timeout * 1000))}
        if self._wakeup in self._ready:
            os.read(self._wakeup, 1 << 16)  # all that a pipe holds
        is_woken, self._is_woken = self._is_woken, False
        return is_woken

    def wake(self) -> None:
        self._is_woken = True
        self._rouse()

    def _rouse(self) -> None:
        # `os.write` would release the interpreter lock, and the woken thread would take it from the waker. A full pipe
        # needs no further byte.
        if not self._is_closed:
            _write(self._waker, b"!", 1)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportError("this end of the control channel was closed")

    def close(self, flush: float = 0.0) -> None:
        self._is_closed = True
        os.close(self._wakeup)
        os.close(self._waker)
