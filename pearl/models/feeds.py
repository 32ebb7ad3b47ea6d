"""Inputs of a forward: chains and trees of tokens, each continuing the sequence of one slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

Tokens = Sequence[int] | torch.Tensor  # [n]


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens for one slot of a runner.

    Attributes:
        tokens: [n], not empty. Ids in a tensor are on the device, perhaps not yet computed there, and their range is
            not checked.
        rows: return the logits of this many last tokens; 0 <= rows <= n.
        slot: which sequence the tokens continue.
        parents: None for a chain, in which each token follows the one before. For a tree: the index in `tokens` of each
            token's parent, smaller than its own, or -1 where the token follows the slot's sequence.
        prompt: whether these are tokens of a prompt. A GPU always computes them in its large pieces, and all other
            tokens in its small ones: the bits of a row depend on the size.
    """

    tokens: Tokens
    rows: int
    slot: int = 0
    parents: tuple[int, ...] | None = None
    prompt: bool = False

    def __post_init__(self) -> None:
        assert len(self.tokens) > 0
        assert 0 <= self.rows <= len(self.tokens)
        if self.parents is not None:
            assert len(self.parents) == len(self.tokens)
            assert all(-1 <= parent < node for node, parent in enumerate(self.parents)), (
                self.parents
            )

    @property
    def depth(self) -> int:
        """Number of positions by which the feed extends the slot's sequence."""
        return len(self.tokens) if self.parents is None else 1 + max(depths(self.parents))


def depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of each node of a tree; 0 for a node that follows the slot's sequence."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def paths(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Return for each node of a tree its ancestors and itself, in the order of the text."""
    found: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        found.append((*(() if parent < 0 else found[parent]), node))
    return found


def parent_rows(parents: Sequence[int], first: int) -> list[int]:
    """The row of the parent of each node of a tree in rows from `first` on; -1: it follows the slot's sequence."""
    return [first + parent if parent >= 0 else -1 for parent in parents]


def is_path(parents: Sequence[int], path: Sequence[int]) -> bool:
    """Whether `path` begins at a child of the slot's sequence, and each of its nodes is the parent of the next."""
    return all(0 <= node < len(parents) for node in path) and all(
        parents[node] == above for above, node in zip([-1, *path], path, strict=False)
    )


class Layout(NamedTuple):
    """Several feeds as the rows of one forward, one behind the other.

    Attributes:
        ids: [rows], token ids.
        table: [rows, 4]: slot, position, how many positions of the slot are seen, and in trees the row of the parent,
            which is seen too, else -1.
        fed: of each feed, its rows.
    """

    ids: torch.Tensor
    table: torch.Tensor
    fed: list[range]


def lay_out(feeds: Sequence[Feed], lengths: Sequence[int]) -> Layout:
    """Arrange feeds in one forward.

    Args:
        lengths: number of tokens in each slot.
    """
    table: list[tuple[int, int, int, int]] = []
    fed: list[range] = []
    for feed in feeds:
        start, slot, first, count = lengths[feed.slot], feed.slot, len(table), len(feed.tokens)
        if feed.parents is None:
            table += [(slot, at, at + 1, -1) for at in range(start, start + count)]
        else:
            above = zip(depths(feed.parents), parent_rows(feed.parents, first), strict=True)
            table += [(slot, start + depth, start, parent) for depth, parent in above]
        fed.append(range(first, first + count))
    return Layout(
        torch.cat([torch.as_tensor(feed.tokens) for feed in feeds]), torch.tensor(table), fed
    )
