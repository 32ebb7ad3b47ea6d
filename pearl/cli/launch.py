"""An engine for a command: started here, under torchrun with the other rank, or one that is running already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.text import Text

from pearl.config import EngineConfig
from pearl.engine import Engine, Progress, torchrun
from pearl.engine.attach import attach, find_engine
from pearl.engine.launcher import LocalLauncher
from pearl.errors import ConfigError
from pearl.printable import log_to_stderr

_Command = TypeVar("_Command", bound=Callable[..., Any])


def connect_option(command: _Command) -> _Command:
    return click.option(
        "--connect",
        is_flag=False,
        flag_value="",
        metavar="[DIRECTORY]",
        help="Use an engine that is running; see pearl serve. The directory may be left out where there is only one.",
    )(command)


@contextmanager
def running(config: EngineConfig, console: Console, connect: str | None = None) -> Iterator[Engine | None]:
    """The engine that a command works with; None on the ranks of torchrun that have served it until its end."""
    log_to_stderr(config.log_level, "front")
    rank = torchrun.rank()
    if connect is not None:
        if rank is not None:
            raise ConfigError("--connect takes no torchrun: the engine runs already")
        directory = find_engine(connect)
        with _loading(console, f"connecting to {directory}") as progress:
            engine = attach(directory, progress)
    else:
        if rank is not None:
            torchrun.check_world(config)
            torchrun.die_with_torchrun()
        if rank:
            torchrun.serve(config, rank, progress=lambda _: None)
            yield None
            return
        with _loading(console, "starting the workers") as progress:
            launcher = LocalLauncher(config) if rank is None else torchrun.TorchrunLauncher(config)
            engine = Engine.launched_by(launcher, progress)
    with engine:
        yield engine


@contextmanager
def _loading(console: Console, what: str) -> Iterator[Progress]:
    """Shows what is being loaded: a spinner on a terminal, lines elsewhere."""
    if not console.is_terminal:
        yield lambda message: console.print(message, style="dim")
        return
    with console.status(Text(f"{what} ...")) as status:
        yield lambda message: status.update(Text(message))  # a str would be read as markup
