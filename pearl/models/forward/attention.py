"""Attention of few queries to many cached keys: the same bits for a query however many are computed beside it.

A query's result is a sum over the keys up to its position.  Three things fix the order of that sum:

* keys are taken in blocks of `BLOCK` positions, counted from position 0, and the blocks are added one by one.
  A block beyond the query adds exactly zero;
* each product has at least `ROWS` rows: with fewer, libraries use kernels that sum in another order;
* a query's softmax runs over whole blocks, whose tail is exactly zero.

`probe` checks at load time that this suffices on the CPU at hand.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 128  # positions
ROWS = 4
_SERIAL = 16384  # elements; see `matrices.gated`


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


def masks(start: int, count: int, dtype: torch.dtype, window: int = 0) -> torch.Tensor:
    """Return the mask [count, positions] to add to the scores of `count` queries at positions from `start` on.

    The last column ends a block.  The first is `start` rounded down to one, because every query sees all earlier
    positions; with a sliding window that hides some of them it is position 0.  Entries are 0 at positions that the
    query sees, minus infinity at the others.
    """
    hides = 0 < window < start + count
    positions = torch.arange(0 if hides else start - start % BLOCK, whole_blocks(start + count))
    queries = torch.arange(start, start + count)[:, None]
    unseen = positions > queries
    if hides:
        unseen |= positions <= queries - window
    return torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, -torch.inf)


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


def _stacked(queries: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Queries [n, heads, head_dim] that share keys, stacked so that no key is copied: [kv_heads, group * n, head_dim].

    With uninitialised padding where there are fewer than `ROWS` rows.
    """
    n, heads, head_dim = queries.shape
    group = heads // kv_heads
    stacked = queries.view(n, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, group * n, head_dim)
    if group * n < ROWS:
        padded = stacked.new_empty(kv_heads, ROWS, head_dim)
        padded[:, : group * n] = stacked
        return padded
    return stacked


def _unstacked(mixed: torch.Tensor, n: int, heads: int) -> torch.Tensor:
    """The inverse for results [kv_heads, rows, head_dim]: [n, heads * head_dim], without padding."""
    kv_heads, _, head_dim = mixed.shape
    group = heads // kv_heads
    mixed = mixed[:, : group * n].view(kv_heads, group, n, head_dim)
    return mixed.permute(2, 0, 1, 3).reshape(n, heads * head_dim)


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output of each query: [n, heads * head_dim].

    Args:
        queries: [n, heads, head_dim], scaled.
        keys, values: [kv_heads, positions of whole blocks, head_dim]; masked positions must be finite.
        mask: as `masks` makes it. cap: of scores. sinks: see `weigh`.
    """
    n, heads = queries.shape[:2]
    kv_heads, seen = keys.shape[:2]
    group = heads // kv_heads
    stacked = _stacked(queries, kv_heads)
    scores = cap_scores(torch.bmm(stacked, keys.transpose(1, 2)), cap)
    scores[:, : group * n, seen - mask.shape[1] :].unflatten(1, (group, n)).add_(mask)
    weights = weigh(scores, n, sinks)
    mixed = torch.bmm(weights[:, :, :BLOCK], values[:, :BLOCK])
    for at in range(BLOCK, seen, BLOCK):
        mixed.baddbmm_(weights[:, :, at : at + BLOCK], values[:, at : at + BLOCK])
    return _unstacked(mixed, n, heads)
