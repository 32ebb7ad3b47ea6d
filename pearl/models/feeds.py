"""Inputs of a forward: chains and trees of tokens, each continuing the sequence of one slot."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

Tokens = Sequence[int] | torch.Tensor  # [n]


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens for one slot of a runner.

    Attributes:
        tokens: [n], not empty. Ids in a tensor are on the device, which may not have computed them yet; their range is
            not checked.
        rows: number of last tokens whose logits are returned; 0 <= rows <= n.
        slot: which sequence the tokens continue.
        parents: None for a chain, in which each token follows the one before. For a tree: the index in `tokens` of each
            token's parent, smaller than its own, or -1 where the token follows the slot's sequence.
        prompt: whether the tokens are part of a prompt. A GPU always computes a prompt's tokens in large pieces and all
            other tokens in small ones, because the bits of a row depend on the size of the piece.
    """

    tokens: Tokens
    rows: int
    slot: int = 0
    parents: tuple[int, ...] | None = None
    prompt: bool = False

    def __post_init__(self) -> None:
        assert len(self.tokens) > 0
        assert 0 <= self.rows <= len(self.tokens)

    @property
    def depth(self) -> int:
        """Number of positions by which the feed extends the slot's sequence."""
        if self.parents is None:
            return len(self.tokens)
        return 1 + max(depths(self.parents))


def depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of each node of a tree; 0 for a node that follows the slot's sequence."""
    node_depths: list[int] = []
    for parent in parents:
        node_depths.append(0 if parent < 0 else node_depths[parent] + 1)
    return node_depths


def paths(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Return for each node of a tree its ancestors and itself, in the order of the text."""
    node_paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        path = () if parent < 0 else node_paths[parent]
        node_paths.append((*path, node))
    return node_paths


def parent_rows(parents: Sequence[int], first: int) -> list[int]:
    """Return the row of each node's parent, for a tree whose first node is in row `first`.

    It is -1 for a node that has no parent.
    """
    return [first + parent if parent >= 0 else -1 for parent in parents]


def is_path(parents: Sequence[int], path: Sequence[int]) -> bool:
    """Return whether the nodes of `path` can continue the slot's sequence, in their order.

    The first node must follow the sequence, and each node must be the parent of the next.
    """
    expected_parent = -1
    for node in path:
        if not 0 <= node < len(parents) or parents[node] != expected_parent:
            return False
        expected_parent = node
    return True


class Layout(NamedTuple):
    """Several feeds as the rows of one forward, one after the other.

    Attributes:
        ids: [rows], token ids.
        table: [rows, 4], with these columns:
            0: the slot;
            1: the position;
            2: how many of the slot's first positions the row attends to. The last of them is, in a
               chain, the row's own position; in a tree, the position before the tree; in a block of
               a `DFlashHead`, the block's last position;
            3: in a tree, the row of the node's parent; -1 if it has none. The row also attends to
               itself and to all its ancestors.
        fed: the rows of each feed.
        end: one more than the highest position of all rows, over all slots.
    """

    ids: torch.Tensor
    table: torch.Tensor
    fed: list[range]
    end: int


def lay_out(feeds: Sequence[Feed], lengths: Sequence[int]) -> Layout:
    """Arrange feeds in one forward.

    Args:
        lengths: number of tokens in each slot.
    """
    table: list[tuple[int, int, int, int]] = []
    fed = []
    ends = []
    for feed in feeds:
        slot = feed.slot
        start = lengths[slot]
        first = len(table)
        if feed.parents is None:
            for position in range(start, start + len(feed.tokens)):
                table.append((slot, position, position + 1, -1))
        else:
            rows = parent_rows(feed.parents, first)
            for depth, row in zip(depths(feed.parents), rows, strict=True):
                table.append((slot, start + depth, start, row))
        fed.append(range(first, len(table)))
        ends.append(start + feed.depth)
    ids = [torch.as_tensor(feed.tokens) for feed in feeds]
    all_ids = torch.cat(ids) if len(ids) > 1 else ids[0]
    return Layout(all_ids, torch.tensor(table), fed, max(ends))
