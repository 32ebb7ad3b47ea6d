"""The command line: arguments and output only. The engine and `pearl.lab` compute what it prints.

A command declares with `listed` where `pearl --help` shows it. That list is read from the sources, for importing a
command can take seconds.
"""

from __future__ import annotations

import ast
import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import click

from pearl.errors import PearlError
from pearl.version import __version__

_SECTIONS = ("Use it", "Guess without a model", "See and check", "Measure", "Make a draft")
_LISTED = re.compile(
    r'^@listed\((?P<declared>.*?)\)\n@.*?^def (?P<function>\w+)\(.*?^    """(?P<summary>.*?\.)(?=\s|""")',
    re.MULTILINE | re.DOTALL,
)
_EXAMPLES = """
Examples:

\b
  pearl generate "Explain the tides to a child."
  pearl chat --target my-model --draft my-small-model
  pearl calibrate --target my-model --draft my-small-model
  pearl generate "Hello" --trace run.json && pearl trace report run.json

Shell completion, for bash (zsh and fish likewise):

\b
  eval "$(_PEARL_COMPLETE=bash_source pearl)"
"""

_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)  # output is lost
_NO_ARGUMENTS = getattr(
    click.exceptions, "NoArgsIsHelpError", ()
)  # older versions of click print the help

_Command = TypeVar("_Command", bound=click.Command)


class _Listed(NamedTuple):
    section: str
    summary: str
    module: str
    function: str


def listed(section: str, example: str) -> Callable[[_Command], _Command]:
    """Show a command in this section of `pearl --help`, by the name in its example, which ends its own help."""

    def add(command: _Command) -> _Command:
        command.epilog = f"Example:\n\n\b\n  {example}"
        return command

    return add


@cache
def listed_commands() -> dict[str, _Listed]:
    """The commands by name, in the order of `pearl --help`, from the sources of this package."""
    found = []
    for path in Path(__file__).parent.glob("*.py"):
        for match in _LISTED.finditer(path.read_text(encoding="utf-8")):
            section, example = ast.literal_eval(f"({match['declared']})")
            place = _Listed(section, match["summary"], path.stem, match["function"])
            found.append((_SECTIONS.index(section), example.split()[1], place))
    return {name: place for _, name, place in sorted(found)}


class _Group(click.Group):
    """Lists the commands without importing them; imports one when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(listed_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = listed_commands().get(cmd_name)
        if place is None:
            return None
        command = getattr(importlib.import_module(f"{__name__}.{place.module}"), place.function)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            nearest = get_close_matches(args[0], listed_commands(), n=1)
            if not nearest:
                raise
            raise click.UsageError(f"{error.message} Did you mean {nearest[0]!r}?", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section in _SECTIONS:
            with formatter.section(section):
                rows = [
                    (name, each.summary)
                    for name, each in listed_commands().items()
                    if each.section == section
                ]
                formatter.write_dl(rows)


@click.group(
    cls=_Group,
    epilog=_EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="pearl")
def cli() -> None:
    """PEARL: parallel speculative decoding. Two processes, one text."""


def _open_closed_streams() -> None:
    """Open the standard streams that the parent process has closed.

    Otherwise the next file or socket would get that file descriptor and receive what is printed. Writing to the new
    standard output fails (/dev/full), so that lost output is reported.
    """
    for name, path, mode in (
        ("stdin", os.devnull, "r"),
        ("stdout", "/dev/full", "w"),
        ("stderr", os.devnull, "w"),
    ):
        if getattr(sys, name) is None:
            setattr(sys, name, open(path, mode))  # noqa: SIM115 - takes the lowest free descriptor, which is the stream's


def _explained(error: click.ClickException) -> str:
    """What is wrong with the arguments, and which help to read; for no arguments at all the help itself."""
    text = error.format_message()
    if isinstance(error, _NO_ARGUMENTS):
        return text
    where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "pearl"
    return f"error: {text}\n  See {where} --help."


def main() -> None:
    """Entry point. Prints a `PearlError` in a line or two and exits with its code.

    Other exit codes: 130 for Ctrl-C, 143 for SIGTERM where a command ends in order by it, 1 for a broken pipe (click's
    own), 4 if output cannot be written because the disk is full or standard output is closed.
    """
    text, closed, is_lost = "", sys.stdout is None, False
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # what its encoding lacks becomes an escape, not a traceback
            stream.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(standalone_mode=False)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in _WRITE_ERRORS or error.filename is not None:
            raise
        text = f"error: output is lost: {'standard output is closed' if closed else error.strerror}"
        code, is_lost = 4, True
    except click.ClickException as error:
        text, code = _explained(error), error.exit_code
    except click.exceptions.Abort:
        text, code = "interrupted", 130
    except PearlError as error:
        text, code = (
            f"error: {error}" + (f"\n  {error.advice}" if error.advice else ""),
            error.exit_code,
        )
    if text:
        from pearl.cli.console import say

        try:
            say(text)
        except OSError:
            is_lost = True
    if is_lost:
        os._exit(code)  # flushing the streams at exit would fail again, and change the exit code
    sys.exit(code if isinstance(code, int) else 0)
