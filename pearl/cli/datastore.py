"""`pearl datastore`: makes datastores, from which guesses come.

This file has arguments and output only; `pearl.drafting.datastore_build` builds the datastores.
"""

from pathlib import Path

import click

from pearl.cli.commands import example
from pearl.cli.console import Bars, say
from pearl.errors import ModelError

_DIRECTORY = click.Path(file_okay=False, path_type=Path)


@click.group(
    epilog=example("pearl datastore build --tokenizer my-model --out code.ds src/ docs.jsonl")
)
def datastore() -> None:
    """Make datastores: texts that guesses come from, with no draft model.

    A datastore serves every model with the same tokenizer. Commands such as generate, chat, serve
    and bench use it with --datastore DIR, the library with the setting datastore. FILES are text
    files, JSONL files with a document on each line, or folders. Of a folder all text files are
    read, except hidden ones.
    """


@datastore.command()
@click.option(
    "--tokenizer",
    default="embedded",
    show_default=True,
    metavar="MODEL",
    help="Model whose tokens it holds.",
)
@click.option("--out", required=True, type=_DIRECTORY, metavar="DIR", help="Directory to make.")
@click.argument("files", nargs=-1, required=True)
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the tokenizer.")
def build(tokenizer: str, out: Path, files: tuple[str, ...], trust_remote_code: bool) -> None:
    """Make a datastore out of FILES.

    A build that is killed leaves no datastore. It needs about 35 bytes of memory and 6 or 7 bytes
    of disk per token.
    """
    from pearl.drafting import datastore_build
    from pearl.models.checkpoints.tokenizers import load_tokenizer

    datastore_build.check_free(out)
    datastore_build.listed(files)  # report missing files before loading anything
    try:
        loaded = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code, progress=say)[0]
    except ModelError as error:
        raise ModelError(
            f"{error} Name the model whose tokens the datastore holds: --tokenizer MODEL."
        ) from error
    with Bars() as bars:
        header = datastore_build.build(out, files, tokenizer, loaded, bars)
    say(f"{out}: {header.tokens - header.documents:,} tokens in {header.documents:,} documents")
