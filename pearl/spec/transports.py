"""The transports of the control channel, declared once: a new one is a row here and a module of `pearl.transport`.

A module has `listen(address, keys)`, `connect(address, keys)` and `check_bind(address, keys)`; `pearl.transport` calls
them by the scheme of the address.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Transport:
    """One transport.

    Attributes:
        module: its module.
        local: the address that the bare scheme stands for, a file that only this user can reach. `{directory}` is the
            engine's private directory. None: other machines may reach its addresses; they take keys.
    """

    module: str
    local: str | None = None


TRANSPORTS = {
    "ipc": Transport("pearl.transport.sockets", "ipc://{directory}/control"),
    "tcp": Transport("pearl.transport.zeromq"),
}
_REMOTE = re.compile(r"tcp://([^:\s/]+|\[[^]\s]+\]):(\*|\d{1,5})")


def of_address(address: str) -> Transport | None:
    """The transport of an address or of a bare scheme."""
    return TRANSPORTS.get(address.partition("://")[0])


def is_on_one_host(control: str) -> bool:
    """Whether this setting of the control channel is a bare scheme: both workers are on this machine."""
    return control in TRANSPORTS and TRANSPORTS[control].local is not None


def is_remote(address: str) -> bool:
    """Whether this is the address of a transport between machines."""
    return _REMOTE.fullmatch(address) is not None


def is_control(control: str) -> bool:
    """Whether this is a setting of the control channel: a bare scheme, or an address between machines."""
    return is_on_one_host(control) or is_remote(control)
