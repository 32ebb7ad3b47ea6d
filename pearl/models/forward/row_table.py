"""Row tables: the rows of one forward of a fixed size, whatever slots, chains and trees they belong to.

A table has a fixed number of rows, each with its token, its position in its text, and the nodes of its own feed that it
sees.  Rows of one feed that see the same number of parts of the cache are a tile, which attention computes together.
What a row's bits depend on (its position, and so the length of the parts; in a tree the last node's) does not depend
on what else is in the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pearl.models.feeds import Feed, ancestors, depths
from pearl.models.forward.graphs import FED, visible

SIZES = (FED, 64)  # rows of a table
MOST_PARTS = 16  # of the positions that a row sees
TILE_ROWS = 16  # most rows of a tile
_LEAST_SPAN = 64  # positions of a part
ROW_NUMBERS = 4  # of a row in a table: id, position, nodes that it sees, parts
TILE_NUMBERS = 9


class Tile(NamedTuple):
    """Rows of one feed in a table.

    Attributes:
        first, rows: its first row, and how many there are.
        feed, fed: the first row of its feed in this table, and the number of those rows.
        slot: whose keys and values they see. start: the slot's length before this table.
        span: positions of a part. parts: how many the tile sees; the last may be shorter.
        least: the first position of its rows.
    """

    first: int
    rows: int
    feed: int
    fed: int
    slot: int
    start: int
    span: int
    parts: int
    least: int


class Piece(NamedTuple):
    """Tokens `begin` to `end` of a feed, in rows from `row` on of a table. `start`: the slot's length before them."""

    feed: int
    begin: int
    end: int
    row: int
    start: int


def numbers_of(size: int) -> int:
    """Numbers of a table of `size` rows."""
    return 1 + (ROW_NUMBERS + TILE_NUMBERS) * size


def lay_tables(feeds: Sequence[Feed], lengths: Sequence[int], most: int) -> list[list[Piece]]:
    """Distribute the feeds over as few tables of `most` rows as take them in their order. lengths: tokens in each slot.

    A chain may be cut anywhere, a tree is in one table.
    """
    tables: list[list[Piece]] = [[]]
    free = most
    for number, feed in enumerate(feeds):
        begin, start, count = 0, lengths[feed.slot], len(feed.tokens)
        assert feed.parents is None or count <= most
        while begin < count:
            if free == 0 or (feed.parents is not None and free < count):
                tables.append([])
                free = most
            end = min(count, begin + free)
            tables[-1].append(Piece(number, begin, end, most - free, start + begin))
            free -= end - begin
            begin = end
    return tables


def rows_of(pieces: Sequence[Piece]) -> int:
    """The rows that the pieces of a table take."""
    return max((piece.row + piece.end - piece.begin for piece in pieces), default=0)


def numbers(feeds: Sequence[Feed], pieces: Sequence[Piece], size: int) -> list[int]:
    """A table of `size` rows as the kernels read it: the number of tiles; of the rows their ids, positions, seen nodes
    and parts, 0 of padding; tiles.

    Ids that are on the device are 0 here: see `Feed.tokens`.
    """
    ids, positions, sees, parts, tiles = [0] * size, [0] * size, [0] * size, [0] * size, list[Tile]()
    for piece in pieces:
        feed, count = feeds[piece.feed], piece.end - piece.begin
        rows = slice(piece.row, piece.row + count)
        if not isinstance(feed.tokens, torch.Tensor):
            ids[rows] = feed.tokens[piece.begin : piece.end]
        chain = feed.parents is None
        positions[rows] = [piece.start + each for each in (range(count) if chain else depths(feed.parents or ()))]
        masks = [(2 << node) - 1 for node in range(count)] if chain else ancestors(feed.parents or ())
        sees[rows] = [mask - (mask >> 63 << 64) for mask in masks]  # as 64 bits with a sign
        # Nodes of a tree stand in the cache in their order, so beyond their positions in the text.
        looks = positions[rows] if chain else [piece.start + count - 1] * count
        tiles += _tiles(piece, feed.slot, looks, positions[rows])
    for tile in tiles:
        parts[tile.first : tile.first + tile.rows] = [tile.parts] * tile.rows
    flat = [number for tile in tiles for number in tile]
    return [len(tiles), *ids, *positions, *sees, *parts, *flat, *[0] * (TILE_NUMBERS * size - len(flat))]


def _tiles(piece: Piece, slot: int, looks: Sequence[int], positions: Sequence[int]) -> list[Tile]:
    """The tiles of a piece whose rows look as far as those of chains at `looks`."""
    count, found, first = len(looks), list[Tile](), 0
    while first < count:
        size, most = visible(looks[first]), min(count, first + TILE_ROWS)
        last = next((row for row in range(first, most) if visible(looks[row]) != size), most)
        span = max(_LEAST_SPAN, size // MOST_PARTS)
        parts = -(-(piece.start + last) // span)
        least = min(positions[first:last])
        found.append(Tile(piece.row + first, last - first, piece.row, count, slot, piece.start, span, parts, least))
        first = last
    return found
