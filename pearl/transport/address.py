"""Where an engine may listen: on a socket file in a private directory, or on a network address with keys.

Only this user can connect to a socket file in a private directory. This module knows paths and the
syntax of addresses; it connects only to see whether a process listens.
"""

import os
import resource
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from pearl.config.section import check_utf8
from pearl.errors import ConfigError
from pearl.spec.control import ON_ONE_HOST, names_host

_MAX_IPC_PATH = 107  # bytes: size of sun_path on Linux, without the final NUL
_PREFIX = "pearl-"
_USUAL_SOCKET = f"{_PREFIX}XXXXXXXX/control"  # in a runtime directory
SHORT_DIRECTORY = "/tmp/pearl.{user}"  # does not match the names of private directories
_FILE = "ipc://"


def private_directory() -> Path:
    """Make a fresh directory `pearl-XXXXXXXX` of mode 0700 and return it; the caller removes it."""
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_runtime_directory()))


def private_directories() -> list[Path]:
    """Return the directories of this user that `private_directory` has made, most recently modified first."""
    modified = {}
    for path in _runtime_directory().glob(f"{_PREFIX}*"):
        with suppress(FileNotFoundError):  # another engine may remove its own at any time
            if is_private(path):
                modified[path] = path.stat().st_mtime
    return sorted(modified, key=modified.__getitem__, reverse=True)


def is_engine_directory(directory: Path) -> bool:
    """Return whether `directory` looks as if `private_directory` had made it.

    Check this before using a directory that another process has named.
    """
    return directory.is_absolute() and directory.name.startswith(_PREFIX) and is_private(directory)


def bind_address(control: str, directory: Path) -> str:
    """Return the address to listen at for the setting `control`.

    For "ipc" it is a socket file in `directory`; otherwise it is the setting itself.
    """
    return f"{_FILE}{directory}/control" if control == ON_ONE_HOST else control


def is_file(address: str) -> bool:
    """Return whether `address` names a socket file."""
    return address.startswith(_FILE)


def file_of(address: str) -> str:
    """Return the path of the socket file that `address` names."""
    return address.removeprefix(_FILE)


def is_local(address: str) -> bool:
    """Return whether only this user can reach `address`: a socket file in a private directory."""
    return is_file(address) and is_private(Path(file_of(address)).parent)


def check_bind(address: str, keys: bool = False) -> None:
    """Raise `ConfigError` if a listener may not bind `address`.

    An address that other users can reach may only be bound if there are `keys`.
    """
    if is_file(address):
        _check_socket_file(Path(file_of(address)))
    elif not names_host(address):
        raise ConfigError(
            f"refusing to bind {address}: only ipc:// in a private directory and tcp://HOST:PORT "
            "are allowed, until other transports can be secured. HOST is an address of this "
            "machine that the other host can reach, or the name of a network interface; no "
            "wildcard, because it does not tell the other host where to connect"
        )
    elif not keys:
        raise ConfigError(
            f"refusing to bind {address} until there are keys: anyone who reaches it could use "
            "the engine. Make a key file with `pearl keys FILE`, copy it to the other host, and "
            "give --keys FILE on both"
        )


def _check_socket_file(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > _MAX_IPC_PATH:
        raise ConfigError(
            f"the socket path {path} has {length} bytes, a Unix socket at most {_MAX_IPC_PATH}: "
            "set TMPDIR or XDG_RUNTIME_DIR to a shorter directory"
        )
    if not path.is_absolute() or not is_private(path.parent):
        raise ConfigError(
            f"refusing to bind {path} until its directory is absolute, owned by this user and of "
            "mode 0700: others could connect"
        )
    if os.path.lexists(path):
        raise ConfigError(
            f"{path} exists: an engine is listening there; or one was killed, then remove the file"
        )


def free_stale(address: str) -> None:
    """Remove the socket file of a service that was killed, so that the next one can listen there."""
    if not is_file(address) or not is_private(Path(file_of(address)).parent):
        return
    path = Path(file_of(address))
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            pass  # nothing is there, or binding will say what is wrong with it


def is_private(directory: Path) -> bool:
    """Return whether `directory` belongs to this user, and no other user may enter it.

    Return false for a symbolic link.
    """
    try:
        status = os.lstat(directory)
    except (OSError, ValueError):
        return False
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o077
    )


def raise_limit() -> None:
    """Raise the limit of open files, and so of connections, to the most that the system allows.

    Shells set a low limit.
    """
    with suppress(ValueError, OSError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _runtime_directory() -> Path:
    """Return the parent of private directories.

    It is $XDG_RUNTIME_DIR if that is private and short enough for the path of a socket; otherwise
    $TMPDIR, or /tmp if that is not set. If $TMPDIR is too long, it is a directory in /tmp.
    """
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and _has_room(runtime) and is_private(runtime):
        return runtime
    temporary = Path(check_utf8(tempfile.gettempdir(), "$TMPDIR"))
    return temporary if _has_room(temporary) else _short_directory()


def _has_room(directory: Path) -> bool:
    """Return whether the path of a socket in a private directory of `directory` fits a Unix socket."""
    return len(os.fsencode(directory / _USUAL_SOCKET)) <= _MAX_IPC_PATH


def _short_directory() -> Path:
    """Return this user's own directory in /tmp, and make it if it does not exist.

    Raises `ConfigError` if that is impossible, or if others could enter the directory.
    """
    directory = Path(SHORT_DIRECTORY.format(user=os.geteuid()))
    with suppress(OSError):
        directory.mkdir(mode=0o700)
    if not is_private(directory):
        raise ConfigError(
            f"the temporary directory {tempfile.gettempdir()} is too long for a Unix socket, and "
            f"{directory} is not a directory of this user and of mode 0700: set TMPDIR to a "
            "shorter directory"
        )
    return directory
