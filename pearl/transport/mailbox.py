"""An endpoint with a thread that sends, receives and decodes while a worker computes.

A forward releases the interpreter lock most of the time, so that the thread can run meanwhile.
Little work is then left between two forwards.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from pearl.errors import ProtocolError, TransportError
from pearl.protocol.messages import Message
from pearl.transport.base import MAX_BATCH, SOLE_PEER, Endpoint, Fault, Peer, Received

_WAIT_SECONDS = 60.0  # longest wait of the thread, which is woken if there is something to do
_FULL_SECONDS = 0.01  # between two checks of a full inbox


class Mailbox:
    """Sends and receives through `endpoint`, for the loop of one worker.

    It is a context manager, which ends the thread and leaves the endpoint open.

    Args:
        outgoing: applied to each message before it is sent.
        incoming: applied in the thread to each received message. `receive` returns the result of
            `incoming`, or the `ProtocolError` or `TransportError` that `incoming` raised. If the
            result is None, `receive` returns nothing for this message.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        outgoing: Callable[[Message], Message] = lambda message: message,
        incoming: Callable[[Peer, Message], Message | None] = lambda peer, message: message,
    ) -> None:
        self._endpoint = endpoint
        self._outgoing = outgoing
        self._incoming = incoming
        self._inbox: SimpleQueue[Received] = SimpleQueue()
        self._outbox: deque[tuple[Message, Peer | None]] = deque()
        self._sending = threading.Lock()  # keeps the messages in order
        self._is_closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mailbox", daemon=True)
        self._thread.start()

    def send(self, message: Message, peer: Peer | None = None) -> None:
        """Send at once. If that fails, `receive` returns the error, as if it came from the peer."""
        self._outbox.append((message, peer))
        self._flush()

    def post(self, message: Message, peer: Peer | None = None) -> None:
        """Let the thread send the message. The order of all messages is kept."""
        self._outbox.append((message, peer))
        self._endpoint.wake()

    def receive(self, timeout: float) -> list[Received]:
        """Return messages as `Endpoint.receive` does.

        If `timeout` is 0, return what the thread has read so far. If an error has ended the thread,
        raise it.
        """
        messages = []
        if timeout > 0:
            with suppress(Empty):
                messages.append(self._inbox.get(timeout=timeout))
        while len(messages) < MAX_BATCH and not self._inbox.empty():
            messages.append(self._inbox.get())
        if self._failure is not None:
            raise self._failure
        return messages

    @property
    def is_empty(self) -> bool:
        """Whether `receive(0)` would return nothing. It is cheap, and any thread may read it."""
        return self._inbox.empty()

    def close(self) -> None:
        """Send what is queued and end the thread."""
        self._is_closed = True
        self._endpoint.wake()
        self._thread.join()
        self._flush()

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._flush()
                if self._inbox.qsize() >= MAX_BATCH:  # the rest waits in the peer's socket
                    time.sleep(_FULL_SECONDS)
                    continue
                for peer, message in self._read():
                    checked = self._checked(peer, message)
                    if checked is not None:
                        self._inbox.put((peer, checked))
                self._endpoint.wait(_WAIT_SECONDS)
        except BaseException as error:
            self._failure = error

    def _flush(self) -> None:
        with self._sending:
            while self._outbox:
                message, peer = self._outbox.popleft()
                try:
                    self._endpoint.send(self._outgoing(message), peer)
                except (TransportError, ProtocolError) as error:
                    self._inbox.put((SOLE_PEER if peer is None else peer, error))

    def _read(self) -> list[Received]:
        return self._endpoint.receive(0)

    def _checked(self, peer: Peer, message: Message | Fault) -> Message | Fault | None:
        if isinstance(message, Exception):
            return message
        try:
            return self._incoming(peer, message)
        except (ProtocolError, TransportError) as error:
            return error
