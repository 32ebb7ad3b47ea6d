"""A second front on an engine that is already running, in another process of the same user.

Each engine leaves a card in its private directory: where it listens and how it is configured.  Who can read that
directory may use the engine; nobody else can reach it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from pearl.config import EngineConfig
from pearl.engine import Engine
from pearl.engine.launcher import CARD
from pearl.errors import ConfigError
from pearl.models.embedded import Progress, silent
from pearl.transport.address import is_local, is_private, private_directories


def running_engines() -> list[Path]:
    """The directories of this user's engines whose processes live, newest first."""
    return [directory for directory in private_directories() if _process(directory) is not None]


def find_engine(name: str) -> Path:
    """The directory of a running engine. `name`: its directory, or empty where there is only one.

    Raises `ConfigError` where there is none, or several to choose from.
    """
    if name:
        directory = Path(name)
        if _process(directory) is None:
            raise ConfigError(f"no engine runs in {name}: give the directory that `pearl serve` or /show prints")
        return directory
    running = running_engines()
    if len(running) == 1:
        return running[0]
    if not running:
        raise ConfigError("no engine is running: start one with `pearl serve`")
    raise ConfigError(f"several engines are running, name one: {', '.join(map(str, running))}")


def _card(directory: Path) -> dict[str, Any]:
    """What an engine has left there; nothing where another user could have put it, or it leads off this machine to
    who need not prove a key."""
    try:
        if not is_private(directory):
            return {}
        card = json.loads((directory / CARD).read_text())
        config = dict(card["config"])
        if not (is_local(str(card["address"])) or config.get("keys")):
            return {}
        return {"pid": int(card["pid"]), "address": str(card["address"]), "config": config}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _process(directory: Path) -> int | None:
    """The id of the process that holds the engine; None where it is gone, or there was none."""
    pid = _card(directory).get("pid")
    return pid if pid and Path("/proc", str(pid)).exists() else None


class AttachedLauncher:
    """Another process's engine: nothing is launched here, and nothing ended or removed. Raises `ConfigError`."""

    remedy = "Start an engine again, with `pearl serve` say"
    draft_pid = None

    def __init__(self, directory: Path) -> None:
        card = _card(directory)
        if not card:
            raise ConfigError(f"{directory} holds no running engine")
        self.config = EngineConfig(**card["config"] | {"trace": None})
        self.directory = directory
        self._address: str = card["address"]

    def launch(self, progress: Progress) -> str:
        return self._address

    def wait_until_ready(self) -> float:
        return time.monotonic() + self.config.target_timeout

    def alive(self, connected: bool) -> bool:
        return connected

    def fate(self, otherwise: str) -> str:
        return otherwise

    def keep(self) -> None: ...
    def lose(self) -> None: ...
    def close(self) -> None: ...


def attach(directory: Path, progress: Progress = silent) -> Engine:
    """Sends requests to the engine in `directory`; closing it leaves that engine as it is."""
    return Engine.launched_by(AttachedLauncher(directory), progress)
