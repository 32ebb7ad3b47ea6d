"""The engine of a command: started here, started under torchrun, or a running one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.text import Text

from pearl.cli.cards import find_card
from pearl.config import EngineConfig
from pearl.engine import Engine, Progress, torchrun
from pearl.engine.launcher import LocalLauncher
from pearl.errors import ConfigError, TraceError
from pearl.printable import log_to_stderr

_Command = TypeVar("_Command", bound=Callable[..., Any])


def connect_option(command: _Command) -> _Command:
    return click.option(
        "--connect",
        is_flag=False,
        flag_value="",
        metavar="[PID|DIRECTORY]",
        help="Use a running engine, as listed by pearl ps; the name may be left out if there is only one.",
    )(command)


@contextmanager
def running(
    config: EngineConfig, console: Console, connect: str | None = None
) -> Iterator[Engine | None]:
    """Yield the engine for a command. On torchrun's other ranks: run its worker until it ends, then yield None.

    Args:
        connect: directory or process id of a running engine, "" for the only one; None: start one.
    """
    log_to_stderr(config.log_level, "front")
    rank = torchrun.rank()
    if connect is not None:
        if rank is not None:
            raise ConfigError(
                "--connect does not work under torchrun: the engine is already running"
            )
        directory = Path(find_card(connect).directory)
        with _show_progress(console, f"connecting to {directory}") as progress:
            engine = Engine.attach(directory, progress)
        _check_same(config, engine)
    else:
        if rank is not None:
            torchrun.check_world(config)
            torchrun.die_with_torchrun()
        if rank:
            torchrun.serve(config, progress=lambda _: None)
            yield None
            return
        with _show_progress(console, "starting the workers") as progress:
            launcher = LocalLauncher(config) if rank is None else torchrun.TorchrunLauncher(config)
            engine = Engine.launched_by(launcher, progress)
        for note in engine.notes:
            console.print(note, style="yellow")
    with engine:
        yield engine
    if (
        engine.config.trace and not Path(engine.config.trace).exists()
    ):  # the log says why; the command prints its text
        click.get_current_context().call_on_close(lambda: sys.exit(TraceError.exit_code))


def _check_same(config: EngineConfig, engine: Engine) -> None:
    """Raise `ConfigError` for a setting that the running engine has otherwise."""
    ours, theirs = config.model_dump(), engine.config.model_dump()
    for name in sorted(config.model_fields_set - {"log_level", "trace"}):
        if ours[name] != theirs[name]:
            engine.close()
            raise ConfigError(
                f"the running engine has {name} {theirs[name]}, not {ours[name]}: leave that out"
            )


@contextmanager
def _show_progress(console: Console, what: str) -> Iterator[Progress]:
    """Show the messages passed to the yielded function: with a spinner on a terminal, as lines elsewhere."""
    if not console.is_terminal:
        yield lambda message: console.print(message, style="dim")
        return
    with console.status(Text(f"{what} ...")) as status:
        yield lambda message: status.update(Text(message))  # a str would be read as markup
