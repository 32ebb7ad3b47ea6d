"""Schedules of a run, which depend only on seed and position: generators, batches, the learning rate."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b

import torch

from pearl.lab.distill.config import DistillConfig

_BATCHES_PER_SORT = 64  # answers are sorted by length within groups of so many batches: little padding, mostly random


def generator(seed: int, *place: object) -> torch.Generator:
    """A host generator for one place in a run, such as ("round-003-001", "answers"), independent of all others."""
    key = blake2b("/".join(map(str, (seed, *place))).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)


def plan(config: DistillConfig, round: int, lengths: Sequence[int], fresh: int) -> list[list[int]]:
    """The batches of a round, as indices of answers.

    Contains each answer of this round once, and then random answers of all rounds, in whole shuffled passes as far as
    they fit, up to fresh * config.passes in all.

    Args:
        lengths: tokens of each answer with its prompt, in the order of the rounds.
        fresh: number of answers of this round, which come last.
    """
    draw = random.Random(f"{config.seed}/{round}/plan")
    chosen = list(range(len(lengths) - fresh, len(lengths)))
    wanted = fresh * config.passes
    while len(chosen) < wanted:
        every = list(range(len(lengths)))
        draw.shuffle(every)
        chosen += every[: wanted - len(chosen)]
    draw.shuffle(chosen)
    together = max(1, _BATCHES_PER_SORT * config.batch_tokens * len(chosen) // max(1, sum(lengths[i] for i in chosen)))
    batches: list[list[int]] = []
    for start in range(0, len(chosen), together):
        batches += _pack(sorted(chosen[start : start + together], key=lambda i: lengths[i]), lengths, config)
    draw.shuffle(batches)
    return batches


def _pack(sorted_numbers: list[int], lengths: Sequence[int], config: DistillConfig) -> list[list[int]]:
    """Fill batches in order, each up to config.batch_tokens tokens with padding."""
    batches: list[list[int]] = []
    for number in sorted_numbers:
        if batches and (len(batches[-1]) + 1) * lengths[number] <= config.batch_tokens:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


def rate(config: DistillConfig, progress: float) -> float:
    """The learning rate as a share of the highest: a linear rise, a plateau, and a linear fall to a hundredth.

    Args:
        progress: share of the run that is done, in [0, 1].

    Source: "Scaling laws and compute-optimal training beyond fixed training durations", Hägele et al. 2024.
    """
    rising = progress / config.warmup if config.warmup else 1.0
    falling = (1 - progress) / config.decay if config.decay else 1.0
    return max(0.01, min(1.0, rising, falling))
