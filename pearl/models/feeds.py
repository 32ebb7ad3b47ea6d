"""Inputs of a forward: chains and trees of tokens, each continuing the sequence of one slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
            assert all(-1 <= parent < node for node, parent in enumerate(self.parents)), self.parents

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


def ancestors(parents: Sequence[int]) -> list[int]:
    """Return for each node of a tree its ancestors and itself, as a bit mask: bit j is node j."""
    found: list[int] = []
    for node, parent in enumerate(parents):
        found.append((1 << node) | (0 if parent < 0 else found[parent]))
    return found


def branches(parents: Sequence[int]) -> list[list[int]]:
    """Cut a tree into chains, depth first: lists of nodes, each the parent of the next.

    A chain begins below a node of an earlier chain, or below the slot's sequence. Its ancestors are then in the cache,
    written by the last chain that reached their depth: chains can be computed one after the other in one cache.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    chains: list[list[int]] = []
    waiting = [[node] for node in reversed(children.get(-1, []))]
    while waiting:
        chain = waiting.pop()
        while below := children.get(chain[-1]):
            waiting += [[node] for node in reversed(below[1:])]
            chain.append(below[0])
        chains.append(chain)
    return chains


def is_path(parents: Sequence[int], path: Sequence[int]) -> bool:
    """Whether `path` begins at a child of the slot's sequence, and each of its nodes is the parent of the next."""
    return all(0 <= node < len(parents) for node in path) and all(
        parents[node] == above for above, node in zip([-1, *path], path, strict=False)
    )


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of a forward that continue a slot as one chain: `size` rows from `row` on, at positions from `start` on."""

    slot: int
    start: int
    row: int
    size: int

    @property
    def at(self) -> slice:
        """Its positions."""
        return slice(self.start, self.start + self.size)

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.size)


@dataclass
class Layout:
    """Several feeds as the rows of one forward.

    Attributes:
        ids: [rows], token ids.
        spans: in the order in which they must be computed; a tree has one for each of its `branches`.
        fed: for each feed, the row of each of its tokens.
        asked: for each feed, the rows whose logits are returned.
        trees: for each feed that is a tree, the feed and the row of each node.
    """

    ids: torch.Tensor
    spans: list[Span] = field(default_factory=list)
    fed: list[list[int]] = field(default_factory=list)
    asked: list[list[int]] = field(default_factory=list)
    trees: list[tuple[Feed, list[int]]] = field(default_factory=list)


def lay_out(feeds: Sequence[Feed], lengths: Sequence[int], least: int = 1) -> Layout:
    """Arrange feeds in one forward of at least `least` rows; rows after the last feed are padding.

    Args:
        lengths: number of tokens in each slot.
    """
    layout, ids = Layout(torch.empty(0)), []
    count = 0
    for feed in feeds:
        start, fed, order = lengths[feed.slot], len(feed.tokens), list(range(len(feed.tokens)))
        if feed.parents is None:
            layout.spans.append(Span(feed.slot, start, count, fed))
        else:
            depth, row = depths(feed.parents), count
            for chain in branches(feed.parents):
                layout.spans.append(Span(feed.slot, start + depth[chain[0]], row, len(chain)))
                order[row - count : row - count + len(chain)] = chain
                row += len(chain)
        row_of = {node: count + row for row, node in enumerate(order)}
        ids.append(torch.as_tensor(feed.tokens) if feed.parents is None else torch.as_tensor(feed.tokens)[order])
        layout.fed.append([row_of[node] for node in range(fed)])
        if feed.parents is not None:
            layout.trees.append((feed, layout.fed[-1]))
        layout.asked.append(layout.fed[-1][fed - feed.rows :])
        count += fed
    padding = torch.zeros(max(0, least - count), dtype=torch.long)
    layout.ids = torch.cat([*ids, padding]) if len(ids) > 1 or len(padding) else ids[0]
    return layout
