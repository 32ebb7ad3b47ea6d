"""The README says what the code does: its diagrams are the tables, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from pearl import errors
from pearl.cli import cli
from pearl.decoding.registry import markdown_table
from pearl.errors import PearlError
from pearl.protocol.diagram import section
from pearl.protocol.window import METHODS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_diagrams_are_drawn_from_the_tables():
    shown = README.split("<!-- diagram -->")[1].split("<!-- /diagram -->")[0].strip()
    assert shown == section(), "README.md is stale: put in what `python -m pearl.protocol.diagram` prints"


def test_the_rules_are_listed_from_their_registry():
    shown = README.split("<!-- rules -->")[1].split("<!-- /rules -->")[0].strip()
    assert shown == markdown_table(), "README.md is stale: put in what pearl.decoding.registry.markdown_table() returns"


def test_every_method_is_explained():
    assert set(re.findall(r"^\| `([a-z-]+)` \|", README, re.MULTILINE)) >= set(METHODS)


def flags(command: click.Command) -> set[str]:
    """Of a command and all those below it."""
    context = click.Context(command)
    names = command.list_commands(context) if isinstance(command, click.Group) else []
    below = [command.get_command(context, name) for name in names]
    own = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*(flags(one) for one in below))


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"--[a-z][a-z-]+", README))))
def test_every_flag_named_is_a_flag(flag):
    others = {
        "--help",
        "--dry-run",
        "--nproc-per-node",
        "--repeats",
        "--model",
        "--most-stolen",
        "--other-repeats",
    }  # not the command line's
    assert flag in flags(cli) | others


ERRORS = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, PearlError)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_every_error_is_listed_with_its_exit_code(error):
    assert re.search(rf"(?m)^\| {error.exit_code} \| .*`{error.__name__}`", README)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)h][^)]*)\)", README))))
def test_every_link_leads_somewhere(path):
    assert (ROOT / path).exists()
