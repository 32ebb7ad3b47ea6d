"""Settings of the control channel: `ipc` for the workers of one host, or an address that another host can reach."""

import re

ON_ONE_HOST = "ipc"
#: scheme of an address -> the module whose `listen` and `connect` open an end of the channel there
TRANSPORTS = {
    "ipc": "pearl.transport.zeromq",
    "tcp": "pearl.transport.zeromq",
}
_SCHEMES = "|".join(scheme for scheme in TRANSPORTS if scheme != ON_ONE_HOST)
_REMOTE = re.compile(rf"({_SCHEMES})://(?P<host>[^:\s/]+|\[[^]\s]+\]):(\*|\d{{1,5}})")
# Host names and IP addresses, but no wildcard: a wildcard does not tell the other host where to connect.
_HOST = re.compile(r"(?!0\.0\.0\.0$|\[[0:]*\]$)([\w.-]+|\[[0-9A-Fa-f:.]+(%\w+)?\])")


def is_remote(address: str) -> bool:
    """Return whether this is the address of a channel between hosts, which needs keys."""
    return _REMOTE.fullmatch(address) is not None


def names_host(address: str) -> bool:
    """Return whether a channel between hosts may be bound to this address: it must name a host, not a wildcard."""
    match = _REMOTE.fullmatch(address)
    return match is not None and _HOST.fullmatch(match["host"]) is not None


def is_control(control: str) -> bool:
    """Return whether `control` is a valid setting of the control channel."""
    return control == ON_ONE_HOST or is_remote(control)
