"""`pearl serve`: an engine that waits for fronts of the same user to attach."""

from __future__ import annotations

import signal
import sys

import click

from pearl.cli.launch import running
from pearl.cli.options import settings_options
from pearl.cli.terminal import SafeConsole, say
from pearl.config import Settings


@click.command()
@settings_options
def serve(settings: Settings) -> None:
    """Keep an engine running for others to connect to.

    It runs until Ctrl-C; pearl chat --connect and pearl generate --connect use it. Only this user's processes on this
    machine can reach it. Sampling and decoding are for who asks to choose.
    """
    with running(settings.engine, SafeConsole(stderr=True)) as engine:
        if engine is None:
            return
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        say(f"serving in {engine.directory}; talk to it with pearl chat --connect")
        try:
            engine.wait_until_lost()
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
