"""What the worker loops see of any transport: message endpoints and tensor channels.

Knows no bytes, sockets or process groups; those are codec, zeromq, memory and torch_dist. Who may connect, and how
much is heard of it, is for address, keys and gate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pearl.errors import LocalProtocolError, ProtocolError, TransportError
from pearl.protocol.messages import Message

if TYPE_CHECKING:
    import torch  # the front speaks to its engine without it: importing it takes seconds

Peer = bytes
Fault = ProtocolError | TransportError
Received = tuple[Peer, Message | Fault]

SOLE_PEER: Peer = b""  # how a connection, which has one peer only, names it in what it received
MAX_BATCH = 1000  # messages that one `receive` hands out: a flood must not starve the loop that asked


class Endpoint(Protocol):
    """One end of the control channel. Ordered per peer; nothing comes twice.

    Any thread may send and receive, but only one at a time may wait.
    """

    def send(self, message: Message, peer: Peer | None = None) -> None:
        """Queues `message`; never blocks. A listener needs `peer`, a connection takes None.

        Raises `TransportError` where the peer is gone or its queue is full, `LocalProtocolError` where the
        message exceeds a limit of the wire. That a peer has gone is noticed soon, not at once: what is sent
        meanwhile is lost.
        """
        ...

    def receive(self, timeout: float) -> list[Received]:
        """What has arrived, oldest first, at most `MAX_BATCH`; waits `timeout` seconds at most for the first.

        0: does not wait. Malformed input stands in the list as the error that it caused; nothing is raised,
        and a vanished peer is silent: `send` tells.
        """
        ...

    def wait(self, timeout: float) -> None:
        """Returns when something has come, `wake` was called, or `timeout` seconds are over; at times for nothing."""
        ...

    def wake(self) -> None:
        """End the wait of another thread at once, or else the next wait."""
        ...

    def close(self) -> None:
        """Ends the endpoint; a second time does nothing. What is queued may be lost."""
        ...


class Listener(Endpoint, Protocol):
    """The end that others connect to. It limits how much it takes from each peer per second."""

    def trust(self, peer: Peer) -> None:
        """Lift the limit for `peer`, and set it again for the peer trusted before."""
        ...


class TensorChannel(Protocol):
    """A pipe of rows between the two model workers, beside the control channel."""

    def send(self, row: torch.Tensor) -> None:
        """Sends `row`, float32 [vocab]; returns without waiting for the receiver. It must not change after.

        Raises `TransportError` where the channel is dead.
        """
        ...

    def receive(self, count: int) -> torch.Tensor:
        """The next `count` rows in the order sent, float32 [count, vocab]; only for rows that were announced.

        Raises `TransportError` where they do not come before the channel's deadline, or the channel is dead;
        from then on it is dead for good.
        """
        ...

    def close(self) -> None:
        """Ends the channel; a second time does nothing. Rows not received yet are lost."""
        ...


def check_row(row: torch.Tensor, vocab_size: int) -> None:
    """Raise `LocalProtocolError` unless `row` is float32 [vocab_size]: the receiver could not check it."""
    if str(row.dtype) != "torch.float32" or row.shape != (vocab_size,):
        raise LocalProtocolError(f"a tensor channel carries float32 [{vocab_size}], not {row.dtype} {list(row.shape)}")
