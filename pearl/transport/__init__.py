"""Control channel and tensor channels between the processes of an engine.

`listen` and `connect` open an end of the control channel; a transport is imported when one of its addresses is used.
"""

from importlib import import_module
from typing import Any

from pearl.spec.control import ON_ONE_HOST, TRANSPORTS
from pearl.transport.base import Connection, Listener
from pearl.transport.keys import Keys


def listen(address: str, keys: Keys | None = None, *, is_target: bool = True) -> Listener:
    """Return a listener at `address`. Raises `ConfigError` if the address cannot be bound.

    Args:
        is_target: whether the listener is a target; else it is a draft service.
    """
    listener: Listener = _transport(address).listen(address, keys, is_target=is_target)
    return listener


def connect(address: str, keys: Keys | None = None) -> Connection:
    """Return a connection to the listener at `address`, which need not exist yet.

    Raises `ConfigError` if the address cannot be connected to, or keys are missing.
    """
    connection: Connection = _transport(address).connect(address, keys)
    return connection


def _transport(address: str) -> Any:
    """Return the module that `TRANSPORTS` names for the scheme of `address`.

    For an unknown scheme it is the module of socket files, which then refuses the address.
    """
    scheme, _, _ = address.partition("://")
    return import_module(TRANSPORTS.get(scheme, TRANSPORTS[ON_ONE_HOST]))
