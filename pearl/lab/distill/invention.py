"""Lets the target invent prompts: the target continues the start of a user's turn."""

from __future__ import annotations

import random

import torch

from pearl.cache import Watcher
from pearl.errors import ConfigError
from pearl.lab.distill.answers import RecordedAnswer, answer
from pearl.lab.distill.benchmarks import is_benchmark
from pearl.lab.distill.config import DistillConfig
from pearl.lab.distill.pair import Teacher

_TEMPERATURE = 1.0  # for sampling invented prompts
_TOP = 64  # top-k with which prompts are sampled
_PLAIN = 0.3  # share of prompts that the target invents from the first word on, without an opening
_TURNS_PER_PROMPT = 1.15  # above 1, as some turns are empty, duplicates or benchmark prompts


def invent(
    teacher: Teacher,
    count: int,
    config: DistillConfig,
    generator: torch.Generator,
    watcher: Watcher,
    label: str,
) -> list[str]:
    """Let the target invent `count` prompts, or a few fewer.

    The target continues openings, which are the first words of a user's turn. If it has a chat
    template, it also invents some turns from the first word on. Benchmark prompts, which the target
    may have memorised, are left out.

    Args:
        label: the name of this work for the watcher.

    Raises `ConfigError` if there are no openings and the target has no chat template.
    """
    openings = config.openings
    has_template = bool(teacher.encode_start(""))
    if not openings and not has_template:
        raise ConfigError(
            f"{teacher.name!r} has no chat template: give openings for its prompts, or prompts"
        )
    draw = random.Random(int(torch.randint(2**62, (), generator=generator)))
    starts = []
    for _ in range(int(count * _TURNS_PER_PROMPT) + 1):
        if has_template and (not openings or draw.random() < _PLAIN):
            starts.append("")
        else:
            starts.append(draw.choice(openings))
    watcher.begin(label, len(starts))
    turns: list[RecordedAnswer] = []
    for offset in range(0, len(starts), config.answer_batch):
        batch = starts[offset : offset + config.answer_batch]
        turns += answer(
            teacher.model,
            list(map(teacher.encode_start, batch)),
            limit=config.max_prompt_tokens,
            eos=teacher.eos,
            temperatures=(_TEMPERATURE,),
            top=_TOP,
            generator=generator,
            tick=watcher.advance,
        )
    prompts: dict[str, None] = {}
    for start, turn in zip(starts, turns, strict=True):
        prompt = start + teacher.tokenizer.decode(turn.tokens)
        if prompt.strip() and not is_benchmark(prompt):
            prompts[prompt] = None
    return list(prompts)[:count]
