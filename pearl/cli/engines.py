"""`pearl ps`, `pearl stop` and `pearl keys`: this user's engines on this machine, and the keys for two hosts."""

import json
import sys
from pathlib import Path

import click

from pearl.cli.cards import find_card, table
from pearl.cli.commands import example
from pearl.cli.console import say
from pearl.engine import registry
from pearl.engine.registry import Card
from pearl.errors import ConfigError, StartError
from pearl.printable import printable
from pearl.transport.keys import write_keys
from pearl.transport.zeromq import new_keys

_STOP_SECONDS = 30.0  # enough for an engine to kill its workers and write a trace
_SERVED = "pearl serve"


@click.command(epilog=example("pearl ps"))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def ps(as_json: bool) -> None:
    """List your engines on this machine.

    Lists the engines of pearl serve and of programs that use pearl. --connect works with each of them.
    """
    running = registry.running_engines()
    if as_json:
        click.echo(json.dumps([card.to_json() for card in running], indent=2))
    elif running:
        click.echo(printable(table(running)))
    else:
        say("no engine is running")


@click.command(epilog=example("pearl stop 4242"))
@click.argument("engine", metavar="[PID|DIRECTORY]", default="")
@click.option("--all", "stops_all", is_flag=True, help=f"Stop every engine of {_SERVED}.")
def stop(engine: str, stops_all: bool) -> None:
    """Stop an engine of yours on this machine.

    Name it by its PID or directory, as listed by pearl ps. If you name none and there is only one
    engine of pearl serve, the command asks on the terminal whether to stop it, because another
    program may be using it. Engines of other programs are stopped only by name; --all leaves them
    alone. The program that owns the engine gets SIGTERM and ends its workers.
    """
    if engine and stops_all:
        raise ConfigError("name an engine or give --all, not both")
    if engine:
        _stop(find_card(engine))
        return
    servers = _servers()
    if not stops_all:
        _confirm(servers)
    for server in servers:
        _stop(server)


def _servers() -> list[Card]:
    """Return the engines of `pearl serve`, and print which other engines are left alone.

    Raises `ConfigError` if no engine of `pearl serve` is running.
    """
    servers = []
    for engine in registry.running_engines():
        if engine.program == _SERVED:
            servers.append(engine)
        else:
            say(f"left alone: PID {engine.pid}, the engine of {engine.program}")
    if not servers:
        raise ConfigError(f"no engine of {_SERVED} is running")
    return servers


def _confirm(servers: list[Card]) -> None:
    """Ask whether to stop the only engine.

    Raises `ConfigError` if there are several engines, or if there is no terminal to ask on.
    """
    if len(servers) > 1 or not sys.stdin.isatty():
        raise ConfigError(
            f"name the engine by its PID or directory, or give --all:\n{table(servers)}"
        )
    click.confirm(printable(f"stop {_described(servers[0])}?"), abort=True, err=True)


def _described(engine: Card) -> str:
    target = engine.config["target"]
    return f"PID {engine.pid}: {engine.program} with {target} in {engine.directory}"


def _stop(engine: Card) -> None:
    description = _described(engine)
    if not registry.stop(engine, _STOP_SECONDS):
        raise StartError(
            f"still running {_STOP_SECONDS:.0f} s after SIGTERM: {description}. "
            f"kill -9 {engine.pid} ends it"
        )
    say(f"stopped {description}")


@click.command(epilog=example("pearl keys pearl.keys"))
@click.argument("file", type=click.Path(path_type=Path))
def keys(file: Path) -> None:
    """Make the keys that secure a control channel between two hosts.

    Everyone who can read FILE can use the engines that are started with these keys. An existing
    file is never overwritten.
    """
    write_keys(file, new_keys())
    say(
        f"{file}: copy it to the other host over a channel you trust (scp -p), and give --keys {file} on both"
    )
