"""Profiles: the speeds of a pair on this machine, as `pearl calibrate` measured them, kept for later engines.

A profile holds for one pair, its devices and dtypes, one processor and one version of torch and of PEARL: all of these
are its key.  A target worker begins with it and corrects it while it runs; texts do not depend on it, except those
whose rule makes them depend on the window (`ratio` under `sd`).
"""

from __future__ import annotations

import json
import logging
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from pearl.cache import cache_directory
from pearl.config import EngineConfig
from pearl.errors import ConfigError
from pearl.protocol.speeds import Profile
from pearl.trace.recorder import where_and_what

log = logging.getLogger(__name__)

FORMAT = 2
_ARITHMETIC = 4  # raised when forwards of the same settings come to take another time; 4: our products on a CPU
_SETTINGS = (  # those that speeds depend on
    "target_device",
    "draft_device",
    "target_dtype",
    "draft_dtype",
    "forwards",
    "target_pace",
    "draft_pace",
)


def key(config: EngineConfig) -> dict[str, Any]:
    """What a profile holds for. Call before this process is pinned: its cores are those that the process may use."""
    here, gpus = where_and_what(), Path("/proc/driver/nvidia/gpus").glob("*/information")
    return {
        "target": _identity(config.target),
        "draft": _identity(config.draft),
        **{name: getattr(config, name) for name in _SETTINGS},
        "processor": here["processor"],
        "cores": sorted(os.sched_getaffinity(0)),
        "gpus": sorted(path.read_text().partition("\n")[0] for path in gpus),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
        "arithmetic": _ARITHMETIC,
        "versions": {name: here["versions"][name] for name in ("torch", "transformers", "pearl")},
    }


def path_of(config: EngineConfig) -> Path:
    """The file of this pair's profile on this machine."""
    digest = blake2b(json.dumps(key(config), sort_keys=True).encode(), digest_size=8).hexdigest()
    return cache_directory() / "profiles" / f"{digest}.json"


def save(config: EngineConfig, profile: Profile) -> Path:
    """Keep a profile for later engines; return its file. Raises `ConfigError` if it cannot be written."""
    path, document = path_of(config), {"format": FORMAT, "key": key(config), "profile": profile}
    beside = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
        beside.replace(path)
    except OSError as error:
        raise ConfigError(f"the profile could not be kept in {path}: {error.strerror}") from None
    return path


def load(config: EngineConfig) -> Profile | None:
    """The profile that `config.profile` names; None: it names none, or there is none of this pair on this machine.

    Raises `ConfigError` for a named file that is no profile. A damaged one in the cache is ignored, with a warning.
    """
    if config.profile == "none":
        return None
    if config.profile != "auto":
        return _read(Path(config.profile))
    path = path_of(config)
    try:
        return _read(path) if path.exists() else None
    except ConfigError as error:
        log.warning("%s; going on without it", error)
        return None


def _read(path: Path) -> Profile:
    try:
        document = msgspec.json.decode(path.read_bytes())
        if document["format"] != FORMAT:
            raise ConfigError(f"profile {path} has format {document['format']!r}; this version reads {FORMAT}")
        return msgspec.convert(document["profile"], Profile)
    except OSError as error:
        raise ConfigError(f"profile {path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"profile {path} is damaged: make one with pearl calibrate ({error})") from None


def _identity(spec: str) -> str:
    """A model on this machine: its path and when its files were last changed; any other: its name."""
    path = Path(spec)
    if not path.exists():
        return spec
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return f"{path.absolute()} {blake2b(repr(stamps).encode(), digest_size=8).hexdigest()}"
