"""The other end of a socket in tests: a stranger, and the messages that arrive."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from pearl.errors import RemoteProtocolError
from pearl.protocol.messages import Message
from pearl.transport.base import Endpoint, Peer
from pearl.transport.keys import Keys
from pearl.transport.mailbox import Mailbox

WAIT = 20.0  # seconds: a bound for a slow machine, never reached where all is well


@contextmanager
def stranger(keys: Keys | None = None) -> Iterator[zmq.Socket[bytes]]:
    """Return a raw ZeroMQ socket that is not connected yet.

    `keys`: secrets that the socket uses; None if it uses none.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.SNDHWM, 0)
        if keys is not None:
            peer.curve_serverkey, peer.curve_publickey = (
                zmq.curve_public(k.encode()) for k in (keys.server, keys.client)
            )
            peer.curve_secretkey = keys.client.encode()
        yield peer


def collect(
    end: Endpoint | Mailbox, count: int
) -> list[tuple[Peer, Message | RemoteProtocolError]]:
    """Return the next `count` messages; fewer if `WAIT` seconds have passed."""
    got: list[tuple[Peer, Message | RemoteProtocolError]] = []
    deadline = time.monotonic() + WAIT
    while len(got) < count and time.monotonic() < deadline:
        got += end.receive(0.2)
    return got
