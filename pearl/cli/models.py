"""`pearl list`, `pearl pull`, `pearl show` and `pearl rm`: models on this machine's disk. Arguments and output only."""

from __future__ import annotations

import json
import sys
from datetime import datetime

import click

from pearl.cli.commands import example
from pearl.cli.console import print_table, say
from pearl.device import has_gpu
from pearl.errors import ConfigError
from pearl.printable import printable

_JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of a table."
)
_WORDS = {"None": "-", "True": "yes", "False": "no"}
_MODEL = click.argument("model")


@click.command("list", epilog=example("pearl list"))
@_JSON
def list_models(as_json: bool) -> None:
    """List the models on this machine's disk.

    Those in the hub's cache, and the embedded pair. forward: by the model's family; pearl show is exact.
    """
    from pearl.models.checkpoints.hub import size_text
    from pearl.models.checkpoints.stored import stored

    found = stored()
    if as_json:
        click.echo(json.dumps([each._asdict() for each in found], indent=2))
        return
    days = (f"{datetime.fromtimestamp(each.used):%Y-%m-%d}" for each in found)
    rows = (
        (one.name, size_text(one.size), day, *one[4:]) for one, day in zip(found, days, strict=True)
    )
    print_table(("name", "size", "last used", "weights", "forward"), rows)
    say(
        f"{len(found)} model{'s' * (len(found) != 1)}, {size_text(sum(each.size for each in found))}"
    )


@click.command(epilog=example("pearl pull Qwen/Qwen3-0.6B"))
@_MODEL
def pull(model: str) -> None:
    """Download a model from the hub into its cache.

    MODEL is ID, ID@REVISION, or ID:FILE for a GGUF file, where a part of its name is enough: Q4_K_M. Takes only the
    files that are loaded, and prints their path.
    """
    from pearl.models.checkpoints import hub

    click.echo(hub.pull(model, say))


@click.command(epilog=example("pearl show Qwen/Qwen3-0.6B"))
@_MODEL
@_JSON
def show(model: str, as_json: bool) -> None:
    """Show what a model is, and how it would run here.

    MODEL is a directory, a GGUF file, embedded, or a name in the caches. Loads no weights.
    """
    from pearl.models.cpu.meta_device import postpone_kernels

    if not has_gpu():
        postpone_kernels()
    from pearl.models.checkpoints.description import describe

    about = describe(model, say)
    if as_json:
        click.echo(json.dumps(about, indent=2))
        return
    for name, value in about.items():
        text = f"{value:,}" if type(value) is int else _WORDS.get(str(value), str(value))
        click.echo(f"{name.replace('_', ' '):14} {printable(text)}")


@click.command(epilog=example("pearl rm Qwen/Qwen3-0.6B"))
@_MODEL
@click.option("--yes", is_flag=True, help="Do not ask.")
def rm(model: str, yes: bool) -> None:
    """Remove a model from the caches.

    MODEL is ID, ID@REVISION, or another name of pearl list.
    """
    from pearl.models.checkpoints.hub import size_text
    from pearl.models.checkpoints.stored import removal

    size, remove = removal(model)
    if not yes and not sys.stdin.isatty():
        raise ConfigError(
            f"this would free {size_text(size)}: give --yes where nobody can be asked"
        )
    if not yes:
        click.confirm(f"remove {model}, {size_text(size)}?", abort=True, err=True)
    remove()
    say(f"removed {model}: {size_text(size)} are free")
