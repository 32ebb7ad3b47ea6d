"""Attention of few queries to many cached keys, the same bits for a query however many stand beside it.

A query's result is a sum over the keys up to its position.  Three things keep the order of that sum fixed:

* keys are taken in blocks of `BLOCK` positions, counted from position 0, and the blocks are added one after the other.
  A block beyond the query adds exactly zero;
* each product has at least `ROWS` rows: with fewer, libraries turn to kernels that sum in another order;
* a query's softmax runs over whole blocks, whose tail is exactly zero.

Tests and `LlamaRunner`'s probe at load time show that this suffices on the CPU at hand.
"""

from __future__ import annotations

import torch

BLOCK = 128  # positions
ROWS = 4


def plan_no_shapes(device: torch.device) -> None:
    """Turn cuDNN's attention off in this process, where `device` is a GPU.

    torch 2.13 asks it first on Hopper, masks and single queries included, and it plans anew for every length: 42 to 440
    ms are reported for a plan, and every prompt, and every step of a forward that is not recorded, has another length.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def whole_blocks(end: int) -> int:
    """The number of positions in the blocks that hold the first `end` ones."""
    return -(-end // BLOCK) * BLOCK


def masks(start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask that is added to the scores of `count` queries at positions from `start` on: [count, positions].

    The first column is `start` rounded down to a block (every query sees all earlier positions); the last column ends a
    block. Entries are 0 at positions that the query sees, minus infinity at later positions.
    """
    base = start - start % BLOCK
    positions = torch.arange(base, whole_blocks(start + count))
    queries = torch.arange(start, start + count)
    after = positions > queries[:, None]
    return torch.zeros(after.shape, dtype=dtype).masked_fill_(after, -torch.inf)


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the attention output of each query: [n, heads * head_dim].

    Args:
        queries: [n, heads, head_dim], scaled by head_dim ** -0.5.
        keys, values: [kv_heads, positions of whole blocks, head_dim]; masked positions must be finite.
        mask: as `masks` makes it.
    """
    n, heads, head_dim = queries.shape
    kv_heads, seen = keys.shape[:2]
    group = heads // kv_heads
    # Queries that share keys stand one below the other, so that no key is copied: [kv_heads, group * n, head_dim].
    stacked = queries.view(n, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, group * n, head_dim)
    if group * n < ROWS:  # padding rows, uninitialised: their output is discarded
        padded = stacked.new_empty(kv_heads, ROWS, head_dim)
        padded[:, : group * n] = stacked
        stacked = padded
    scores = torch.bmm(stacked, keys.transpose(1, 2))
    scores[:, : group * n, seen - mask.shape[1] :].unflatten(1, (group, n)).add_(mask)
    weights = scores.softmax(-1)
    mixed = torch.bmm(weights[:, :, :BLOCK], values[:, :BLOCK])
    for at in range(BLOCK, seen, BLOCK):
        mixed.baddbmm_(weights[:, :, at : at + BLOCK], values[:, at : at + BLOCK])
    mixed = mixed[:, : group * n].view(kv_heads, group, n, head_dim)
    return mixed.permute(2, 0, 1, 3).reshape(n, heads * head_dim)
