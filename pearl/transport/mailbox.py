"""An endpoint with a thread that works for it while a worker computes.

A forward releases the interpreter lock for most of its time; the thread runs then: it sends posted messages, and reads,
decodes and checks incoming ones.  So the loop has little to do between two forwards.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

from pearl.errors import ProtocolError, TransportError
from pearl.protocol.messages import Message
from pearl.transport.base import MAX_BATCH, SOLE_PEER, Endpoint, Fault, Peer, Received

_WAIT_SECONDS = 60.0  # of the thread, at most; it is woken for whatever there is to do
_FULL_SECONDS = 0.01  # between two looks at an inbox that is full
_MOST_BYTES = 64 << 20  # that wait in an inbox, but for what the last message has beside


def _nothing(message: Message) -> int:
    return 0


class Mailbox:
    """Sends and receives through `endpoint`, for one loop. A context manager; the endpoint stays open after it.

    Args:
        outgoing: applied to each message before it is sent.
        incoming: applied to each received message; a `ProtocolError` or `TransportError` that it raises takes the place
            of the message.
        weigh: bytes that a message takes once it has been through `incoming`. While so many wait that no more may, what
            comes stays as it came, and then with the peer.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        outgoing: Callable[[Message], Message] = lambda message: message,
        incoming: Callable[[Peer, Message], Message] = lambda peer, message: message,
        weigh: Callable[[Message], int] = _nothing,
    ) -> None:
        self._endpoint = endpoint
        self._outgoing, self._incoming, self._weigh = outgoing, incoming, weigh
        self._inbox: SimpleQueue[tuple[Received, int]] = SimpleQueue()
        self._unexamined: deque[Received] = deque()
        self._came = self._went = 0  # bytes, in all: each is counted by one side
        self._outbox: deque[tuple[Message, Peer | None]] = deque()
        self._sending, self._receiving = threading.Lock(), threading.Lock()  # they keep the messages in order
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mailbox", daemon=True)
        self._thread.start()

    def send(self, message: Message, peer: Peer | None = None) -> None:
        """Sends `message` at once. Where it cannot be sent, `receive` gives the error as that peer's."""
        self._outbox.append((message, peer))
        self._flush()

    def post(self, message: Message, peer: Peer | None = None) -> None:
        """As `send`, but leaves the work to the thread; order is kept."""
        self._outbox.append((message, peer))
        self._endpoint.wake()

    def receive(self, timeout: float) -> list[Received]:
        """As `Endpoint.receive`; 0: what the thread has read so far. Raises the error that ended the thread."""
        got: list[Received] = []
        if timeout > 0:
            self._collect()
            with contextlib.suppress(Empty):
                got.append(self._taken(timeout))
        while len(got) < MAX_BATCH and not self._inbox.empty():
            got.append(self._taken(0))
        if self._failure is not None:
            raise self._failure
        return got

    def _taken(self, timeout: float) -> Received:
        received, weight = self._inbox.get(timeout=timeout)
        self._went += weight
        return received

    @property
    def is_empty(self) -> bool:
        """Whether no message that was read waits for `receive`. Any thread may ask; costs nothing."""
        return self._inbox.empty()

    def close(self) -> None:
        """Sends what is queued and ends the thread."""
        self._closed = True
        self._endpoint.wake()
        self._thread.join()
        self._flush()

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._flush()
                self._collect()
                if not self._is_full:
                    self._endpoint.wait(_WAIT_SECONDS)
                else:  # a flood waits in the socket, whose queue has an end
                    time.sleep(_FULL_SECONDS)
        except BaseException as error:
            self._failure = error

    def _flush(self) -> None:
        with self._sending:
            while self._outbox:
                message, peer = self._outbox.popleft()
                try:
                    self._endpoint.send(self._outgoing(message), peer)
                except (TransportError, ProtocolError) as error:
                    self._inbox.put(((SOLE_PEER if peer is None else peer, error), 0))

    def _collect(self) -> None:
        with self._receiving:
            self._examine()
            if not self._unexamined and not self._is_full:
                self._unexamined.extend(self._endpoint.receive(0))
                self._examine()

    def _examine(self) -> None:
        while self._unexamined and not self._is_full:
            peer, message = self._unexamined.popleft()
            found = self._checked(peer, message)
            weight = 0 if isinstance(found, Exception) else self._weigh(found)
            self._came += weight
            self._inbox.put(((peer, found), weight))

    @property
    def _is_full(self) -> bool:
        return self._inbox.qsize() >= MAX_BATCH or self._came - self._went >= _MOST_BYTES

    def _checked(self, peer: Peer, message: Message | Fault) -> Message | Fault:
        try:
            return message if isinstance(message, Exception) else self._incoming(peer, message)
        except (ProtocolError, TransportError) as error:
            return error
