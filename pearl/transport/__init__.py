"""Control channel and tensor channels between the processes of an engine.

The functions here open the control channel with the transport that an address names (`pearl.spec.transports`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from pearl.spec.transports import TRANSPORTS, of_address
from pearl.transport.base import Connection, Listener
from pearl.transport.keys import Keys


def listen(address: str, keys: Keys | None = None) -> Listener:
    """The end at `address` to which others connect. Raises `ConfigError` where it cannot be bound."""
    return cast(Listener, _module(address).listen(address, keys))


def connect(address: str, keys: Keys | None = None) -> Connection:
    """A connection to the listener at `address`, which need not exist yet. Raises `ConfigError`."""
    return cast(Connection, _module(address).connect(address, keys))


def check_bind(address: str, has_keys: bool) -> None:
    """Raises `ConfigError` where strangers could reach `address` and there are no keys, or it cannot be bound."""
    _module(address).check_bind(address, has_keys)


def _module(address: str) -> Any:
    transport = of_address(address) or TRANSPORTS["ipc"]  # whose module says what is wrong with the address
    return import_module(transport.module)
