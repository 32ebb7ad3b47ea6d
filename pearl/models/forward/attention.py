"""Attention on every device: how positions are scored, and the blocks in which they are read."""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 128  # positions
_SERIAL = 16384  # elements: torch splits operations of twice as many between threads


class Heads(NamedTuple):
    """Number of query heads, number of key-value heads, and dimensions of a head."""

    query: int
    kv: int
    dim: int


class Scoring(NamedTuple):
    """How a model scores positions.

    Attributes:
        windows: how many positions a token of each layer sees, its own included; 0: all earlier ones.
        scale: the multiplier of a query's product with a key.
        cap: see `cap_scores`.
        sinks: [heads] of each layer, a further score of each head, without a value; empty: none.
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
    """Turn cuDNN's attention off in this process, where `device` is a GPU.

    torch 2.13 prefers it on Hopper, where it plans for every new length, in 42 to 440 ms: every
    prompt, and every step of a forward that is not recorded, has another length.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def whole_blocks(end: int) -> int:
    """Return the number of positions in the blocks that hold the first `end` positions."""
    return -(-end // BLOCK) * BLOCK


def cap_scores(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Compute cap * tanh(scores / cap) in place; a cap of 0 leaves the scores as they are.

    On a CPU scores are of whole blocks of positions, and computed in pieces that torch does not split
    between threads: all elements are then part of a vector.
    """
    if not cap:
        return scores
    if not scores.is_cpu:
        return scores.div_(cap).tanh_().mul_(cap)
    for piece in scores.view(-1).split(_SERIAL):
        piece.div_(cap).tanh_().mul_(cap)
    return scores
