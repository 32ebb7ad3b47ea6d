"""A second front on a running engine, in another process of the same user."""

from __future__ import annotations

import time
from pathlib import Path

from pearl.cache import Progress, silent
from pearl.config import EngineConfig
from pearl.engine.card import read_card
from pearl.engine.engine import Engine
from pearl.engine.launcher import Launcher
from pearl.errors import ConfigError


class AttachedLauncher(Launcher):
    """Another process's engine: nothing is launched here, and nothing ended or removed. Raises `ConfigError`."""

    remedy = "Start an engine again, with `pearl serve` for example"

    def __init__(self, directory: Path) -> None:
        card = read_card(directory)
        if card is None:
            raise ConfigError(f"{directory} holds no running engine")
        super().__init__(EngineConfig(**card.config | {"trace": None}), directory)
        self._address = card.address

    def launch(self, progress: Progress) -> str:
        return self._address

    def wait_until_ready(self) -> float:
        return time.monotonic() + self.config.target_timeout


def attach(directory: Path, progress: Progress = silent) -> Engine:
    """Sends requests to the engine in `directory`; closing it does not end that engine."""
    return Engine.launched_by(AttachedLauncher(directory), progress)
