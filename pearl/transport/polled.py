"""What endpoints share whose thread waits in `poll`: its wait, and what ends it."""

from __future__ import annotations

import ctypes
import os
import select
import threading
import time
from math import ceil
from typing import Generic, TypeVar

from pearl.errors import TransportError

_Item = TypeVar("_Item")
_PIPE = 1 << 16  # bytes that a pipe holds
_write = ctypes.PyDLL(None).write


class Polled(Generic[_Item]):
    """An end of the control channel: it registers its descriptors with `_poll`, and `_take` reads what has arrived."""

    def __init__(self) -> None:
        self._is_closed = False
        self._wakeup, self._waker = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(self._waker, False)
        self._is_woken = False
        self._ready: list[int] | None = None  # descriptors that the last wait reported; None: they have been looked at
        self._lock = threading.Lock()  # sockets are for one thread at a time
        self._poll = select.poll()
        self._poll.register(self._wakeup, select.POLLIN)

    def _take(self) -> list[_Item]:
        """What has arrived."""
        raise NotImplementedError

    def _receive(self, timeout: float) -> list[_Item]:
        """What has arrived; waits for the first only."""
        found, deadline, is_woken = self._take(), time.monotonic() + timeout, False
        while not found and not is_woken and (left := deadline - time.monotonic()) > 0:
            is_woken = self._wait(left)
            found = self._take()
        return found

    def wait(self, timeout: float) -> None:
        self._wait(timeout)

    def _wait(self, timeout: float) -> bool:
        """Whether `wake` was called. A descriptor may also signal what is no message."""
        self._ready = [descriptor for descriptor, _ in self._poll.poll(ceil(timeout * 1000))]
        if self._wakeup in self._ready:
            os.read(self._wakeup, _PIPE)
        is_woken, self._is_woken = self._is_woken, False
        return is_woken

    def wake(self) -> None:
        self._is_woken = True
        self._rouse()

    def _rouse(self) -> None:
        # `os.write` would release the interpreter lock, and the woken thread would take it from the waker. A full pipe
        # needs no further byte.
        _write(self._waker, b"!", 1)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportError("this end of the control channel was closed")

    def close(self, flush: float = 0.0) -> None:
        self._is_closed = True
        os.close(self._wakeup)
        os.close(self._waker)
