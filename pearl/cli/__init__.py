"""The command line. Arguments and output only: what it prints it has from the engine."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys

import click

from pearl.errors import PearlError
from pearl.version import __version__

# Section -> command -> where it is, what it does in a line (its own first one; a test compares them).  A command is
# imported when it is asked for: some need torch, whose import takes seconds.
_SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Use it": {
        "generate": ("generate:generate", "Generate one text from a prompt."),
        "chat": ("chat:chat", "Talk with the model."),
        "serve": ("serve:serve", "Keep an engine running for others to connect to."),
        "keys": ("keys:keys", "Make the keys that secure a control channel between two hosts."),
    },
    "See and check": {
        "trace": ("trace:trace", "Report, compare, draw or replay what --trace FILE has recorded."),
        "check": ("exactness:check_bits", "Compare logits and texts of all methods bit for bit."),
    },
    "Measure": {
        "calibrate": ("calibrate:calibrate_pair", "Measure a pair on this machine: which method to use."),
        "bench": ("bench:bench", "All methods side by side on the same prompts."),
        "simulate": ("simulate:simulate", "All methods side by side in virtual time, without a model."),
    },
    "Make a draft": {
        "distill": ("distill:distill", "Make a draft for a target, out of the target's own answers."),
        "evaluate-draft": ("evaluate:evaluate_draft", "How often the target would accept what a draft guesses."),
    },
}
_COMMANDS = {name: each for section in _SECTIONS.values() for name, each in section.items()}
_EXAMPLES = """
Examples:

\b
  pearl generate "Explain the tides to a child."
  pearl chat --target my-model --draft my-small-model
  pearl calibrate --target my-model --draft my-small-model
  pearl generate "Hello" --trace run.json && pearl trace show run.json

Shell completion, for bash (zsh and fish likewise):

\b
  eval "$(_PEARL_COMPLETE=bash_source pearl)"
"""

_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)  # of a write


class _Group(click.Group):
    """Knows its commands by name, and imports one when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, commands in _SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name, line) for name, (_, line) in commands.items()])


@click.group(
    cls=_Group,
    epilog=_EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="pearl")
def cli() -> None:
    """PEARL: parallel speculative decoding. Two processes, one text."""


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
    from pearl.cli.terminal import say

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
