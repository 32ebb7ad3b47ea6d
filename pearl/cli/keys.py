"""`pearl keys`: make the key file with which two hosts authenticate each other."""

from __future__ import annotations

from pathlib import Path

import click

from pearl.cli import listed
from pearl.cli.console import say
from pearl.transport.keys import write_keys
from pearl.transport.zeromq import new_keys


@listed("Use it", "pearl keys pearl.keys")
@click.command()
@click.argument("file", type=click.Path(path_type=Path))
def keys(file: Path) -> None:
    """Make the keys that secure a control channel between two hosts.

    Everyone who can read FILE can use the engines that are started with it. An existing file is never overwritten.
    """
    write_keys(file, new_keys())
    say(f"{file}: copy it to the other host over a channel you trust (scp -p), and give --keys {file} on both")
