"""The interfaces of the transports: ends of the control channel, and tensor channels.

This module knows no bytes, sockets or process groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pearl.errors import LocalProtocolError, ProtocolError, TransportError
from pearl.protocol.messages import Message

if TYPE_CHECKING:
    import torch  # importing it takes seconds, and the user's process needs no tensors

Peer = bytes
Fault = ProtocolError | TransportError
Received = tuple[Peer, Message | Fault]

SOLE_PEER: Peer = b""  # a connection has only this peer
# Most messages that one `receive` returns, so that a flood of messages does not starve its caller.
MAX_BATCH = 1000


class Endpoint(Protocol):
    """One end of the control channel. The messages of a peer arrive in order, each exactly once.

    Any thread may send and receive, but only one thread at a time may wait.
    """

    def send(self, message: Message, peer: Peer | None = None) -> None:
        """Queue `message`, without blocking.

        What the system does not take at once is sent later: by the next call that sends or
        receives, or by the thread that waits.

        Raises `TransportError` if the peer is gone or its queue is full, and `LocalProtocolError`
        if the message exceeds a limit of the wire. It takes a while until a peer's absence is
        noticed; messages sent before that are lost.

        Args:
            peer: the receiver. A connection has only one peer, so there it is None.
        """
        ...

    def receive(self, timeout: float) -> list[Received]:
        """Return up to `MAX_BATCH` messages, oldest first.

        Wait at most `timeout` seconds for the first message; if `timeout` is 0, do not wait. In
        place of malformed input, return the error that it caused. That a peer has vanished is
        noticed by `send` only.
        """
        ...

    def wait(self, timeout: float) -> None:
        """Wait for a message or a call of `wake`, at most `timeout` seconds. May return earlier."""
        ...

    def wake(self) -> None:
        """End another thread's `wait`; if no thread waits, end the next `wait`."""
        ...

    def close(self, flush: float = 0.0) -> None:
        """Close the endpoint; a second call does nothing.

        Wait up to `flush` seconds for queued messages to be sent. Those not sent by then are lost.
        """
        ...


class Listener(Endpoint, Protocol):
    """The end that others connect to.

    Attributes:
        address: where the listener listens, the port included.
    """

    address: str


class Connection(Endpoint, Protocol):
    """The end that connects."""

    @property
    def connected(self) -> bool:
        """Whether the connection can still be used; false once it was cut off."""
        ...


class TensorChannel(Protocol):
    """A pipe for rows (dense distributions) between two workers, beside the control channel."""

    def send(self, row: torch.Tensor) -> None:
        """Send `row`, float32 [vocab], without waiting for the receiver.

        The row must not change afterwards. Raises `TransportError` if the channel is dead.
        """
        ...

    def receive(self, count: int) -> torch.Tensor:
        """Return the next `count` rows in the order sent, float32 [count, vocab].

        Call it only for rows that a message has announced. If the rows do not come before the
        channel's deadline, the channel is dead from then on. Raises `TransportError` then, and
        whenever the channel is dead.
        """
        ...

    def close(self) -> None:
        """Close the channel; a second call does nothing. Rows not yet received are lost."""
        ...


def check_row(row: torch.Tensor, vocab_size: int) -> None:
    """Raise `LocalProtocolError` unless `row` is float32 [vocab_size].

    The sender checks this, because the receiver cannot.
    """
    if str(row.dtype) != "torch.float32" or row.shape != (vocab_size,):
        raise LocalProtocolError(
            f"a tensor channel carries float32 [{vocab_size}], not {row.dtype} {list(row.shape)}"
        )
