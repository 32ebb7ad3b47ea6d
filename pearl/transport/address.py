"""Where an engine may listen: socket files in a private directory, the loopback, or a network address with keys.

Knows paths and the form of addresses, no sockets.

Without keys the address protects an engine: only this user can reach what is in a private directory.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path

from pearl.config.section import check_utf8
from pearl.errors import ConfigError
from pearl.spec.transports import TRANSPORTS, is_control, of_address

_MAX_IPC_PATH = 107  # bytes: sun_path of a Unix socket less its final zero
_PREFIX = "pearl-"
_LOOPBACK = re.compile(r"tcp://(127\.0\.0\.1|\[::1\]):(\*|\d{1,5})")
_TCP = re.compile(r"tcp://(?!\*|0\.0\.0\.0:|\[[0:]*\]:)([\w.-]+|\[[0-9A-Fa-f:.]+(%\w+)?\]):(\*|\d{1,5})")


def private_directory() -> Path:
    """A fresh directory `pearl-XXXXXXXX` of mode 0700; the caller removes it."""
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_runtime_directory()))


def private_directories() -> list[Path]:
    """The directories that `private_directory` made for this user, newest first."""
    found = [path for path in _runtime_directory().glob(f"{_PREFIX}*") if is_private(path)]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def is_engine_directory(directory: Path) -> bool:
    """Whether `private_directory` may have made `directory`: its name may come from another process."""
    return directory.is_absolute() and directory.name.startswith(_PREFIX) and is_private(directory)


def bind_address(control: str, directory: Path) -> str:
    """Where to listen for this setting of `control`: the local address of a bare scheme, or the address itself."""
    if not is_control(control):
        raise ConfigError(f"control channel {control!r} is unknown: choose ipc, tcp, or tcp://HOST:PORT")
    return TRANSPORTS[control].local.format(directory=directory) if control in TRANSPORTS else control


def is_local(address: str) -> bool:
    """Whether `address` leads to this machine only: a file in a private directory, or the loopback."""
    transport = of_address(address)
    if transport is not None and transport.remote is None:
        return is_private(Path(address.partition("://")[2]).parent)
    return _LOOPBACK.fullmatch(address) is not None


def check_bind(address: str, keys: bool = False) -> None:
    """Raises `ConfigError` if strangers could reach `address` and there are no `keys`, or it cannot be bound."""
    if address.startswith("ipc://"):
        _check_socket_file(Path(address.removeprefix("ipc://")))
    elif not _TCP.fullmatch(address):
        raise ConfigError(
            f"refusing to bind {address}: only ipc:// in a private directory and tcp://HOST:PORT are allowed until "
            "others can be secured. HOST is an address of this machine that the other host can reach, or the name "
            "of a network interface; a wildcard would not show others where to connect"
        )
    elif not (keys or _LOOPBACK.fullmatch(address)):
        raise ConfigError(
            f"refusing to bind {address} until there are keys: anyone who reaches it could use the engine. Make a key "
            "file with `pearl keys FILE`, copy it to the other host, and give --keys FILE on both"
        )


def _check_socket_file(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > _MAX_IPC_PATH:
        raise ConfigError(
            f"the socket path {path} has {length} bytes, a Unix socket at most {_MAX_IPC_PATH}: "
            "set TMPDIR or XDG_RUNTIME_DIR to a shorter directory, or use tcp"
        )
    if not path.is_absolute() or not is_private(path.parent):
        raise ConfigError(
            f"refusing to bind {path} until its directory is absolute, owned by this user and of mode 0700: "
            "others could connect"
        )
    if os.path.lexists(path):  # ZeroMQ would silently take the address from the engine that listens there
        raise ConfigError(f"{path} exists: an engine listens there, or one was killed; then remove the file")


def is_private(directory: Path) -> bool:
    """Whether only this user can reach what is in `directory`."""
    try:
        status = os.lstat(directory)
    except (OSError, ValueError):
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _runtime_directory() -> Path:
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and is_private(runtime):
        return runtime
    return Path(check_utf8(tempfile.gettempdir(), "$TMPDIR"))
