"""Reads prompts from files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pearl.document import parse_json
from pearl.errors import ConfigError
from pearl.lab.distill.benchmarks import is_benchmark


def read_turns(path: Path, count: int | None = None) -> list[tuple[str, ...]]:
    """Return the user's turns of the first `count` conversations in a file, or of all without it.

    In a .jsonl file each line is an object with "prompt", "question" or "turns". An example is
    {"prompt": "What is gravity?"}. In any other file each line is a prompt. Raises `ConfigError` if
    the file cannot be read or has another format.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the prompts in {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read the prompts in {path}: it is no text in UTF-8") from None
    lines = [line for line in text.splitlines() if line.strip()][:count]
    if not lines:
        raise ConfigError(f"{path} holds no prompts")
    if path.suffix == ".jsonl":
        return [_turns(line, path, number) for number, line in enumerate(lines, 1)]
    return [(line,) for line in lines]


def _turns(line: str, path: Path, number: int) -> tuple[str, ...]:
    try:
        record: Any = parse_json(line)
        text = record.get("prompt") or record.get("question")
        turns = (text,) if text else tuple(record["turns"])
    except (ValueError, AttributeError, LookupError, TypeError):
        turns = ()
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise ConfigError(
            f'{path}, prompt {number}: not a JSON object with a text under "prompt", "question" or "turns"'
        )
    return turns


def training_prompts(paths: Iterable[str | Path]) -> list[str]:
    """Return the first turn of each conversation in these files.

    Raises `ConfigError` if a turn belongs to a benchmark, because training on it would make the
    benchmark's figures invalid.
    """
    prompts = []
    for path in paths:
        for turns in read_turns(Path(path)):
            prompt = turns[0]
            if is_benchmark(prompt):
                raise ConfigError(
                    f"{path}: this prompt is one of HumanEval, GSM8K or MT-bench, or close to one, and those are for "
                    f"testing only; take it out: {prompt[:100]!r}"
                )
            prompts.append(prompt)
    return prompts
