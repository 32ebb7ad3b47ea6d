"""A second front on a running engine, in another process of the same user."""

from __future__ import annotations

from pathlib import Path

from pearl.cache import Progress, silent
from pearl.config import EngineConfig
from pearl.engine.card import read_card
from pearl.engine.engine import Engine
from pearl.engine.launcher import Launcher
from pearl.errors import ConfigError


def attach(directory: Path, progress: Progress = silent) -> Engine:
    """Sends requests to the engine in `directory`; closing it does not end that engine. Raises `ConfigError`."""
    card = read_card(directory)
    if card is None:
        raise ConfigError(f"{directory} holds no running engine")
    config = EngineConfig(**card.config | {"trace": None})
    return Engine.launched_by(Launcher(config, directory, card.address), progress)
