"""Profiles: files with a pair's speeds on this machine, which `pearl calibrate` writes.

If there is no profile, the forward times that an engine measures at its start are kept for a day, so that the next
start need not measure them.

A profile is valid for one pair on its devices and in its dtypes, for one processor, and for one
version of torch and of PEARL: all of these are the profile's key.  A target worker starts with the
profile's speeds, and corrects them while it runs.  Texts do not depend on the profile, except those
that depend on the window (rule `ratio`, method `sd`).
"""

import json
import logging
import os
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from pearl.cache import cache_directory
from pearl.config import EngineConfig
from pearl.errors import ConfigError
from pearl.models.checkpoints.checkpoint import is_toy
from pearl.protocol.speeds import Profile
from pearl.trace.recorder import where_and_what

log = logging.getLogger(__name__)

FORMAT = 2
# Raised when new code changes forward times under the same settings; 5: our products of several rows on a CPU.
_ARITHMETIC = 5
_SETTINGS = (  # settings that speeds depend on
    "target_device",
    "draft_device",
    "target_dtype",
    "draft_dtype",
    "rows",
    "forwards",
    "tensors",
    "target_pace",
    "draft_pace",
)
# How long the times that a start has measured are used. Other programs may have slowed that start.
_TIMES_SECONDS = 24 * 3600.0


def key(config: EngineConfig) -> dict[str, Any]:
    """Return the key of a profile: everything that speeds depend on.

    Call this before this process is pinned, because the key includes the cores that the process may
    use.
    """
    here = where_and_what()
    gpus = Path("/proc/driver/nvidia/gpus").glob("*/information")
    return {
        "target": _identity(config.target),
        "draft": _identity(config.draft),
        "head": _identity(config.head or "none"),
        **{name: getattr(config, name) for name in _SETTINGS},
        "processor": here["processor"],
        "cores": sorted(os.sched_getaffinity(0)),
        "gpus": sorted(path.read_text().partition("\n")[0] for path in gpus),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
        "arithmetic": _ARITHMETIC,
        "versions": {name: here["versions"][name] for name in ("torch", "transformers", "pearl")},
    }


def path_of(config: EngineConfig) -> Path:
    """Return the file of this pair's profile on this machine."""
    digest = blake2b(json.dumps(key(config), sort_keys=True).encode(), digest_size=8).hexdigest()
    return cache_directory() / "profiles" / f"{digest}.json"


def save(config: EngineConfig, profile: Profile) -> Path:
    """Keep a profile for later engines; return its file. Raises `ConfigError` if it cannot be written."""
    path = path_of(config)
    _write(path, key(config), profile)
    return path


def load(config: EngineConfig) -> Profile | None:
    """Return the profile of this pair on this machine; None if there is none, or if `config.profile` is "none".

    A damaged profile is ignored, with a warning.
    """
    path = path_of(config)
    if config.profile == "none" or not path.exists():
        return None
    try:
        document = msgspec.json.decode(path.read_bytes())
        if document["format"] != FORMAT:
            raise ValueError(
                f"it has format {document['format']!r}, and this version reads {FORMAT}"
            )
        profile = msgspec.convert(document["profile"], Profile)
    except (
        msgspec.MsgspecError,
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
    ) as error:
        log.warning("profile %s is not read (%s): make one with pearl calibrate", path, error)
        return None
    if not profile.ways and time.time() - path.stat().st_mtime > _TIMES_SECONDS:
        return None  # measured at a start, more than a day ago
    return profile


def keeper(config: EngineConfig) -> Callable[[Profile], None]:
    """Return a function that writes a profile with the forward times that a start has measured.

    Call this before this process is pinned. The function does nothing for toys, or if
    `config.profile` is not "auto".
    """
    if config.profile != "auto" or is_toy(config.target) or is_toy(config.draft):
        return lambda profile: None
    path = path_of(config)
    profile_key = key(config)

    def keep(measured: Profile) -> None:
        try:
            times = Profile(
                t_draft=measured.t_draft,
                t_target=measured.t_target,
                t_elsewhere=measured.t_elsewhere,
            )
            _write(path, profile_key, times)
        except ConfigError as error:  # the next start measures again
            log.debug("%s", error)

    return keep


def _write(path: Path, key: dict[str, Any], profile: Profile) -> None:
    document = {"format": FORMAT, "key": key, "profile": profile}
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"the profile could not be kept in {path}: {error.strerror}") from None


def _identity(spec: str) -> str:
    """Return what identifies a model on this machine.

    It is the model's path with a digest of its files' sizes and times, or the name of a model that
    is no path.
    """
    path = Path(spec)
    if not path.exists():
        return spec
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stamps = []
    for file in files:
        if file.is_file():
            status = file.stat()
            stamps.append((file.name, status.st_size, status.st_mtime_ns))
    return f"{path.absolute()} {blake2b(repr(stamps).encode(), digest_size=8).hexdigest()}"
