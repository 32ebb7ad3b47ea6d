"""`pearl list`, `pearl pull`, `pearl show` and `pearl rm`: models on this machine's disk.

This file has arguments and output only.
"""

import json
import sys
from datetime import datetime
from typing import TYPE_CHECKING

import click

from pearl.cli.commands import example
from pearl.cli.console import Column, print_columns, say
from pearl.device import has_gpu
from pearl.errors import ConfigError
from pearl.printable import printable

if TYPE_CHECKING:
    from pearl.models.checkpoints.stored import Stored

_JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of a table."
)
_WORDS = {"None": "-", "True": "yes", "False": "no"}
_MODEL = click.argument("model")


@click.command("list", epilog=example("pearl list"))
@_JSON
def list_models(as_json: bool) -> None:
    """List the models on this machine's disk.

    These are the models in the hub's cache, and the embedded pair. The column "forward" is inferred from the model's
    family; pearl show checks it.
    """
    from pearl.models.checkpoints.hub import size_text
    from pearl.models.checkpoints.stored import stored

    models = stored()
    if as_json:
        click.echo(json.dumps([model._asdict() for model in models], indent=2))
        return
    columns: list[Column[Stored]] = [
        ("name", lambda model: model.name),
        ("size", lambda model: size_text(model.size)),
        ("last used", lambda model: f"{datetime.fromtimestamp(model.used):%Y-%m-%d}"),
        ("weights", lambda model: model.weights),
        ("forward", lambda model: model.forward),
    ]
    print_columns(columns, models)
    count = "1 model" if len(models) == 1 else f"{len(models)} models"
    say(f"{count}, {size_text(sum(model.size for model in models))}")


@click.command(epilog=example("pearl pull Qwen/Qwen3-0.6B"))
@_MODEL
def pull(model: str) -> None:
    """Download a model from the hub into its cache.

    MODEL is ID, ID@REVISION, or ID:FILE for a GGUF file; a part of the file's name, such as Q4_K_M, is enough. The
    command downloads only the files that are needed, and prints their path.
    """
    from pearl.models.checkpoints import hub

    click.echo(hub.pull(model, say))


@click.command(epilog=example("pearl show Qwen/Qwen3-0.6B"))
@_MODEL
@_JSON
def show(model: str, as_json: bool) -> None:
    """Show what a model is, and how it would run here.

    MODEL is a directory, a GGUF file, embedded, or a name in the caches. The command loads no
    weights.
    """
    from pearl.models.cpu.meta_device import postpone_kernels

    if not has_gpu():
        postpone_kernels()
    from pearl.models.checkpoints.description import describe

    description = describe(model, say)
    if as_json:
        click.echo(json.dumps(description, indent=2))
        return
    for name, value in description.items():
        if type(value) is int:
            text = f"{value:,}"
        else:
            text = _WORDS.get(str(value), str(value))
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
