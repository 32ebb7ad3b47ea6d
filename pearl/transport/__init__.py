"""Control channel and tensor channels between the processes of an engine.

`listen` and `connect` open an end of the control channel; ZeroMQ is imported when they are called.
"""

from __future__ import annotations

from pearl.transport.base import Connection, Listener
from pearl.transport.keys import Keys


def listen(address: str, keys: Keys | None = None, *, is_target: bool = True) -> Listener:
    """The end at `address` to which others connect. Raises `ConfigError` where it cannot be bound.

    `is_target`: whether it is a target's; else it is a draft service's.
    """
    from pearl.transport.zeromq import ZmqListener

    return ZmqListener(address, keys, is_target=is_target)


def connect(address: str, keys: Keys | None = None) -> Connection:
    """A connection to the listener at `address`, which need not exist yet. Raises `ConfigError`."""
    from pearl.transport.zeromq import ZmqConnection

    return ZmqConnection(address, keys)
