"""Row tables: the rows of one forward of a fixed size, whatever slots, chains and trees they belong to.

A table has a fixed number of rows, each with its token and its position in its text.  Rows of one feed that see the
same number of parts of the cache are a tile, which attention computes together; of a tree only the parts before it,
behind them each row sees its path in the order of the text.  What a row's bits depend on (its text, its position, and
so the length of the parts) does not depend on what else is in the table.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from pearl.models.feeds import Feed, paths
from pearl.models.gpu.recordings import FED, visible

SIZES = (FED, 64)  # rows of a table
MOST_PARTS = 16  # of the positions that a row sees
TILE_ROWS = 16  # most rows of a tile
_LEAST_SPAN = 64  # positions of a part
ROW_NUMBERS = 3  # of a row in a table: id, position, parts
TILE_NUMBERS = 10
PATH_BYTES = SIZES[-1]  # of a row: the nodes of its path


class Tile(NamedTuple):
    """Rows of one feed in a table.

    Attributes:
        first, rows: its first row, and how many there are.
        feed, fed: the first row of its feed in this table, and the number of those rows.
        slot: whose keys and values they see. start: the slot's length before this table.
        span: positions of a part. begin, parts: the tile is the parts from `begin` up to, not with, `parts`; each row's
            last may be shorter.
        apart: 1: each row is computed by itself, of its feed it sees a path. 0: together; of their feed the rows see a
            chain, or nothing.
    """

    first: int
    rows: int
    feed: int
    fed: int
    slot: int
    start: int
    span: int
    begin: int
    parts: int
    apart: int


class Piece(NamedTuple):
    """Tokens `begin` to `end` of a feed, in rows from `row` on of a table. `start`: the slot's length before them."""

    feed: int
    begin: int
    end: int
    row: int
    start: int


def numbers_of(size: int) -> int:
    """Numbers of a table of `size` rows."""
    return 1 + (ROW_NUMBERS + 2 * TILE_NUMBERS + PATH_BYTES // 8) * size


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
    """A table of `size` rows as the kernels read it: the number of tiles; of the rows their ids, positions and parts, 0
    of padding; tiles, at most two a row; of rows of trees the nodes of their paths, a byte each.  It ends behind the
    last number that is read.

    Ids that are on the device are 0 here: see `Feed.tokens`.
    """
    ids, positions, parts, tiles, nodes = [0] * size, [0] * size, [0] * size, list[Tile](), b""
    for piece in pieces:
        feed, count = feeds[piece.feed], piece.end - piece.begin
        rows = slice(piece.row, piece.row + count)
        if not isinstance(feed.tokens, torch.Tensor):
            ids[rows] = feed.tokens[piece.begin : piece.end]
        positions[rows] = range(piece.start, piece.start + count)
        if feed.parents is not None:
            its = paths(feed.parents)
            positions[rows] = [piece.start + len(path) - 1 for path in its]
            nodes = nodes.ljust(piece.row * PATH_BYTES, b"\0")
            nodes += b"".join(bytes(path).ljust(PATH_BYTES, b"\0") for path in its)
        tiles += _tiles(piece, feed.slot, positions[rows], feed.parents is None)
    for tile in tiles:  # a row's last tile has its last parts
        parts[tile.first : tile.first + tile.rows] = [tile.parts] * tile.rows
    flat = [number for tile in tiles for number in tile]
    if nodes:
        flat += [0] * (2 * TILE_NUMBERS * size - len(flat)) + list(
            struct.unpack(f"<{len(nodes) // 8}q", nodes)
        )
    return [len(tiles), *ids, *positions, *parts, *flat]


def _tiles(piece: Piece, slot: int, positions: Sequence[int], chain: bool) -> list[Tile]:
    """The tiles of a piece whose rows have these positions."""
    count, found, first = len(positions), list[Tile](), 0
    while first < count:
        size, most = visible(positions[first]), min(count, first + TILE_ROWS)
        last = next((row for row in range(first, most) if visible(positions[row]) != size), most)
        span = max(_LEAST_SPAN, size // MOST_PARTS)
        parts, shared = max(positions[first:last]) // span + 1, 0 if chain else piece.start // span
        where = piece.row + first, last - first, piece.row, count, slot, piece.start, span
        found += [Tile(*where, 0, shared, 0)] if shared else []
        found.append(Tile(*where, shared, parts, 0 if chain else 1))
        first = last
    return found
