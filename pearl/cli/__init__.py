"""The command line. Arguments and output only: what it prints it has from the engine."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys

import click

from pearl.cli.chat import chat
from pearl.cli.generate import generate
from pearl.cli.keys import keys
from pearl.cli.serve import serve
from pearl.cli.terminal import say
from pearl.cli.trace import trace
from pearl.errors import PearlError
from pearl.version import __version__

# These need torch, whose import takes seconds; the others speak to an engine without it.
_HEAVY = {
    "calibrate": "pearl.cli.calibrate:calibrate_pair",
    "bench": "pearl.cli.bench:bench",
    "check": "pearl.cli.exactness:check_bits",
    "distill": "pearl.cli.distill:distill",
    "evaluate-draft": "pearl.cli.evaluate:evaluate_draft",
    "simulate": "pearl.cli.simulate:simulate",
}


_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)  # of a write


class _Group(click.Group):
    """Imports a heavy command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_HEAVY])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _HEAVY:
            return super().get_command(ctx, cmd_name)
        module, _, name = _HEAVY[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="pearl")
def cli() -> None:
    """PEARL: parallel speculative decoding. Two processes, one text."""


cli.add_command(chat)
cli.add_command(generate)
cli.add_command(keys)
cli.add_command(serve)
cli.add_command(trace)


def _open_what_is_closed() -> bool:
    """Standard streams that whoever started us has closed; whether standard output was one.

    Else the next file or socket gets its number, and what is printed goes there, or is lost without a word.
    """
    closed = sys.stdout is None
    for number, name, path, mode in (
        (0, "stdin", os.devnull, os.O_RDONLY),
        (1, "stdout", "/dev/full", os.O_WRONLY),
        (2, "stderr", os.devnull, os.O_WRONLY),
    ):
        if getattr(sys, name) is None:
            opened = os.open(path, mode)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
    return closed


def _discard(number: int) -> None:
    """What is still to be written there: at the interpreter's end it would fail once more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


def _tell(text: str) -> None:
    """To standard error, should it take it; else the exit code must do."""
    try:
        say(text)
    except OSError:
        _discard(2)


def main() -> None:
    """Entry point: an error on purpose is told in a line or two; Ctrl-C is 130, a broken pipe click's own 1.

    Output that cannot be written, for there is no room or nobody has opened it, is an error too: 4.
    """
    closed = _open_what_is_closed()
    try:
        code = cli.main(standalone_mode=False)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in _LOST or error.filename is not None:
            raise
        _tell(f"error: output is lost: {'standard output is closed' if closed else error.strerror}")
        _discard(1)
        code = 4
    except click.ClickException as error:
        shown = io.StringIO()  # usage and all, which may quote what somebody else has put into a script
        error.show(shown)
        _tell(shown.getvalue().rstrip("\n"))
        code = error.exit_code
    except click.exceptions.Abort:
        _tell("interrupted")
        code = 130
    except PearlError as error:
        _tell(f"error: {error}" + (f"\n  {error.advice}" if error.advice else ""))
        code = error.exit_code
    sys.exit(code if isinstance(code, int) else 0)
