"""A second front on an engine that is already running, in another process of the same user."""

from __future__ import annotations

import time
from pathlib import Path

from pearl.cache import Progress, silent
from pearl.config import EngineConfig
from pearl.engine import Engine
from pearl.engine.card import read_card
from pearl.errors import ConfigError, PearlError


class AttachedLauncher:
    """Another process's engine: nothing is launched here, and nothing ended or removed. Raises `ConfigError`."""

    remedy = "Start an engine again, with `pearl serve` say"
    draft_pid = None
    draft_restarts = 0

    def __init__(self, directory: Path) -> None:
        card = read_card(directory)
        if card is None:
            raise ConfigError(f"{directory} holds no running engine")
        self.config = EngineConfig(**card.config | {"trace": None})
        self.directory = directory
        self.untraced: list[PearlError] = []
        self._address = card.address

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
