"""Row tables: the rows of one forward of a fixed size, whatever slots, chains and trees they belong to.

A table has `ROWS` rows, each with its token, its position in its text, and the nodes of its own feed that it sees.
Rows of one feed that see the same number of parts of the cache are a tile, which attention computes together.  What a
row's bits depend on (its position, and so the length of the parts) does not depend on what else is in the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pearl.models.feeds import Feed, ancestors, depths
from pearl.models.forward.graphs import visible

ROWS = 16
MOST_PARTS = 16  # of the positions that a row sees
_LEAST_SPAN = 64  # positions of a part
NUMBERS = 1 + 3 * ROWS + 8 * ROWS  # of a table


class Tile(NamedTuple):
    """Rows of one feed in a table.

    Attributes:
        first, rows: its first row, and how many there are.
        feed, fed: the first row of its feed in this table, and the number of those rows.
        slot: whose keys and values they see. start: the slot's length before this table.
        span: positions of a part. parts: how many the tile sees; the last may be shorter.
    """

    first: int
    rows: int
    feed: int
    fed: int
    slot: int
    start: int
    span: int
    parts: int


class Piece(NamedTuple):
    """Tokens `begin` to `end` of a feed, in rows from `row` on of a table. `start`: the slot's length before them."""

    feed: int
    begin: int
    end: int
    row: int
    start: int


def lay_tables(feeds: Sequence[Feed], lengths: Sequence[int]) -> list[list[Piece]]:
    """Distribute the feeds over as few tables as take them in their order. lengths: tokens in each slot.

    A chain may be cut anywhere, a tree is in one table.
    """
    tables: list[list[Piece]] = [[]]
    free = ROWS
    for number, feed in enumerate(feeds):
        begin, start, count = 0, lengths[feed.slot], len(feed.tokens)
        assert feed.parents is None or count <= ROWS
        while begin < count:
            if free == 0 or (feed.parents is not None and free < count):
                tables.append([])
                free = ROWS
            end = min(count, begin + free)
            tables[-1].append(Piece(number, begin, end, ROWS - free, start + begin))
            free -= end - begin
            begin = end
    return tables


def numbers(feeds: Sequence[Feed], pieces: Sequence[Piece]) -> list[int]:
    """The table [NUMBERS] as `decode_kernel` reads it: the number of tiles; ids, positions and seen nodes, 0 of
    padding; tiles.

    Ids that are on the device are 0 here: see `Feed.tokens`.
    """
    ids, positions, sees, tiles = [0] * ROWS, [0] * ROWS, [0] * ROWS, list[Tile]()
    for piece in pieces:
        feed, count = feeds[piece.feed], piece.end - piece.begin
        rows = slice(piece.row, piece.row + count)
        if not isinstance(feed.tokens, torch.Tensor):
            ids[rows] = feed.tokens[piece.begin : piece.end]
        chain = feed.parents is None
        positions[rows] = [piece.start + each for each in (range(count) if chain else depths(feed.parents or ()))]
        sees[rows] = [(2 << node) - 1 for node in range(count)] if chain else ancestors(feed.parents or ())
        # Nodes of a tree stand in the cache in their order, so beyond their positions in the text.
        looks = positions[rows] if chain else [piece.start + count - 1] * count
        tiles += _tiles(piece, feed.slot, looks)
    flat = [number for tile in tiles for number in tile]
    return [len(tiles), *ids, *positions, *sees, *flat, *[0] * (8 * ROWS - len(flat))]


def _tiles(piece: Piece, slot: int, positions: Sequence[int]) -> list[Tile]:
    """The tiles of a piece whose rows look as far as those of chains at these positions."""
    count, found, first = len(positions), list[Tile](), 0
    while first < count:
        size = visible(positions[first])
        last = next((row for row in range(first, count) if visible(positions[row]) != size), count)
        span = max(_LEAST_SPAN, size // MOST_PARTS)
        parts = -(-(piece.start + last) // span)
        found.append(Tile(piece.row + first, last - first, piece.row, count, slot, piece.start, span, parts))
        first = last
    return found
