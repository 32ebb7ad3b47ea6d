"""The command line. Arguments and output only: what it prints it has from the engine."""

from __future__ import annotations

import io
import sys

import click

from pearl.cli.chat import chat
from pearl.cli.distill import distill
from pearl.cli.evaluate import evaluate_draft
from pearl.cli.generate import generate
from pearl.cli.keys import keys
from pearl.cli.serve import serve
from pearl.cli.simulate import simulate
from pearl.cli.terminal import say
from pearl.cli.trace import trace
from pearl.errors import PearlError
from pearl.version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="pearl")
def cli() -> None:
    """PEARL: parallel speculative decoding. Two processes, one text."""


cli.add_command(chat)
cli.add_command(distill)
cli.add_command(evaluate_draft)
cli.add_command(generate)
cli.add_command(keys)
cli.add_command(serve)
cli.add_command(simulate)
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
