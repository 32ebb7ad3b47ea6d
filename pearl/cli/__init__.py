"""The command line: arguments and output only. The engine and `pearl.lab` compute what it prints."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from difflib import get_close_matches

import click

from pearl.errors import PearlError
from pearl.version import __version__

# Section -> command -> (module:function, the first line of its docstring; a test compares the two; an example).  A
# command is imported only when it is used: some need torch, which takes seconds to import.
_SECTIONS: dict[str, dict[str, tuple[str, str, str]]] = {
    "Use it": {
        "generate": (
            "generate:generate",
            "Generate one text from a prompt.",
            'pearl generate "Explain the tides to a child." --temperature 0 --max-tokens 100',
        ),
        "chat": (
            "chat:chat",
            "Talk with the model.",
            "pearl chat --target my-model --draft my-small-model --show-draft",
        ),
        "serve": (
            "serve:serve",
            "Keep an engine running for others to connect to.",
            "pearl serve --target my-model --draft my-small-model",
        ),
        "ps": (
            "engines:ps",
            "List your engines on this machine.",
            "pearl ps",
        ),
        "stop": (
            "engines:stop",
            "Stop an engine of yours on this machine.",
            "pearl stop 4242",
        ),
        "keys": (
            "keys:keys",
            "Make the keys that secure a control channel between two hosts.",
            "pearl keys pearl.keys",
        ),
    },
    "Guess without a model": {
        "datastore": (
            "datastore:datastore",
            "Make datastores: texts that guesses come from, with no draft model.",
            "pearl datastore build --tokenizer my-model --out code.ds src/ docs.jsonl",
        ),
    },
    "See and check": {
        "trace": (
            "trace:trace",
            "Report, compare, draw or replay what --trace FILE has recorded.",
            "pearl trace compare sd.json pearl.json --png both.png",
        ),
        "check": (
            "exactness:check_bits",
            "Compare logits and texts of all methods bit for bit.",
            "pearl check --target my-model --draft my-small-model",
        ),
    },
    "Measure": {
        "calibrate": (
            "calibrate:calibrate_pair",
            "Measure a pair on this machine: which method to use.",
            "pearl calibrate --target my-model --draft my-small-model",
        ),
        "bench": (
            "bench:bench",
            "All methods side by side on the same prompts.",
            'pearl bench --prompts summaries --limit 5 --rows auto --rows "ar, all devices"',
        ),
        "compare": (
            "compare:compare",
            "Methods, rules and stop policies of your choice, in one table.",
            "pearl compare sd pearl,rule=coupled pearl,rule=opt,epsilon=0.1 --temperature 1",
        ),
        "simulate": (
            "simulate:simulate",
            "All methods side by side in virtual time, without a model.",
            "pearl simulate --t-draft 10 --t-target 1:50,8:60 --acceptance 0.7",
        ),
    },
    "Make a draft": {
        "distill": (
            "distill:distill",
            "Make a draft for a target, out of the target's own answers.",
            "pearl distill --target my-model --out my-draft",
        ),
        "disco": (
            "recorded:disco",
            "Train the classifier that tells a draft where to stop.",
            "pearl disco train texts.npz --out pair.disco",
        ),
        "evaluate-draft": (
            "distill:evaluate_draft",
            "How often the target would accept what a draft guesses.",
            "pearl evaluate-draft my-draft/draft prompts.jsonl --target my-model",
        ),
    },
}
_COMMANDS = {name: each for section in _SECTIONS.values() for name, each in section.items()}
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


class _Group(click.Group):
    """Lists the commands without importing them; imports one when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        place, _, example = _COMMANDS[cmd_name]
        module, _, name = place.partition(":")
        command = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        assert isinstance(command, click.Command)
        command.epilog = f"Example:\n\n\b\n  {example}"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        near = [] if args[0] in _COMMANDS else get_close_matches(args[0], _COMMANDS, n=1)
        if near:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, commands in _SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name, line) for name, (_, line, _) in commands.items()])


@click.group(
    cls=_Group,
    epilog=_EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="pearl")
def cli() -> None:
    """PEARL: parallel speculative decoding. Two processes, one text."""


def _open_closed_streams() -> bool:
    """Open the standard streams that the parent process has closed. Return whether standard output was closed.

    Otherwise the next file or socket would get that file descriptor and receive what is printed. Writing to the new
    standard output fails (/dev/full), so that lost output is reported.
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


def _redirect_to_null(number: int) -> None:
    """Send what is still buffered for this file descriptor to /dev/null: flushing it at exit would fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


def _say_if_possible(text: str) -> None:
    """Print to standard error. If that fails, only the exit code is left to report the error."""
    from pearl.cli.console import say

    try:
        say(text)
    except OSError:
        _redirect_to_null(2)


def main() -> None:
    """Entry point. Prints a `PearlError` in a line or two and exits with its code.

    Other exit codes: 130 for Ctrl-C, 143 for SIGTERM where a command ends in order by it, 1 for a broken pipe (click's
    own), 4 if output cannot be written because the disk is full or standard output is closed.
    """
    closed = _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what its encoding lacks becomes an escape, not a traceback
            stream.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(standalone_mode=False)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in _WRITE_ERRORS or error.filename is not None:
            raise
        _say_if_possible(f"error: output is lost: {'standard output is closed' if closed else error.strerror}")
        _redirect_to_null(1)
        code = 4
    except click.ClickException as error:
        shown = io.StringIO()  # may quote arguments with control characters: print it through `say`
        error.show(shown)
        _say_if_possible(shown.getvalue().rstrip("\n"))
        code = error.exit_code
    except click.exceptions.Abort:
        _say_if_possible("interrupted")
        code = 130
    except PearlError as error:
        _say_if_possible(f"error: {error}" + (f"\n  {error.advice}" if error.advice else ""))
        code = error.exit_code
    sys.exit(code if isinstance(code, int) else 0)
