"""Attention on every device: how positions are scored, and the blocks in which scores are summed."""

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
        sinks: [heads] of each layer, see `weigh`; empty: none.
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


def causal_mask(
    positions: torch.Tensor, at: torch.Tensor, window: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return [n, end]: 0 where a row at position `at` [n] sees one of `positions` [end], else -inf.

    Args:
        window: how many positions a row sees, its own included; 0: all earlier ones.
    """
    rows = at[:, None]
    sees = positions <= rows
    if window:
        sees = sees & (positions > rows - window)
    return torch.zeros(sees.shape, dtype=dtype, device=at.device).masked_fill_(~sees, -torch.inf)


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


def weigh(scores: torch.Tensor, n: int, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the softmax of scores [kv_heads, group * n or more, positions] over positions.

    Args:
        sinks: [heads], a further score of each head, without a value. It is in a block of its own, for
            the order of the sum.
    """
    if sinks is None:
        return scores.softmax(-1)
    kv_heads, rows, _ = scores.shape
    group = len(sinks) // kv_heads
    block = scores.new_full((kv_heads, rows, BLOCK), -torch.inf)
    block[:, : group * n, 0] = sinks.view(kv_heads, group, 1).expand(-1, -1, n).flatten(1)
    return torch.cat((scores, block), -1).softmax(-1)[..., :-BLOCK]
