"""Settings of the control channel, over which the processes of an engine exchange messages.

A setting is `ipc` if all workers are on one host, or else an address that another host can reach.
"""

import re

ON_ONE_HOST = "ipc"
#: scheme of an address -> the module whose `listen` and `connect` open an end of the channel
TRANSPORTS = {
    "ipc": "pearl.transport.zeromq",
    "tcp": "pearl.transport.zeromq",
}
_SCHEMES = "|".join(scheme for scheme in TRANSPORTS if scheme != ON_ONE_HOST)
_REMOTE = re.compile(rf"({_SCHEMES})://(?P<host>[^:\s/]+|\[[^]\s]+\]):(\*|\d{{1,5}})")
# Host names and IP addresses, but no wildcard: a wildcard does not tell the other host where to connect.
_HOST = re.compile(r"(?!0\.0\.0\.0$|\[[0:]*\]$)([\w.-]+|\[[0-9A-Fa-f:.]+(%\w+)?\])")


def is_remote(address: str) -> bool:
    """Return whether `address` is that of a channel between hosts, such as tcp://host:5555.

    Such a channel needs keys.
    """
    return _REMOTE.fullmatch(address) is not None


def names_host(address: str) -> bool:
    """Return whether `address` is that of a channel between hosts and names its host.

    A wildcard such as 0.0.0.0 names no host.
    """
    match = _REMOTE.fullmatch(address)
    return match is not None and _HOST.fullmatch(match["host"]) is not None


def is_control(control: str) -> bool:
    """Return whether `control` is a valid setting of the control channel."""
    return control == ON_ONE_HOST or is_remote(control)
