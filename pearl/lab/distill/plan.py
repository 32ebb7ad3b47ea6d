"""What follows from the seed alone: generators for each place in a run, and on which answers each step learns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b

import torch

from pearl.lab.distill.config import DistillConfig

_SORTED = 64  # batches' worth of answers that are sorted by length together: little padding, and little order


def generator(seed: int, *place: object) -> torch.Generator:
    """A host generator for one place in a run ("round-003-001", "answers"), whatever was drawn elsewhere."""
    key = blake2b("/".join(map(str, (seed, *place))).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)


def plan(config: DistillConfig, round: int, lengths: Sequence[int], fresh: int) -> list[list[int]]:
    """The batches of a round, as numbers of answers.

    Those of this round, the last `fresh` of all, are there once, and all answers so far, drawn without repetition as
    long as there are any, make up the other passes.

    Args:
        lengths: tokens of each answer with its prompt.
    """
    draw = random.Random(f"{config.seed}/{round}/plan")
    chosen = list(range(len(lengths) - fresh, len(lengths)))
    wanted = fresh * config.passes
    while len(chosen) < wanted:
        every = list(range(len(lengths)))
        draw.shuffle(every)
        chosen += every[: wanted - len(chosen)]
    draw.shuffle(chosen)
    together = max(1, _SORTED * config.batch_tokens * len(chosen) // max(1, sum(lengths[i] for i in chosen)))
    batches: list[list[int]] = []
    for start in range(0, len(chosen), together):
        batches += _packed(sorted(chosen[start : start + together], key=lambda i: lengths[i]), lengths, config)
    draw.shuffle(batches)
    return batches


def _packed(sorted_numbers: list[int], lengths: Sequence[int], config: DistillConfig) -> list[list[int]]:
    batches: list[list[int]] = []
    for number in sorted_numbers:
        if batches and (len(batches[-1]) + 1) * lengths[number] <= config.batch_tokens:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


def rate(config: DistillConfig, progress: float) -> float:
    """The learning rate as a share of the highest: up, level, and down along a line to a hundredth.

    Source: "Scaling laws and compute-optimal training beyond fixed training durations", Hägele et al. 2024.
    """
    rising = progress / config.warmup if config.warmup else 1.0
    falling = (1 - progress) / config.decay if config.decay else 1.0
    return max(0.01, min(1.0, rising, falling))
