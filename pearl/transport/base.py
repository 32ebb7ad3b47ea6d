"""The interfaces of the transports: ends of the control channel, and tensor channels.

Knows no bytes, sockets or process groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pearl.errors import LocalProtocolError, ProtocolError, TransportError
from pearl.protocol.messages import Message

if TYPE_CHECKING:
    import torch  # importing it takes seconds, and the front uses no tensors

Peer = bytes
Fault = ProtocolError | TransportError
Received = tuple[Peer, Message | Fault]

SOLE_PEER: Peer = b""  # a connection has only this peer
MAX_BATCH = 1000  # messages that one `receive` returns: a flood must not starve its caller


class Endpoint(Protocol):
    """One end of the control channel. The messages of a peer arrive in order, each once.

    Any thread may send and receive, but only one thread at a time may wait.
    """

    def send(self, message: Message, peer: Peer | None = None) -> None:
        """Queue `message`; never blocks. A listener needs `peer`; for a connection, `peer` is None.

        What the system does not take at once is sent later: by the next call that sends or receives, or by the thread
        that waits.

        Raises `TransportError` if the peer is gone or its queue is full, `LocalProtocolError` if the message exceeds a
        limit of the wire. It takes a while until a peer's absence is noticed; messages sent before that are lost.
        """
        ...

    def receive(self, timeout: float) -> list[Received]:
        """Return up to `MAX_BATCH` messages, oldest first. Wait at most `timeout` seconds for the first; 0: do not
        wait.

        In place of malformed input, the error that it caused is returned. That a peer has vanished is noticed only by
        `send`.
        """
        ...

    def wait(self, timeout: float) -> None:
        """Return when something has arrived, on `wake`, or after `timeout` seconds; may return earlier."""
        ...

    def wake(self) -> None:
        """End another thread's `wait`; if no thread waits, end the next `wait`."""
        ...

    def close(self, flush: float = 0.0) -> None:
        """Close the endpoint; a second call does nothing. Queued messages have `flush` seconds to leave."""
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
        """False once the connection has been cut off."""
        ...


class TensorChannel(Protocol):
    """A pipe of rows between the two model workers, besides the control channel."""

    def send(self, row: torch.Tensor) -> None:
        """Send `row`, float32 [vocab], which must not change afterwards; does not wait for the receiver.

        Raises `TransportError` if the channel is dead.
        """
        ...

    def receive(self, count: int) -> torch.Tensor:
        """Return the next `count` rows in the order sent, float32 [count, vocab]. Call it only for rows that were
        announced.

        Raises `TransportError` if the rows miss the channel's deadline, which kills the channel, or if it is already
        dead.
        """
        ...

    def close(self) -> None:
        """Close the channel; a second call does nothing. Rows not yet received are lost."""
        ...


def check_row(row: torch.Tensor, vocab_size: int) -> None:
    """Raise `LocalProtocolError` unless `row` is float32 [vocab_size]: the receiver could not check it."""
    if str(row.dtype) != "torch.float32" or row.shape != (vocab_size,):
        raise LocalProtocolError(
            f"a tensor channel carries float32 [{vocab_size}], not {row.dtype} {list(row.shape)}"
        )
