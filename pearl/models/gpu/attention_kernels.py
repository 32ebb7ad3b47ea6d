"""Triton kernels of attention in a decoding forward.

`attend` computes attention to each part of the positions (see `row_table`), and `add_parts` adds
the outputs of the parts. A row's bits depend on its own tokens only, because the row's position
decides how positions are cut into parts and blocks, and a part or block that the row does not see
adds exactly zero.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language import constexpr
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pearl.models.gpu import row_table
from pearl.models.gpu.product_kernels import root_scale, weighted

MOST_PARTS = constexpr(row_table.MOST_PARTS)
TILE_ROWS = constexpr(row_table.TILE_ROWS)  # rows of a tile
NUMBERS = constexpr(row_table.TILE_NUMBERS)
PER_ROW = constexpr(row_table.ROW_NUMBERS)  # numbers of a row in a table, stored before the tiles
PATH_BYTES = constexpr(row_table.PATH_BYTES)
_BLOCK = constexpr(64)  # positions that are attended to at once
_LOW = constexpr(-1.0e30)


class AttentionShape(NamedTuple):
    """The constants of `attend`.

    Attributes:
        ROWS: rows of the table.
        R: number of queries that a tile has for one key-value head, rounded up to a power of two:
            rows of a tile times query heads that share the key-value head.
        HQ, HK: number of query heads, number of key-value heads.
        D: dimensions of a head.
        WIDE: D rounded up to a power of two; numbers beyond D are 0.
        NORMS: how queries and keys are normalised. 0: not at all; 1: each head by itself; 2: all heads together.
        TURNS: whether queries and keys are rotated.
        WINDOW: how many positions a row sees, its own included; 0: all positions up to its own.
        CAP: cap of the scores, see `attention.cap_scores`; 0: none.
    """

    ROWS: constexpr
    R: constexpr
    HQ: constexpr
    HK: constexpr
    D: constexpr
    WIDE: constexpr
    NORMS: constexpr
    TURNS: constexpr
    WINDOW: constexpr
    CAP: constexpr


@triton.jit
def _turned(source, positions, inside, norm, scale, cos, sin, eps, shape):
    """Load queries or keys [rows, WIDE], normalise them, and rotate them to their positions.

    The first half of `sin` is negated; see `layers.DecoderLayers.angles`.

    Args:
        source: [rows], pointers to the first number of each row.
        norm: [rows], pointers to the first norm weight of each row.
        scale: [rows], the result of `root_scale` over all heads; read for NORMS 2 only.
    """
    D: constexpr = shape.D
    d = tl.arange(0, shape.WIDE)
    kind: constexpr = source.dtype.element_ty
    across = (d + D // 2) % D
    mask = inside[:, None] & (d < D)[None, :]
    states = tl.load(source[:, None] + d[None, :], mask=mask, other=0.0)
    opposite = tl.load(source[:, None] + across[None, :], mask=mask, other=0.0)
    if shape.NORMS:
        full = states.to(tl.float32)
        if shape.NORMS == 1:
            scale = 1.0 / tl.sqrt(tl.sum(full * full, 1) / D + eps)
        weights = tl.load(norm[:, None] + d[None, :], mask=mask, other=0.0)
        states = weighted((full * scale[:, None]).to(kind), weights)
        weights = tl.load(norm[:, None] + across[None, :], mask=mask, other=0.0)
        opposite = weighted((opposite.to(tl.float32) * scale[:, None]).to(kind), weights)
    if shape.TURNS:
        at = positions[:, None] * D + d[None, :]
        turned = states.to(tl.float32) * tl.load(cos + at, mask=mask, other=0.0).to(tl.float32)
        angle = tl.load(sin + at, mask=mask, other=0.0).to(tl.float32)
        states = (turned + opposite.to(tl.float32) * angle).to(kind)
    return states


@triton.jit
def _write_new(
    table,
    qkv,
    to_keys,
    to_values,
    norm,
    squares,
    cos,
    sin,
    feed,
    fed,
    start,
    low,
    high,
    head,
    eps,
    shape,
):
    """Write the keys and values of a feed's rows to the cache.

    Only rows are written whose position in the text is from `low` to `high` - 1.
    """
    D: constexpr = shape.D
    HQ: constexpr = shape.HQ
    HK: constexpr = shape.HK
    d = tl.arange(0, shape.WIDE)
    for begin in range(0, fed, TILE_ROWS):
        nodes = begin + tl.arange(0, TILE_ROWS)
        positions = tl.load(table + 1 + shape.ROWS + feed + nodes, mask=nodes < fed, other=-1)
        inside = (positions >= low) & (positions < high)
        row = tl.where(inside, feed + nodes, 0)
        at = start + nodes
        source = qkv + row * ((HQ + 2 * HK) * D) + (HQ + head) * D
        scale = positions
        weights = norm + row * 0
        if shape.NORMS == 2:
            scale = root_scale(squares, HQ * D // 16, HK * D, eps, shape.ROWS, row)
            weights = norm + row * 0 + head * D
        key = _turned(source, positions, inside, weights, scale, cos, sin, eps, shape)
        mask = inside[:, None] & (d < D)[None, :]
        value = tl.load(
            (source + HK * D)[:, None] + d[None, :], mask=mask, other=0.0, cache_modifier=".cg"
        )
        to = at[:, None] * D + d[None, :]
        tl.store(to_keys + to, key, mask=mask)
        tl.store(to_values + to, value, mask=mask)
    tl.debug_barrier()


@triton.jit
def _attend_part(query, positions, keys, values, start, path, begin, high, scale, shape):
    """Attend to the positions from `begin` to `high` - 1.

    Return (weighted sum of values [R, WIDE], greatest score [R], sum of weights [R]), where the weight of a
    position is exp(score - greatest score). Position p is in the cache at p if p < `start`, and otherwise at
    start + path[p - start].
    """
    D: constexpr = shape.D
    R: constexpr = shape.R
    d = tl.arange(0, shape.WIDE)
    kind: constexpr = query.dtype
    top = tl.full((R,), _LOW, tl.float32)
    weight = tl.zeros((R,), tl.float32)
    mixed = tl.zeros((R, shape.WIDE), tl.float32)
    for block in range(begin, high, _BLOCK):
        seats = block + tl.arange(0, _BLOCK)
        inside = seats < high
        is_node = seats >= start
        node = tl.load(path + seats - start, mask=inside & is_node, other=0).to(tl.int32)
        at = tl.where(is_node, start + node, seats)[:, None] * D + d[None, :]
        mask = inside[:, None] & (d < D)[None, :]
        key = tl.load(keys + at, mask=mask, other=0.0, cache_modifier=".cg")
        value = tl.load(values + at, mask=mask, other=0.0, cache_modifier=".cg")
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if shape.CAP > 0:
            scores = shape.CAP * (1 - 2 / (tl.exp(2 * scores / shape.CAP) + 1))
        seen = inside[None, :] & (seats[None, :] <= positions[:, None])
        if shape.WINDOW:
            seen = seen & (seats[None, :] > positions[:, None] - shape.WINDOW)
        scores = tl.where(seen, scores, _LOW)
        higher = tl.maximum(top, tl.max(scores, 1))
        shares = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
        fades = tl.exp(top - higher)
        weight = weight * fades + tl.sum(shares, 1)
        mixed = mixed * fades[:, None] + tl.dot(shares.to(kind), value, input_precision="ieee")
        top = higher
    return mixed, top, weight


@triton.jit
def _tile_at(table, t, ROWS: constexpr):
    """Return the fields of tile number `t`, a `row_table.TableTile`, with two changes.

    The field `parts` is replaced by `parts` - `begin`, which is how many parts the tile has.  The
    field `apart` is true or false.
    """
    at = table + 1 + PER_ROW * ROWS + t * NUMBERS
    begin = tl.load(at + 7).to(tl.int32)
    return (
        tl.load(at).to(tl.int32),
        tl.load(at + 1).to(tl.int32),
        tl.load(at + 2).to(tl.int32),
        tl.load(at + 3).to(tl.int32),
        tl.load(at + 4),
        tl.load(at + 5).to(tl.int32),
        tl.load(at + 6).to(tl.int32),
        begin,
        tl.load(at + 8).to(tl.int32) - begin,
        tl.load(at + 9) != 0,
    )


@triton.jit
def attend(
    table,
    qkv,
    keys,
    values,
    q_norm,
    k_norm,
    squares,
    cos,
    sin,
    sums,
    stats,
    slot_stride,
    head_stride,
    scale,
    eps,
    ROWS: constexpr,
    HQ: constexpr,
    HK: constexpr,
    D: constexpr,
    NORMS: constexpr,
    TURNS: constexpr,
    WINDOW: constexpr,
    CAP: constexpr,
    OVERLAPS: constexpr,
):
    """Write the rows' keys and values to their slots, and attend to each part of the positions that they see.

    The work is cut into units, which the programs share, however many programs there are. A unit
    computes one key-value head, with all query heads that share it, over one part of a tile's
    positions. It computes all rows of the tile or, if they are computed apart, a single row. A unit
    also writes the feed's keys and values at the positions of its part.

    squares: sums of squares of the columns of qkv, for NORMS 2. For the constants see
    `AttentionShape`.
    """
    GROUP: constexpr = HQ // HK
    R: constexpr = triton.next_power_of_2(TILE_ROWS * GROUP)
    WIDE: constexpr = triton.next_power_of_2(D)
    shape: constexpr = AttentionShape(ROWS, R, HQ, HK, D, WIDE, NORMS, TURNS, WINDOW, CAP)
    r = tl.arange(0, R)
    d = tl.arange(0, WIDE)
    programs = tl.num_programs(0)
    earlier_units = 0  # units of the earlier tiles
    paths = (table + 1 + (PER_ROW + 2 * NUMBERS) * ROWS).to(tl.pointer_type(tl.uint8))
    if OVERLAPS:
        gdc_wait()
    for t in range(tl.load(table).to(tl.int32)):
        tile_row, count, feed, fed, slot, start, span, begin, parts, apart = _tile_at(
            table, t, ROWS
        )
        units = HK * parts * tl.where(apart, count, 1)
        first_unit = (tl.program_id(0) + programs - earlier_units % programs) % programs
        for unit in range(first_unit, units, programs):
            head = unit % HK
            part = begin + unit // HK % parts
            unit_row = tile_row + unit // HK // parts
            unit_rows = tl.where(apart, 1, count)
            low = part * span
            end = tl.load(table + ROWS + unit_row + unit_rows).to(tl.int32)
            high = tl.minimum(low + span, end + 1)
            asks = (r % TILE_ROWS < unit_rows) & (r < TILE_ROWS * GROUP)
            row = tl.where(asks, unit_row + r % TILE_ROWS, 0)
            positions = tl.load(table + 1 + ROWS + row, mask=asks, other=0)
            at = slot * slot_stride + head * head_stride
            _write_new(
                table,
                qkv,
                keys + at,
                values + at,
                k_norm,
                squares,
                cos,
                sin,
                feed,
                fed,
                start,
                low,
                high,
                head,
                eps,
                shape,
            )
            query_head = head * GROUP + r // TILE_ROWS
            scales = positions
            norm = q_norm + query_head * 0
            if NORMS == 2:
                scales = root_scale(squares, 0, HQ * D, eps, ROWS, row)
                norm = q_norm + query_head * D
            source = qkv + (row * (HQ + 2 * HK) + query_head) * D
            query = _turned(source, positions, asks, norm, scales, cos, sin, eps, shape)
            if WINDOW:  # no row sees blocks before the window of the least position
                least = tl.min(tl.where(asks, positions, 1 << 30)).to(tl.int32)
                low += tl.maximum(least - WINDOW + 1 - low, 0) // _BLOCK * _BLOCK
            path = paths + unit_row * PATH_BYTES
            nodes_from = tl.where(apart, start, 1 << 30)
            mixed, top, weight = _attend_part(
                query, positions, keys + at, values + at, nodes_from, path, low, high, scale, shape
            )
            place = (row * MOST_PARTS + part) * HQ + query_head
            mask = asks[:, None] & (d < D)[None, :]
            tl.store(sums + place[:, None] * D + d[None, :], mixed, mask=mask)
            tl.store(stats + place * 2, top, mask=asks)
            tl.store(stats + place * 2 + 1, weight, mask=asks)
        earlier_units += units
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def add_parts(
    table,
    sums,
    stats,
    sinks,
    out,
    ROWS: constexpr,
    HQ: constexpr,
    D: constexpr,
    SINKS: constexpr,
    OVERLAPS: constexpr,
):
    """Compute out [ROWS, HQ * D] from the outputs of `attend`, added in the order of the parts.

    SINKS: `sinks` [HQ] has a score for each head that takes part in the softmax but has no value.
    Grid: (query heads, ROWS / TILE_ROWS).
    """
    WIDE: constexpr = triton.next_power_of_2(D)
    rows = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    d = tl.arange(0, WIDE)
    head = tl.program_id(0)
    if OVERLAPS:
        gdc_wait()
    parts = tl.load(table + 1 + 2 * ROWS + rows)
    top = tl.full((TILE_ROWS,), _LOW, tl.float32)
    if SINKS:
        top = tl.maximum(top, tl.load(sinks + head).to(tl.float32))
    at = rows * (MOST_PARTS * HQ) + head
    for part in tl.static_range(MOST_PARTS):  # unrolled, so that loads do not wait for one another
        top = tl.maximum(top, tl.load(stats + (at + part * HQ) * 2, mask=part < parts, other=_LOW))
    mixed = tl.zeros((TILE_ROWS, WIDE), tl.float32)
    weight = tl.zeros((TILE_ROWS,), tl.float32)
    if SINKS:
        weight += tl.exp(tl.load(sinks + head).to(tl.float32) - top)
    for part in tl.static_range(MOST_PARTS):
        place = at + part * HQ
        has_part = part < parts
        fades = tl.exp(tl.load(stats + place * 2, mask=has_part, other=_LOW) - top)
        weight += fades * tl.load(stats + place * 2 + 1, mask=has_part, other=0.0)
        mask = has_part[:, None] & (d < D)[None, :]
        part_sums = tl.load(sums + place[:, None] * D + d[None, :], mask=mask, other=0.0)
        mixed += fades[:, None] * part_sums
    mean = mixed / tl.where(weight > 0, weight, 1.0)[:, None]
    to = out + rows[:, None] * (HQ * D) + head * D + d[None, :]
    tl.store(to, mean.to(out.dtype.element_ty), mask=(parts > 0)[:, None] & (d < D)[None, :])
    if OVERLAPS:
        gdc_launch_dependents()
