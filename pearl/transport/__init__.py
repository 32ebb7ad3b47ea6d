"""Control channel and tensor channels between the processes of an engine.

`listen` and `connect` open an end of the control channel; a transport is imported when one of its addresses is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from pearl.spec.control import ON_ONE_HOST, TRANSPORTS
from pearl.transport.base import Connection, Listener
from pearl.transport.keys import Keys


def listen(address: str, keys: Keys | None = None, *, is_target: bool = True) -> Listener:
    """The end at `address` to which others connect. Raises `ConfigError` where it cannot be bound.

    `is_target`: whether it is a target's; else it is a draft service's.
    """
    listener: Listener = _transport(address).listen(address, keys, is_target=is_target)
    return listener


def connect(address: str, keys: Keys | None = None) -> Connection:
    """A connection to the listener at `address`, which need not exist yet. Raises `ConfigError`."""
    connection: Connection = _transport(address).connect(address, keys)
    return connection


def _transport(address: str) -> Any:
    """The module that `TRANSPORTS` names for the scheme; the one of socket files refuses all other addresses."""
    scheme, _, _ = address.partition("://")
    return import_module(TRANSPORTS.get(scheme, TRANSPORTS[ON_ONE_HOST]))
