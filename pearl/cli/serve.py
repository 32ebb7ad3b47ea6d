"""`pearl serve`: an engine for clients of the same user, and with --http for every client of OpenAI's API."""

from __future__ import annotations

import signal
import sys
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

import click

from pearl.cli import listed
from pearl.cli.console import SafeConsole, say
from pearl.cli.launch import running
from pearl.cli.options import SettingsCommand, settings_options
from pearl.config import Settings
from pearl.engine import torchrun
from pearl.errors import ConfigError
from pearl.extras import installing

if TYPE_CHECKING:
    from pearl.server.listen import Door

_QUEUE = 32


@listed("Use it", "pearl serve --target my-model --draft my-small-model")
@click.command(cls=SettingsCommand)
@click.option("--http", metavar="HOST:PORT", help="Also serve OpenAI's API at this address; port 0: a free one.")
@click.option(
    "--api-key",
    envvar="PEARL_API_KEY",
    metavar="KEY",
    help="Key that clients of --http must send; required beyond the loopback. $PEARL_API_KEY hides it from ps.",
)
@click.option(
    "--http-queue",
    type=click.IntRange(0, 256),
    default=None,
    help=f"Requests that may wait; more get an error with Retry-After.  [default: {_QUEUE}]",
)
@click.option("--http-model", metavar="NAME", help="The model's name for clients; default: the target's.")
@settings_options
def serve(
    settings: Settings, http: str | None, api_key: str | None, http_queue: int | None, http_model: str | None
) -> None:
    """Keep an engine running for others to connect to.

    It runs until Ctrl-C or pearl stop; pearl chat --connect and pearl generate --connect use it, and pearl ps lists it.
    Only this user's processes on this machine can reach it. Each client sets its own sampling and decoding.

    With --http it is also a server for every client of OpenAI's API, with the base URL http://HOST:PORT/v1. The
    sampling settings are defaults of its requests, the decoding settings hold for all of them.
    """
    if http is None and (http_queue is not None or http_model is not None):
        raise ConfigError("--http-queue and --http-model go with --http HOST:PORT")
    if http is not None:
        settings.engine.check_decoding(settings.decoding)
    door = None
    if http is not None and not torchrun.rank():
        door = _bind(http, api_key or None, _QUEUE if http_queue is None else http_queue, http_model)
    with closing(door) if door else nullcontext(), running(settings.engine, SafeConsole(stderr=True)) as engine:
        if engine is None:
            return
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        say(f"serving in {engine.directory}; talk to it with pearl chat --connect")
        try:
            if door is None:
                engine.wait_until_lost()
            else:
                say(f"OpenAI's API: {door.url}/v1")
                door.serve(engine, settings)
        except KeyboardInterrupt:
            click.echo("stopped", err=True)


def _bind(address: str, key: str | None, queue: int, model: str | None) -> Door:
    try:
        from pearl.server.listen import bind
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "h11", "prometheus_client"):
            raise
        raise ConfigError(f"--http needs the extra `server`: {installing('server')}") from None
    return bind(address, key, queue, model)
