"""Row tables: a fixed number of rows that one forward computes, for chains and trees of any slots.

A feed is the tokens that a forward adds to one slot. Each row has a token and its position in the
text. For attention, the positions that a row sees are cut into KV splits ("parts"); the row's
position decides the length of a part. A tile is up to 16 rows of one feed with parts of the same
length, and attention computes a tile at once. The rows
of a tree share the parts that end before the tree. Within the tree, each row attends to its own
path, in the order of the text.

The bits of a row depend only on its text and its position, not on the other rows of the table.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from pearl.models.feeds import Feed, paths
from pearl.models.gpu.recordings import FED

SIZES = (FED, 64)  # rows of a table
MOST_PARTS = 16  # most parts of the positions that a row sees
TILE_ROWS = 16  # most rows of a tile
_LEAST_SPAN = 64  # least positions of a part
_LEAST_VISIBLE = 512  # least result of `visible`
ROW_NUMBERS = 3  # numbers of a row in a table: id, position, parts
TILE_NUMBERS = 10  # numbers of a tile in a table: the fields of `TableTile`
PATH_BYTES = SIZES[-1]  # bytes of a row's path: one for each node


class TableTile(NamedTuple):
    """Rows of one feed in a table.

    Attributes:
        first: the tile's first row in the table.
        rows: number of the tile's rows.
        feed: the first row of the feed in this table.
        fed: number of the feed's rows in this table.
        slot: the slot whose keys and values the rows see.
        start: the slot's length before the feed's first row in this table.
        span: number of positions in a part.
        begin: index of the tile's first part.
        parts: the tile's last part has the index `parts` - 1; it may be shorter than the others.
        apart: 1 if each row is computed by itself, because it sees a path of its own in the feed's
            tree. 0 if the rows are computed together: rows of a chain, and the tiles of a tree that
            hold the positions before the tree.
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
    """Tokens `begin` to `end` - 1 of a feed, which stand in a table's rows from `row` on.

    `feed` is the feed's index. `start` is the slot's length before the first of these tokens.
    """

    feed: int
    begin: int
    end: int
    row: int
    start: int

    @property
    def stop(self) -> int:
        """The row after the last row of the piece."""
        return self.row + self.end - self.begin


def visible(position: int) -> int:
    """Return the least power of two above `position`, but at least 512.

    For example, it is 1024 for position 600. This number decides the length of a row's parts, so
    that neighbouring rows mostly have parts of the same length.
    """
    return max(_LEAST_VISIBLE, 1 << position.bit_length())


def numbers_of(size: int) -> int:
    """Return the number of int64 elements that the buffer of a table of `size` rows has."""
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

    A table has, in this order:
    * the number of tiles;
    * the ids of all rows;
    * the positions of all rows;
    * the number of parts of each row, 0 for padding;
    * the tiles, with room for two tiles for each row;
    * if there are trees, the path of each row: the indices of its nodes, a byte each.

    The list ends after the last number that the kernels read. An id that is on the device only is 0
    here (see `Feed.tokens`).
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
        # If a row is in two tiles, the later one has its last parts.
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
