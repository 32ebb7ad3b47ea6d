"""The README says what the code does: its diagrams are the tables, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pearl.config import SECTIONS
from pearl.protocol.diagram import section
from pearl.protocol.window import METHODS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_diagrams_are_drawn_from_the_tables():
    shown = README.split("<!-- diagram -->")[1].split("<!-- /diagram -->")[0].strip()
    assert shown == section(), "README.md is stale: put in what `python -m pearl.protocol.diagram` prints"


def test_every_method_is_explained():
    assert set(re.findall(r"^\| `([a-z-]+)` \|", README, re.MULTILINE)) >= set(METHODS)


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"--[a-z][a-z-]+", README))))
def test_every_flag_named_is_a_flag(flag):
    known = {"--" + name.replace("_", "-") for s in SECTIONS for name in s.model_fields}
    others = {"--raw", "--json", "--config", "--help", "--dry-run", "--nproc-per-node", "--repeats"}
    assert flag in known | others


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)h][^)]*)\)", README))))
def test_every_link_leads_somewhere(path):
    assert (ROOT / path).exists()
