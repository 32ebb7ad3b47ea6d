"""Control channel and tensor channels between the processes of an engine.

The functions here open the control channel with the transport that an address names (`pearl.spec.transports`).
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, cast

from pearl.spec.transports import TRANSPORTS, of_address
from pearl.transport.base import Connection, Listener
from pearl.transport.keys import OWN_KEYS, Keys, channel_keys, write_keys


def listen(address: str, keys: Keys | None = None) -> Listener:
    """The end at `address` to which others connect. Raises `ConfigError` where it cannot be bound."""
    return cast(Listener, _module(address).listen(address, keys))


def connect(address: str, keys: Keys | None = None) -> Connection:
    """A connection to the listener at `address`, which need not exist yet. Raises `ConfigError`."""
    return cast(Connection, _module(address).connect(address, keys))


def check_bind(address: str, has_keys: bool) -> None:
    """Raises `ConfigError` where strangers could reach `address` and there are no keys, or it cannot be bound."""
    _module(address).check_bind(address, has_keys)


def ensured_keys(control: str, given: str | None, directory: Path) -> Keys | None:
    """As `channel_keys`, but an engine that other users of this machine could reach makes keys if it was given none."""
    if given is None and control in TRANSPORTS and TRANSPORTS[control].makes_keys:
        write_keys(directory / OWN_KEYS, _module(control).new_keys())
    return channel_keys(given, directory)


def _module(address: str) -> Any:
    transport = of_address(address) or TRANSPORTS["ipc"]  # whose module says what is wrong with the address
    return import_module(transport.module)
