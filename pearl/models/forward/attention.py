"""Attention on every device: how positions are scored, and the blocks in which they are read."""

from typing import NamedTuple

import torch

BLOCK = 128  # positions of a block
_SERIAL = 16384  # elements; torch splits operations on twice as many between threads


class Heads(NamedTuple):
    """Number of query heads, number of key-value heads, and dimensions of a head."""

    query: int
    kv: int
    dim: int


class Scoring(NamedTuple):
    """How a model scores positions.

    Attributes:
        windows: for each layer, how many positions a token sees, its own included; 0: all up to its
            own.
        scale: the multiplier of a query's product with a key.
        cap: see `cap_scores`.
        sinks: for each layer [heads], a score that takes part in the head's softmax but has no value; empty: none.
    """

    windows: tuple[int, ...]
    scale: float
    cap: float
    sinks: tuple[torch.Tensor, ...] = ()

    def sinks_of(self, layer: int) -> torch.Tensor | None:
        if self.sinks:
            return self.sinks[layer]
        return None


def plan_no_shapes(device: torch.device) -> None:
    """Turn cuDNN's attention off in this process, if `device` is a GPU.

    torch 2.13 prefers it on Hopper GPUs, where it takes 42 to 440 ms to plan for every new length. Every
    prompt, and every decoding step of a forward that is not recorded, has a new length.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def whole_blocks(end: int) -> int:
    """Return the number of positions in the blocks that hold the first `end` positions."""
    return -(-end // BLOCK) * BLOCK


def cap_scores(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Compute cap * tanh(scores / cap) in place; a cap of 0 leaves the scores as they are.

    On a CPU the scores must be of whole blocks of positions. They are computed in pieces that torch
    does not split between threads, so that vector instructions compute all elements.
    """
    if not cap:
        return scores
    if not scores.is_cpu:
        return scores.div_(cap).tanh_().mul_(cap)
    for piece in scores.view(-1).split(_SERIAL):
        piece.div_(cap).tanh_().mul_(cap)
    return scores
