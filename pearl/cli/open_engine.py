"""Opens the engine that a command uses.

A new engine is started, with or without torchrun, or the command connects to a running engine.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from pearl.cli.cards import find_card
from pearl.config import EngineConfig
from pearl.engine import Engine, Progress, torchrun
from pearl.engine.launcher import LocalLauncher
from pearl.errors import ConfigError, TraceError
from pearl.printable import log_to_stderr

connect_option = click.option(
    "--connect",
    is_flag=False,
    flag_value="",
    metavar="[PID|DIRECTORY]",
    help="Use a running engine, as listed by pearl ps; the name may be left out if there is only one.",
)


@contextmanager
def open_engine(
    config: EngineConfig, console: Console, connect: str | None = None
) -> Iterator[Engine]:
    """Yield the engine for a command.

    Under torchrun only rank 0 gets an engine. Every other rank runs its worker, and then exits.

    Args:
        connect: directory or process id of a running engine; "" for the only running one; None to
            start an engine.
    """
    log_to_stderr(config.log_level, "front")
    if connect is not None:
        engine = _attach(config, console, connect)
    else:
        rank = torchrun.rank()
        if rank is not None:
            torchrun.check_world(config)
            torchrun.die_with_torchrun()
        if rank:
            torchrun.serve(config, progress=lambda _: None)
            sys.exit()
        engine = _start(config, console)
    with engine:
        yield engine
    trace = engine.config.trace
    if trace and not Path(trace).exists():  # the log says why; exit with an error at the end
        click.get_current_context().call_on_close(lambda: sys.exit(TraceError.exit_code))


def _attach(config: EngineConfig, console: Console, name: str) -> Engine:
    """Return a running engine.

    Raises `ConfigError` if no engine or several match `name`, if a setting that the user gave
    differs from the engine's, if the user asked for a trace, or under torchrun, where no engine can
    be connected to.
    """
    if config.trace is not None:
        raise ConfigError(
            "--trace records an engine from its start to its end: give it to the command that "
            "starts the engine, such as pearl serve, and not with --connect"
        )
    if torchrun.rank() is not None:
        raise ConfigError("--connect does not work under torchrun: the engine is already running")
    directory = Path(find_card(name).directory)
    with _show_progress(console, f"connecting to {directory}") as progress:
        engine = Engine.attach(directory, progress)
    _check_same(config, engine)
    return engine


def _start(config: EngineConfig, console: Console) -> Engine:
    """Start an engine and print its notes.

    Under torchrun this runs on rank 0, which launches only the target.
    """
    launcher_type = LocalLauncher if torchrun.rank() is None else torchrun.TorchrunLauncher
    with _show_progress(console, "starting the workers") as progress:
        engine = Engine.launched_by(launcher_type(config), progress)
    for note in engine.notes:
        console.print(note, style="yellow")
    return engine


def _check_same(config: EngineConfig, engine: Engine) -> None:
    """Close the engine and raise `ConfigError` if a setting that the user gave differs from the running engine's."""
    settings = config.located()
    running_settings = engine.config.located()
    for name in sorted(config.model_fields_set - {"log_level"}):
        if settings[name] != running_settings[name]:
            engine.close()
            raise ConfigError(
                f"the running engine has {name} {running_settings[name]}, "
                f"not {settings[name]}: leave that out"
            )


@contextmanager
def _show_progress(console: Console, activity: str) -> Iterator[Progress]:
    """Yield a function that shows progress messages.

    On a terminal the messages replace each other beside a spinner; elsewhere each is a line.
    """
    if not console.is_terminal:
        yield lambda message: console.print(message, style="dim")
        return
    with console.status(Text(f"{activity} ...")) as status:
        yield lambda message: status.update(Text(message))  # a str would be read as markup
