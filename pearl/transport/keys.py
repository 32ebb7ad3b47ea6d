"""The file of keys that secures a control channel.

Anyone who has the file can use the engines. So the file is created with access for its owner only,
and a file that other users can read is refused. Both hosts have the same file. This module knows no
sockets; `zeromq` derives CURVE keys from the file.
"""

import contextlib
import json
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from pearl.errors import ConfigError

_VERSION = 1
_LONGEST = 4096  # bytes; a key file has 200
# 32 bytes as Z85 (ZeroMQ RFC 32) writes them.
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_MAKE = "make one with `pearl keys FILE`"


@dataclass(frozen=True)
class Keys:
    """Two secret CURVE keys as Z85, from which the public keys follow. The repr shows no key."""

    server: str = field(repr=False)
    client: str = field(repr=False)


def channel_keys(given: str | None) -> Keys | None:
    """Return the keys in the file that the user has given; None if `given` is None.

    Each process reads the file itself, so that keys are never sent.
    """
    return read_keys(Path(given)) if given else None


def write_keys(path: Path, keys: Keys) -> None:
    """Create the file, readable by this user only. Raises `ConfigError` if it exists or cannot be created."""
    document = json.dumps({"pearl_keys": _VERSION, "server": keys.server, "client": keys.client})
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} is there already, and its users would be locked out: name another"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot make the key file {path}: {getattr(error, 'strerror', error)}"
        ) from None
    try:
        with os.fdopen(handle, "w") as file:
            file.write(document + "\n")
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise ConfigError(f"cannot write the key file {path}: {error.strerror}") from None


def read_keys(path: Path) -> Keys:
    """Return the keys in a file.

    Raises `ConfigError` for a file that holds no keys, or that other users may read or change.
    """
    try:
        # Opened without blocking, because it may be a pipe. It is checked after it was opened, so
        # that the file that is read is the one that was checked.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            _check_private(path, os.fstat(file.fileno()))
            content = file.read(_LONGEST + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the key file {path}: {getattr(error, 'strerror', error)}; {_MAKE}"
        ) from None
    return _parsed(path, content)


def _check_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"the key file {path} is no file: {_MAKE}")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"the key file {path} is another user's, who could use the engine: {_MAKE}"
        )
    if status.st_mode & 0o077:
        raise ConfigError(
            f"the key file {path} has mode {stat.S_IMODE(status.st_mode):04o}, so other users can "
            f"reach it. If nobody has read it, `chmod 600 {path}`; otherwise {_MAKE}"
        )


def _parsed(path: Path, content: bytes) -> Keys:
    try:
        document = json.loads(content) if len(content) <= _LONGEST else None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("pearl_keys") != _VERSION:
        raise ConfigError(f"{path} is no key file of this version: {_MAKE}")
    keys = Keys(str(document.get("server")), str(document.get("client")))
    if not (_KEY.fullmatch(keys.server) and _KEY.fullmatch(keys.client)):
        raise ConfigError(f"the key file {path} is damaged: copy it anew, or {_MAKE}")
    return keys
