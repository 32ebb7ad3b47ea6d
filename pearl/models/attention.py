"""Attention of few queries to many cached keys, the same bits for a query however many stand beside it.

A query's result is a sum over the keys up to its position.  Three things keep the order of that sum fixed:

* keys are taken in blocks of `BLOCK` positions, counted from position 0, and the blocks are added one after the other.
  A block beyond the query adds exactly zero;
* each product has at least `ROWS` rows: with fewer, libraries turn to kernels that sum in another order;
* a query's softmax runs over whole blocks, whose tail is exactly zero.

Tests and `LlamaRunner`'s probe at load time show that this suffices on the CPU at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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


class TreePlace(NamedTuple):
    """Where the nodes of a tree stand, and what each sees.

    Attributes:
        base, end: positions from `base`, the first of a block, to `end`, the last of one, may differ by node; all see
            the positions before.
        sees: [nodes * (end - base)], for each node and each of these positions: which it sees there, by index among the
            positions of the slot and, behind them, the nodes. What a node does not see it may find there, finite.
        mask: [nodes, 1, end - base], added to scores: 0 at positions that the node sees, minus infinity at others.
    """

    base: int
    end: int
    sees: torch.Tensor
    mask: torch.Tensor


def tree_place(start: int, parents: Sequence[int], dtype: torch.dtype) -> TreePlace:
    """Of a tree behind a slot of `start` tokens. `parents`: of each node, by index; -1: it follows the slot's last."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    base, end = start - start % BLOCK, whole_blocks(start + max(map(len, paths)))
    sees = torch.arange(end - base).repeat(len(paths), 1)
    mask = torch.zeros(len(paths), 1, end - base, dtype=dtype)
    for node, path in enumerate(paths):
        sees[node, start - base : start - base + len(path)] = torch.tensor(path) + (end - base)
        mask[node, :, start - base + len(path) :] = -torch.inf
    return TreePlace(base, end, sees.flatten(), mask)


def attend_tree(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    place: TreePlace,
) -> torch.Tensor:
    """As `attend`, of all nodes of a tree at once: the bits that each node's path gives when it is fed as a chain.

    Each node has a copy of the blocks in which nodes stand, with its own path in them: keys keep their places, and so
    sums their order.

    Args:
        queries: [nodes, heads, head_dim], scaled.
        keys, values: [kv_heads, positions up to `place.end`, head_dim], of the slot.
        own: keys and values of the nodes, [nodes, kv_heads, head_dim] each.
    """
    n, heads, head_dim = queries.shape
    kv_heads, base, end = len(keys), place.base, place.end
    group = heads // kv_heads
    rows = max(group, ROWS)
    stacked = queries.new_zeros(kv_heads, n, rows, head_dim)
    stacked[:, :, :group] = queries.view(n, kv_heads, group, head_dim).transpose(0, 1)
    each = [
        torch.cat((shared[:, base:end], nodes.transpose(0, 1)), 1).index_select(1, place.sees)
        for shared, nodes in zip((keys, values), own, strict=True)
    ]
    own_keys, own_values = (copies.view(kv_heads * n, end - base, head_dim) for copies in each)
    scores = queries.new_empty(kv_heads, n, rows, end)
    if base:
        all_rows = stacked.view(kv_heads, n * rows, head_dim)
        scores[..., :base] = torch.bmm(all_rows, keys[:, :base].transpose(1, 2)).view(kv_heads, n, rows, base)
    tail = torch.bmm(stacked.view(kv_heads * n, rows, head_dim), own_keys.transpose(1, 2))
    torch.add(tail.view(kv_heads, n, rows, end - base), place.mask, out=scores[..., base:])
    weights = scores.softmax(-1)
    mixed = queries.new_empty(0)
    for at in range(0, base, BLOCK):
        some = weights.view(kv_heads, n * rows, end)[:, :, at : at + BLOCK]
        mixed = torch.baddbmm(mixed, some, values[:, at : at + BLOCK]) if at else torch.bmm(some, values[:, :BLOCK])
    mixed = mixed.view(kv_heads * n, rows, head_dim) if base else mixed
    for at in range(base, end, BLOCK):
        some = weights.view(kv_heads * n, rows, end)[:, :, at : at + BLOCK]
        there = own_values[:, at - base : at - base + BLOCK]
        mixed = torch.baddbmm(mixed, some, there) if at else torch.bmm(some, there)
    mixed = mixed.view(kv_heads, n, rows, head_dim)[:, :, :group]
    return mixed.transpose(0, 1).reshape(n, heads * head_dim)


def tree_is_chains(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    start: int,
    parents: Sequence[int],
) -> bool:
    """Whether each node of a tree gets the same bits by `attend_tree` as its path does by `attend`.

    Args:
        queries, keys, values, own: as of `attend_tree`; the slot holds `start` tokens, and has room for the tree.
        parents: see `tree_place`.
    """
    place = tree_place(start, parents, queries.dtype)
    found = attend_tree(queries, keys[:, : place.end], values[:, : place.end], own, place)
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
        path, end = paths[-1], start + len(paths[-1])
        chain = [shared[:, : whole_blocks(end)].clone() for shared in (keys, values)]
        for shared, nodes in zip(chain, own, strict=True):
            shared[:, start:end] = nodes[path].transpose(0, 1)
        alone = attend(queries[path], chain[0], chain[1], masks(start, len(path), queries.dtype))
        if not torch.equal(alone[-1], found[node]):
            return False
    return True


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
