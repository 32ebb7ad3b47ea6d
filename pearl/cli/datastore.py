"""`pearl datastore`: build and inspect datastores. Arguments and output only; `pearl.drafting.corpus` builds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pearl.cli import listed
from pearl.cli.console import SafeConsole, say
from pearl.cli.distill import Bars
from pearl.drafting.datastore import HEADER, Datastore, Header, read_header
from pearl.errors import ModelError
from pearl.printable import printable
from pearl.text.stream import Tokenizer

_Command = TypeVar("_Command", bound=Callable[..., Any])
_DIRECTORY = click.Path(file_okay=False, path_type=Path)


def _file_options(command: _Command) -> _Command:
    """Add FILES, --field and --trust-remote-code to a command."""
    command = click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the tokenizer.")(command)
    command = click.option(
        "--field",
        "fields",
        multiple=True,
        metavar="NAME",
        help="Field of JSONL records to take (may be given several times). [default: text, or else all that are texts]",
    )(command)
    return click.argument("files", nargs=-1, required=True)(command)


@listed("Guess without a model", "pearl datastore build --tokenizer my-model --out code.ds src/ docs.jsonl")
@click.group()
def datastore() -> None:
    """Make datastores: texts that guesses come from, with no draft model.

    A datastore serves every model with the same tokenizer. Name it with --datastore DIR, for generate, chat, serve,
    bench and the library. FILES are text files, JSONL files (a document a line), or folders, of which all text files
    except hidden ones are read.
    """


@datastore.command()
@click.option(
    "--tokenizer", default="embedded", show_default=True, metavar="MODEL", help="Model whose tokens it holds."
)
@click.option("--out", required=True, type=_DIRECTORY, metavar="DIR", help="Directory to make.")
@_file_options
def build(tokenizer: str, out: Path, files: tuple[str, ...], fields: tuple[str, ...], trust_remote_code: bool) -> None:
    """Make a datastore out of FILES.

    A build that is killed leaves no datastore. Needs about 35 bytes of memory and 6 or 7 bytes of disk per token.
    """
    from pearl.drafting import corpus

    corpus.check_free(out)
    corpus.listed(files)  # report missing files before loading anything
    loaded = _tokenizer(tokenizer, trust_remote_code)
    with Bars(Console(stderr=True, highlight=False)) as bars:
        header = corpus.build(out, files, fields, tokenizer, loaded, bars)
    say(f"{out}: {_size_in_words(header)}")


@datastore.command()
@click.argument("directory", type=_DIRECTORY, metavar="DIR")
@click.option("--tokenizer", metavar="MODEL", help="Where the model whose tokens it holds is now, if it has moved.")
@_file_options
def add(
    directory: Path, tokenizer: str | None, files: tuple[str, ...], fields: tuple[str, ...], trust_remote_code: bool
) -> None:
    """Add FILES to the datastore in DIR.

    The result equals one build of all files, and takes as long to sort. Processes that have DIR open keep reading the
    old contents.
    """
    from pearl.drafting import corpus

    corpus.listed(files)
    loaded = _tokenizer(tokenizer or read_header(directory).tokenizer, trust_remote_code)
    with Bars(Console(stderr=True, highlight=False)) as bars:
        header = corpus.add(directory, files, fields, loaded, bars)
    say(f"{directory}: {_size_in_words(header)}")


@datastore.command()
@click.argument("directory", type=_DIRECTORY, metavar="DIR")
def info(directory: Path) -> None:
    """Show what DIR holds, and check all of it."""
    header = Datastore(directory, verified=True).header
    size = sum(path.stat().st_size for path in (directory / HEADER, *(path for path, _ in header.files(directory))))
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    rows = [
        ("format", f"{header.pearl_datastore}, whole"),
        ("tokenizer", f"{header.tokenizer}: {header.vocab_size:,} tokens, digest {header.digest}"),
        ("holds", _size_in_words(header)),
        ("on disk", f"{size / 1e6:,.1f} MB"),
    ]
    rows += [
        ("from", f"{each.name}: {each.documents:,} documents, {each.size / 1e6:,.1f} MB") for each in header.origins
    ]
    for name, value in rows:
        table.add_row(name, Text(printable(value)))
    SafeConsole().print(table)


def _size_in_words(header: Header) -> str:
    return f"{header.tokens - header.documents:,} tokens in {header.documents:,} documents"


def _tokenizer(spec: str, trust_remote_code: bool) -> Tokenizer:
    from pearl.models.tokenizers import load_tokenizer

    try:
        return load_tokenizer(spec, trust_remote_code=trust_remote_code, progress=say)[0]
    except ModelError as error:
        raise ModelError(f"{error} Name the model whose tokens the datastore holds: --tokenizer MODEL.") from error
