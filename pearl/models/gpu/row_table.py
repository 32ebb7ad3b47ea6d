"""Row tables: the rows of one forward of a fixed size, whatever slots, chains and trees they belong to.

A table has a fixed number of rows, each with its token and its position in its text. A tile is up to
16 rows of one feed with equally many KV splits ("parts"), and attention computes it at once. Tree
rows share the splits before the tree; inside it each attends to its own path, in the order of the
text. A row's bits depend on its text and its position, which decides the length of the parts, and on
nothing else in the table.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from pearl.models.feeds import Feed, paths
from pearl.models.gpu.recordings import FED

SIZES = (FED, 64)  # rows of a table
MOST_PARTS = 16  # of the positions that a row sees
TILE_ROWS = 16  # most rows of a tile
_LEAST_SPAN = 64  # positions of a part
_LEAST_VISIBLE = 512  # positions
ROW_NUMBERS = 3  # of a row in a table: id, position, parts
TILE_NUMBERS = 10
PATH_BYTES = SIZES[-1]  # of a row: the nodes of its path


class TableTile(NamedTuple):
    """Rows of one feed in a table.

    Attributes:
        first, rows: its first row, and how many there are.
        feed, fed: the first row of its feed in this table, and the number of those rows.
        slot: the slot whose keys and values the rows see. start: its length before this table.
        span: positions of a part. begin, parts: the tile is the parts from `begin` up to, not with,
            `parts`; each row's last may be shorter.
        apart: 1: each row is computed by itself, and of its feed it sees a path. 0: the rows are
            computed together, and of their feed they see a chain, or nothing.
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


class TablePiece(NamedTuple):
    """Tokens `begin` to `end` of a feed, in a table's rows from `row` on.

    `start` is the slot's length before them.
    """

    feed: int
    begin: int
    end: int
    row: int
    start: int

    @property
    def stop(self) -> int:
        """The row after the last one."""
        return self.row + self.end - self.begin


def visible(position: int) -> int:
    """Return how many positions the parts of the row of `position` reach to.

    That is the next power of two, and at least `_LEAST_VISIBLE`: 1024 at position 600.
    """
    return max(_LEAST_VISIBLE, 1 << position.bit_length())


def numbers_of(size: int) -> int:
    """Return how many numbers a table of `size` rows has."""
    return 1 + (ROW_NUMBERS + 2 * TILE_NUMBERS + PATH_BYTES // 8) * size


def lay_tables(
    feeds: Sequence[Feed],
    lengths: Sequence[int],
    most: int,
) -> list[list[TablePiece]]:
    """Distribute the feeds, in their order, over as few tables of `most` rows as possible.

    A chain may be cut anywhere; a tree is in one table. Three tables of 16 rows, for example, hold a
    chain of 20 tokens and then a tree of 14: 16 tokens, 4 tokens, the tree.

    Args:
        lengths: number of tokens in each slot.
    """
    tables: list[list[TablePiece]] = [[]]
    free = most
    for number, feed in enumerate(feeds):
        begin = 0
        start = lengths[feed.slot]
        count = len(feed.tokens)
        assert feed.parents is None or count <= most
        while begin < count:
            if free == 0 or (feed.parents is not None and free < count):
                tables.append([])
                free = most
            end = min(count, begin + free)
            tables[-1].append(TablePiece(number, begin, end, most - free, start + begin))
            free -= end - begin
            begin = end
    return tables


def rows_of(pieces: Sequence[TablePiece]) -> int:
    """Return how many rows the pieces of a table need."""
    return max((piece.stop for piece in pieces), default=0)


def numbers(
    feeds: Sequence[Feed],
    pieces: Sequence[TablePiece],
    size: int,
) -> list[int]:
    """Encode a table of `size` rows as the kernels read it.

    It has, in this order: the number of tiles; of each row the id, then of each the position, then of
    each the number of parts, 0 for padding; the tiles, at most two a row; if there are trees, the
    nodes of each row's path, a byte each. It ends after the last number that is read.

    Ids that are on the device are 0 here: see `Feed.tokens`.
    """
    ids = [0] * size
    positions = [0] * size
    parts = [0] * size
    tiles: list[TableTile] = []
    path_bytes = b""
    for piece in pieces:
        feed = feeds[piece.feed]
        rows = slice(piece.row, piece.stop)
        if not isinstance(feed.tokens, torch.Tensor):
            ids[rows] = feed.tokens[piece.begin : piece.end]
        if feed.parents is None:
            positions[rows] = range(piece.start, piece.start + piece.end - piece.begin)
        else:
            path_bytes = path_bytes.ljust(piece.row * PATH_BYTES, b"\0")
            for row, path in enumerate(paths(feed.parents), piece.row):
                positions[row] = piece.start + len(path) - 1
                path_bytes += bytes(path).ljust(PATH_BYTES, b"\0")
        tiles += _tiles(piece, feed.slot, positions[rows], feed.parents is None)
    flat: list[int] = []
    for tile in tiles:
        # A row's last tile has its last parts.
        parts[tile.first : tile.first + tile.rows] = [tile.parts] * tile.rows
        flat += tile
    if path_bytes:
        flat += [0] * (2 * TILE_NUMBERS * size - len(flat))
        flat += struct.unpack(f"<{len(path_bytes) // 8}q", path_bytes)
    return [len(tiles), *ids, *positions, *parts, *flat]


def _tiles(
    piece: TablePiece,
    slot: int,
    positions: Sequence[int],
    is_chain: bool,
) -> list[TableTile]:
    """Return the tiles of a piece whose rows have these positions."""
    count = len(positions)
    tiles: list[TableTile] = []
    begin = 0
    while begin < count:
        size = visible(positions[begin])
        limit = min(count, begin + TILE_ROWS)
        end = begin + 1
        while end < limit and visible(positions[end]) == size:
            end += 1
        span = max(_LEAST_SPAN, size // MOST_PARTS)
        shared = 0 if is_chain else piece.start // span
        tile = TableTile(
            first=piece.row + begin,
            rows=end - begin,
            feed=piece.row,
            fed=count,
            slot=slot,
            start=piece.start,
            span=span,
            begin=shared,
            parts=max(positions[begin:end]) // span + 1,
            apart=int(not is_chain),
        )
        if shared:
            tiles.append(tile._replace(begin=0, parts=shared, apart=0))
        tiles.append(tile)
        begin = end
    return tiles
