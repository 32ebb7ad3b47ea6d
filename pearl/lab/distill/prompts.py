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

    from pearl.lab.distill.answers import RecordedAnswer
    from pearl.lab.distill.config import DistillConfig
    from pearl.lab.distill.pair import Teacher

_TEMPERATURE = 1.0  # of sampling invented prompts
_TOP = 64  # likeliest tokens that they are sampled from
_PLAIN = 0.3  # share of invented prompts without an opening
_TURNS_PER_PROMPT = 1.15  # invented: some are empty, duplicates or benchmark prompts


def read_turns(path: Path, count: int | None = None) -> list[tuple[str, ...]]:
    """Return the user's turns of the first `count` prompts of a file.

    A .jsonl file has an object with "prompt", "question" or "turns" on each line, as in {"prompt": "What is gravity?"};
    any other file a prompt on each line. Raises `ConfigError`.
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


def training_prompts(paths: Sequence[Path]) -> list[str]:
    """Return all prompts of some files.

    Raises `ConfigError` if one belongs to a benchmark: its figures would be invalid.
    """
    from pearl.lab.distill.benchmarks import is_benchmark

    prompts = []
    for path in paths:
        for prompt, *_ in read_turns(path):
            if is_benchmark(prompt):
                raise ConfigError(
                    f"{path}: this prompt is one of HumanEval, GSM8K or MT-bench, or close to one, and those are for "
                    f"testing only; take it out: {prompt[:100]!r}"
                )
            prompts.append(prompt)
    return prompts


def attempts(count: int) -> int:
    """Return the number of turns to invent to get `count` usable prompts."""
    return int(count * _TURNS_PER_PROMPT) + 1


def invent(
    teacher: Teacher,
    count: int,
    config: DistillConfig,
    generator: torch.Generator,
    tick: Callable[[int], object],
) -> list[str]:
    """Let the target invent `count` prompts, or a few fewer: it continues openings of the configuration.

    Leaves out benchmark prompts, which the target may have memorised. `tick`: see `answer`.

    Raises `ConfigError` without openings for a target without a chat template.
    """
    import torch

    from pearl.lab.distill.answers import answer, batched
    from pearl.lab.distill.benchmarks import is_benchmark

    openings = config.openings
    has_template = bool(teacher.encode_start(""))
    if not openings and not has_template:
        raise ConfigError(
            f"{teacher.name!r} has no chat template: give openings for its prompts, or prompts"
        )
    draw = random.Random(int(torch.randint(2**62, (), generator=generator)))
    starts = []
    for _ in range(attempts(count)):
        is_plain = has_template and (not openings or draw.random() < _PLAIN)
        starts.append("" if is_plain else draw.choice(openings))
    encoded = [teacher.encode_start(start) for start in starts]
    turns: list[RecordedAnswer] = []
    for batch in batched(encoded, config.answer_batch):
        turns += answer(
            teacher.model,
            batch,
            limit=config.max_prompt_tokens,
            eos=teacher.eos,
            temperatures=(_TEMPERATURE,),
            top=_TOP,
            generator=generator,
            tick=tick,
        )
    prompts: dict[str, None] = {}
    for start, turn in zip(starts, turns, strict=True):
        prompt = start + teacher.tokenizer.decode(turn.tokens)
        if prompt.strip() and not is_benchmark(prompt):
            prompts[prompt] = None
    return list(prompts)[:count]
