"""The command line. Arguments and output only: what it prints it has from the engine."""

from __future__ import annotations

import importlib
import io
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


def main() -> None:
    """Entry point: an error on purpose is told in a line or two; Ctrl-C is 130, a broken pipe click's own 1."""
    try:
        code = cli.main(standalone_mode=False)
    except click.ClickException as error:
        shown = io.StringIO()  # usage and all, which may quote what somebody else has put into a script
        error.show(shown)
        say(shown.getvalue().rstrip("\n"))
        code = error.exit_code
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        code = 130
    except PearlError as error:
        say(f"error: {error}" + (f"\n  {error.advice}" if error.advice else ""))
        code = error.exit_code
    sys.exit(code if isinstance(code, int) else 0)
