"""The command line: arguments and output only.

The engine and `pearl.lab` compute all figures and texts that are printed.
"""

import errno
import io
import os
import signal
import sys
from difflib import get_close_matches
from importlib import import_module

import click

from pearl.cli.commands import COMMANDS, SECTIONS
from pearl.errors import PearlError
from pearl.version import __version__

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
_OUTPUT_LOST = 4  # exit code
_INTERRUPTED = 130
# Raised if a command gets no arguments. Older versions of click lack it, and print the help.
_NO_ARGUMENTS = getattr(click.exceptions, "NoArgsIsHelpError", ())


class _Group(click.Group):
    """Lists the commands without importing them. A command is imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing:  # for the shell's completion
                return None
            nearest = get_close_matches(cmd_name, COMMANDS, n=1)
            hint = "".join(f" Did you mean {name!r}?" for name in nearest)
            raise click.UsageError(f"No such command {cmd_name!r}.{hint}", ctx)
        module, _, function = COMMANDS[cmd_name].place.partition(":")
        command = getattr(import_module(f"{__name__}.{module}"), function)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, commands in SECTIONS.items():
            rows = [(name, listing.summary) for name, listing in commands.items()]
            with formatter.section(section):
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

    Otherwise the next file or socket would get the file descriptor of a closed stream, and printed
    output would go to that file or socket. The new standard output is /dev/full: writing to it
    fails, so that lost output is reported.
    """
    for name, path, mode in (
        ("stdin", os.devnull, "r"),
        ("stdout", "/dev/full", "w"),
        ("stderr", os.devnull, "w"),
    ):
        if getattr(sys, name) is None:
            setattr(sys, name, open(path, mode))  # noqa: SIM115 - takes the lowest free descriptor, which is the stream's


def _escape_unencodable() -> None:
    """Make the output streams write an escape, rather than raise, for a character that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _end(number: int, _: object) -> None:
    """End the command in an orderly way: its engine is closed, and a hidden cursor is shown again."""
    sys.exit(128 + number)


def _explained(error: click.ClickException) -> str:
    """Return what is wrong with the arguments, and which help to read.

    For a command that was given no arguments but needs some, return its help.
    """
    text = error.format_message()
    if isinstance(error, _NO_ARGUMENTS):
        return text
    command = "pearl"
    if isinstance(error, click.UsageError) and error.ctx:
        command = error.ctx.command_path
    return f"error: {text}\n  See {command} --help."


def main() -> None:
    """Run the command line, and exit. A `PearlError` is printed in a line or two; its `exit_code` is the exit code.

    Other exit codes:
        130: Ctrl-C.
        143: SIGTERM.
        1: a broken pipe (click's own code).
        4: output cannot be written, because the disk is full or standard output is closed.
    """
    was_closed = sys.stdout is None
    is_lost = False
    text = ""
    _open_closed_streams()
    _escape_unencodable()
    signal.signal(signal.SIGTERM, _end)
    try:
        code = cli.main(standalone_mode=False)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in _WRITE_ERRORS or error.filename is not None:
            raise
        cause = "standard output is closed" if was_closed else error.strerror
        text = f"error: output is lost: {cause}"
        code = _OUTPUT_LOST
        is_lost = True
    except click.ClickException as error:
        text = _explained(error)
        code = error.exit_code
    except click.exceptions.Abort:
        text = "interrupted"
        code = _INTERRUPTED
    except PearlError as error:
        text = f"error: {error}"
        if error.advice:
            text += f"\n  {error.advice}"
        code = error.exit_code
    if text:
        from pearl.cli.console import say

        try:
            say(text)
        except OSError:
            is_lost = True
    if is_lost:
        os._exit(code)  # flushing the streams at exit would fail again, and change the exit code
    sys.exit(code if isinstance(code, int) else 0)
