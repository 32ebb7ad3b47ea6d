"""Settings of the control channel: `ipc` for the workers of one host, or an address that another host can reach."""

from __future__ import annotations

import re

ON_ONE_HOST = "ipc"
_REMOTE = re.compile(r"tcp://([^:\s/]+|\[[^]\s]+\]):(\*|\d{1,5})")


def is_remote(address: str) -> bool:
    """Whether this is the address of a channel between hosts, which takes keys."""
    return _REMOTE.fullmatch(address) is not None


def is_control(control: str) -> bool:
    """Whether `control` is a setting of the control channel."""
    return control == ON_ONE_HOST or is_remote(control)
