"""Control channel and tensor channels between the processes of an engine.

`listen` and `connect` open an end of the control channel; a transport is imported when one of its addresses is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from pearl.errors import ConfigError
from pearl.spec.control import TRANSPORTS
from pearl.transport.base import Connection, Listener
from pearl.transport.keys import Keys


def listen(address: str, keys: Keys | None = None) -> Listener:
    """The end at `address` to which others connect. Raises `ConfigError` where it cannot be bound."""
    listener: Listener = _transport(address).listen(address, keys)
    return listener


def connect(address: str, keys: Keys | None = None) -> Connection:
    """A connection to the listener at `address`, which need not exist yet. Raises `ConfigError`."""
    connection: Connection = _transport(address).connect(address, keys)
    return connection


def _transport(address: str) -> Any:
    module = TRANSPORTS.get(address.partition("://")[0])
    if module is None:
        raise ConfigError(f"no transport goes to {address}: use ipc, or tcp://HOST:PORT")
    return import_module(module)
