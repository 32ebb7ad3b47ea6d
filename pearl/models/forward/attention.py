"""What attention is on every device: how positions are scored, and the block in which their scores are summed."""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 128  # positions
_SERIAL = 16384  # elements: torch splits operations of twice as many between threads


class Heads(NamedTuple):
    """The shape of attention: query heads, key-value heads, dimensions of a head."""

    query: int
    kv: int
    dim: int


class Scoring(NamedTuple):
    """How a model scores positions.

    Attributes:
        windows: of each layer, how many positions a token sees, its own included; 0: all earlier ones.
        scale: of a query's product with a key.
        cap: see `cap_scores`.
        sinks: of each layer, see `weigh`; empty: none.
    """

    windows: tuple[int, ...]
    scale: float
    cap: float
    sinks: tuple[torch.Tensor, ...] = ()

    def sinks_of(self, layer: int) -> torch.Tensor | None:
        return self.sinks[layer] if self.sinks else None


def plan_no_shapes(device: torch.device) -> None:
    """Turn cuDNN's attention off in this process, where `device` is a GPU.

    torch 2.13 prefers it on Hopper, and it plans anew for every length, in 42 to 440 ms: every prompt, and every step
    of a forward that is not recorded, has another length.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def whole_blocks(end: int) -> int:
    """The number of positions in the blocks that hold the first `end` ones."""
    return -(-end // BLOCK) * BLOCK


def causal_mask(
    positions: torch.Tensor, at: torch.Tensor, window: int, dtype: torch.dtype
) -> torch.Tensor:
    """0 where a row at position `at` [n] sees one of `positions` [end], else -inf: [n, end].

    Args:
        window: how many positions a row sees, its own included; 0: all earlier ones.
    """
    rows = at[:, None]
    sees = positions <= rows
    if window:
        sees = sees & (positions > rows - window)
    return torch.zeros(sees.shape, dtype=dtype, device=at.device).masked_fill_(~sees, -torch.inf)


def cap_scores(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(scores / cap), in place; 0: as they are. On a CPU of whole blocks of positions.

    In pieces that torch does not split between threads: all elements are then part of a vector.
    """
    flat = scores.view(-1)
    for some in (flat.split(_SERIAL) if scores.is_cpu else [flat]) if cap else ():
        some.div_(cap).tanh_().mul_(cap)
    return scores


def weigh(scores: torch.Tensor, n: int, sinks: torch.Tensor | None) -> torch.Tensor:
    """The softmax of scores [kv_heads, group * n or more, positions] over positions, and over one more of each head.

    Args:
        sinks: [heads], those scores, of which no value comes. In a block of their own, for the order of the sum.
    """
    if sinks is None:
        return scores.softmax(-1)
    kv_heads, rows, _ = scores.shape
    group = len(sinks) // kv_heads
    beside = scores.new_full((kv_heads, rows, BLOCK), -torch.inf)
    beside[:, : group * n, 0] = sinks.view(kv_heads, group, 1).expand(-1, -1, n).flatten(1)
    return torch.cat((scores, beside), -1).softmax(-1)[..., :-BLOCK]
