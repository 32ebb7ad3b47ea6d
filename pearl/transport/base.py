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

SOLE_PEER: Peer = b""  # the peer of a connection, which has only one
MAX_BATCH = 1000  # messages that one `receive` returns: a flood must not starve its caller


class Endpoint(Protocol):
    """One end of the control channel. Messages of one peer arrive in order, each once.

    Any thread may send and receive, but only one at a time may wait.
    """

    def send(self, message: Message, peer: Peer | None = None) -> None:
        """Queue `message`; never blocks. A listener needs `peer`, a connection takes None.

        What the system does not take at once is sent by the next call that sends or receives, or the thread that waits.

        Raises `TransportError` if the peer is gone or its queue is full, `LocalProtocolError` if the message exceeds a
        limit of the wire. A peer's absence is noticed after a while; what is sent before that is lost.
        """
        ...

    def receive(self, timeout: float) -> list[Received]:
        """Up to `MAX_BATCH` messages, oldest first; waits at most `timeout` seconds for the first, 0: not at all.

        Malformed input is returned as the error that it caused. A vanished peer is noticed by `send` only.
        """
        ...

    def wait(self, timeout: float) -> None:
        """Return when something has arrived, on `wake`, or after `timeout` seconds; sometimes earlier."""
        ...

    def wake(self) -> None:
        """End another thread's wait, or else the next wait."""
        ...

    def close(self, flush: float = 0.0) -> None:
        """Close the endpoint; a second time does nothing. Queued messages have `flush` seconds to leave."""
        ...


class Listener(Endpoint, Protocol):
    """The end that others connect to.

    Attributes:
        address: where it listens, the port included.
    """

    address: str


class Connection(Endpoint, Protocol):
    """The end that connects."""

    @property
    def connected(self) -> bool:
        """False once it has been cut off."""
        ...


class TensorChannel(Protocol):
    """A pipe of rows between the two model workers, beside the control channel."""

    def send(self, row: torch.Tensor) -> None:
        """Send `row`, float32 [vocab], which must not change afterwards; does not wait for the receiver.

        Raises `TransportError` if the channel is dead.
        """
        ...

    def receive(self, count: int) -> torch.Tensor:
        """The next `count` rows in the order sent, float32 [count, vocab]; only for rows that were announced.

        Raises `TransportError` if they miss the channel's deadline, after which it is dead, or if it is dead.
        """
        ...

    def close(self) -> None:
        """Close the channel; a second time does nothing. Rows not yet received are lost."""
        ...


def check_row(row: torch.Tensor, vocab_size: int) -> None:
    """Raises `LocalProtocolError` unless `row` is float32 [vocab_size]: the receiver could not check it."""
    if str(row.dtype) != "torch.float32" or row.shape != (vocab_size,):
        raise LocalProtocolError(
            f"a tensor channel carries float32 [{vocab_size}], not {row.dtype} {list(row.shape)}"
        )
