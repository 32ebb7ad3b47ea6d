"""`pearl serve`: an engine for the same user's programs and, with --http, for all clients of OpenAI's API."""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any

import click

from pearl.cli.commands import example
from pearl.cli.console import SafeConsole, say
from pearl.cli.open_engine import open_engine
from pearl.cli.options import SettingsCommand, settings_options
from pearl.config import EngineConfig, Settings
from pearl.engine import torchrun
from pearl.errors import ConfigError, installing
from pearl.text.reasoning import TAGS, check_tags
from pearl.text.tools import FORMATS

if TYPE_CHECKING:
    from pearl.server.listen import Door


@click.command(
    cls=SettingsCommand, epilog=example("pearl serve --target my-model --draft my-small-model")
)
@click.option(
    "--http",
    metavar="HOST:PORT",
    help="Also serve OpenAI's API at this address; port 0: a free one.",
)
@click.option(
    "--api-key",
    envvar="PEARL_API_KEY",
    metavar="KEY",
    help="Key that clients of --http must send; required beyond the loopback. $PEARL_API_KEY hides it from ps.",
)
@click.option(
    "--http-model",
    "model",
    metavar="NAME",
    help="The model's name for clients; default: the target's.",
)
@click.option(
    "--cors",
    "origins",
    metavar="ORIGIN",
    multiple=True,
    help="Web pages of this origin may use the server, such as http://localhost:3000 (may be given several times).",
)
@click.option(
    "--tool-parser",
    type=click.Choice(["auto", *FORMATS]),
    default="auto",
    help="How the model writes calls of tools; auto: as its chat template shows.  [default: auto]",
)
@click.option(
    "--reasoning-tags",
    default="auto",
    metavar="TAGS",
    help="The tags around the model's reasoning: auto, as its chat template shows; none; a name "
    f'({", ".join(TAGS)}); or the two tags, such as "<reason> </reason>".  [default: auto]',
)
@click.option(
    "--log-requests",
    type=click.Choice(["on", "off"]),
    default="on",
    help="A line for each request.  [default: on]",
)
@settings_options()
def serve(
    settings: Settings,
    http: str | None,
    api_key: str | None,
    log_requests: str,
    **door_options: Any,
) -> None:
    """Keep an engine running for others to connect to.

    It runs until Ctrl-C or pearl stop; pearl chat --connect and pearl generate --connect use it,
    and pearl ps lists it. Only this user's processes on this machine can reach it. Each client sets
    its own sampling and decoding.

    With --http it is also a server for every client of OpenAI's API, with the base URL
    http://HOST:PORT/v1. The sampling settings are then the defaults of requests, and the decoding
    settings hold for all requests.
    """
    door = None
    if http is None:
        _refuse_unread(click.get_current_context())
    else:
        settings.engine.check_options(settings.options)
        check_tags(door_options["reasoning_tags"])
        if not torchrun.rank():
            logs_requests = log_requests == "on"
            door = _bind(http, api_key or None, logs_requests=logs_requests, **door_options)
    with (
        closing(door) if door else nullcontext(),
        open_engine(settings.engine, SafeConsole(stderr=True)) as engine,
    ):
        say(f"serving in {engine.directory}; talk to it with pearl chat --connect")
        try:
            if door is None:
                engine.client.wait_until(lambda: False)  # raises once the target is lost
            else:
                say(f"OpenAI's API: {door.url}/v1")
                say(f"model {door.model_name(engine)}; a page to chat with it: {door.url}/")
                door.serve(engine, settings.options)
        except KeyboardInterrupt:
            click.echo("stopped", err=True)


def _refuse_unread(context: click.Context) -> None:
    """Raise `ConfigError` for a flag that only --http reads.

    An option of requests in a configuration file is no error, because other commands read that
    file too.
    """
    for option in context.command.params:
        name = option.name or ""
        source = context.get_parameter_source(name)
        is_flag = source is click.core.ParameterSource.COMMANDLINE
        if is_flag and name not in (*EngineConfig.model_fields, "config"):
            raise ConfigError(
                f"{option.opts[0]} goes with --http HOST:PORT: without it each client sets its own "
                "sampling and decoding, and there is nothing else to serve"
            )


def _bind(address: str, key: str | None, **options: Any) -> Door:
    """Call `pearl.server.listen.bind`. Raises `ConfigError` if the extra `server` is not installed."""
    try:
        from pearl.server.listen import bind
    except ImportError as error:
        raise ConfigError(f"--http needs the extra `server`: {installing('server')}") from error
    return bind(address, key, **options)
