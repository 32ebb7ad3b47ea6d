"""Prompts: from files, and invented by the target, which continues the start of a user's turn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pearl.document import parse_json
from pearl.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from pearl.lab.distill.answers import Answer
    from pearl.lab.distill.config import DistillConfig
    from pearl.lab.distill.pair import Teacher

_TEMPERATURE, _TOP = 1.0, 64  # of sampling invented prompts, among the _TOP likeliest tokens
_PLAIN = 0.3  # share of invented prompts without an opening
_TURNS_PER_PROMPT = 1.15  # invented: some are empty, duplicates or benchmark prompts


def read_turns(path: Path, count: int | None = None) -> list[tuple[str, ...]]:
    """The user's turns of the first `count` prompts of a file.

    A .jsonl file has an object with "prompt", "question" or "turns" on each line; any other file a prompt on each line.
    Raises `ConfigError`.
    """
    try:
        lines = [
            line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()
        ][:count]
    except OSError as error:
        raise ConfigError(f"cannot read the prompts in {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read the prompts in {path}: it is no text in UTF-8") from None
    jsonl = path.suffix == ".jsonl"
    found = [_turns(line, path, i) if jsonl else (line,) for i, line in enumerate(lines, 1)]
    if not found:
        raise ConfigError(f"{path} holds no prompts")
    return found


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


def training_prompts(paths: Sequence[Path]) -> list[str]:
    """All prompts of some files. Raises `ConfigError` if one belongs to a benchmark: its figures would be invalid."""
    from pearl.lab.distill.benchmarks import is_benchmark

    found = [(text, path) for path in paths for text, *_ in read_turns(path)]
    for text, path in found:
        if is_benchmark(text):
            raise ConfigError(
                f"{path}: this prompt is one of HumanEval, GSM8K or MT-bench, or close to one, and those are for "
                f"testing only; take it out: {text[:100]!r}"
            )
    return [text for text, _ in found]


def attempts(count: int) -> int:
    """Number of turns to invent to get `count` usable prompts."""
    return int(count * _TURNS_PER_PROMPT) + 1


def invent(
    teacher: Teacher,
    count: int,
    config: DistillConfig,
    generator: torch.Generator,
    tick: Callable[[int], object],
) -> list[str]:
    """Let the target invent `count` prompts, or a few fewer: openings of the configuration, and what follows them.

    Leaves out benchmark prompts, which the target may have memorised. `tick`: see `answer`.

    Raises `ConfigError` without openings for a target without a chat template.
    """
    import torch

    from pearl.lab.distill.answers import answer, batched
    from pearl.lab.distill.benchmarks import is_benchmark

    bare, openings = bool(teacher.encode_start("")), config.openings
    if not openings and not bare:
        raise ConfigError(
            f"{teacher.name!r} has no chat template: give openings for its prompts, or prompts"
        )
    draw = random.Random(int(torch.randint(2**62, (), generator=generator)))
    starts = [
        "" if bare and (not openings or draw.random() < _PLAIN) else draw.choice(openings)
        for _ in range(attempts(count))
    ]
    turns: list[Answer] = []
    how: dict[str, Any] = {
        "eos": teacher.eos,
        "temperatures": (_TEMPERATURE,),
        "top": _TOP,
        "generator": generator,
    }
    for some in batched([teacher.encode_start(start) for start in starts], config.answer_batch):
        turns += answer(teacher.model, some, limit=config.max_prompt_tokens, tick=tick, **how)
    texts = (
        start + teacher.tokenizer.decode(turn.tokens)
        for start, turn in zip(starts, turns, strict=True)
    )
    return list(dict.fromkeys(text for text in texts if text.strip() and not is_benchmark(text)))[
        :count
    ]
