"""Triton kernels of a decoding forward of 16 rows: six a layer, and one each for the embedding and the head.

Reading the weights is what a forward of few rows spends its time on, so a layer is few kernels: normalising and the
query-key-value product; rotating, writing to the cache and attention to parts of the positions; their sum; output and
residual; normalising, gate and up; down and residual.  A product that leaves the hidden state leaves its sums of
squares too, for the next norm.

A row's bits depend on its own tokens only.  A product always has 16 rows; sums that are computed in parts (of a
matrix's inputs, of positions) are added in the order of the parts, by whichever program is the last to finish one; and
positions are cut into parts by the row's own position (see `row_table`).

OVERLAPS: a kernel is launched while the one before it ends, and waits for it ("programmatic dependent launch").

`TRITON_INTERPRET=1` runs the kernels on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pearl.models.forward import row_table

ROWS = constexpr(row_table.ROWS)
MOST_PARTS = constexpr(row_table.MOST_PARTS)
SQUARED = constexpr(16)  # columns whose sum of squares is kept
TILE = constexpr(8)  # numbers of a `row_table.Tile`
TILES_AT = constexpr(1 + 3 * row_table.ROWS)  # where a table's tiles begin
_BLOCK = constexpr(64)  # positions at once in attention
_LOW = constexpr(-1.0e30)


@triton.jit
def _await(weights, BN: constexpr):
    """Wait for the kernel before this one, while the first weights, at `weights` [1, BN], come to the cache (L2)."""
    lines = tl.reshape(weights, (BN, 1)) + (tl.arange(0, 4) * 64)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )
    gdc_wait()


@triton.jit
def _scale(squares, eps, K: constexpr):
    """Reciprocal root mean squares [16] of the rows of x [16, K], from the sums of squares of every 16 columns."""
    TILES: constexpr = K // SQUARED
    tiles, rows = tl.arange(0, triton.next_power_of_2(TILES)), tl.arange(0, ROWS)
    at = squares + tiles[:, None] * ROWS + rows[None, :]
    return 1.0 / tl.sqrt(tl.sum(tl.load(at, mask=tiles[:, None] < TILES, other=0.0), 0) / K + eps)


@triton.jit
def _store_squares(x, squares, tile, BN: constexpr):
    """Keep the sums of squares of x [16, BN], the columns of a tile."""
    MANY: constexpr = BN // SQUARED
    each = tl.sum(tl.reshape(x * x, (ROWS, MANY, SQUARED)), 2)
    rows, many = tl.arange(0, ROWS), tl.arange(0, MANY)
    tl.store(squares + (tile * MANY + many)[None, :] * ROWS + rows[:, None], each)


@triton.jit
def _weighted(x, weights):
    """x times the weights of a norm, rounded."""
    return (x.to(tl.float32) * weights.to(tl.float32)[None, :]).to(x.dtype)


@triton.jit
def embed(table, embedding, x, squares, H: constexpr, BN: constexpr, OVERLAPS: constexpr):
    """x [16, H]: the embeddings of a table's tokens. Grid: tiles of BN columns."""
    rows, columns = tl.arange(0, ROWS), tl.program_id(0) * BN + tl.arange(0, BN)
    if OVERLAPS:
        gdc_wait()
    found = tl.load(embedding + tl.load(table + 1 + rows)[:, None] * H + columns[None, :])
    tl.store(x + rows[:, None] * H + columns[None, :], found)
    _store_squares(found.to(tl.float32), squares, tl.program_id(0), BN)
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def _store(
    found, bias, out, squares, tile, columns, N: constexpr, BN: constexpr, ADDS: constexpr, BIAS: constexpr
):  # fmt: skip
    rows, inside = tl.arange(0, ROWS), (columns < N)[None, :]
    at = out + rows[:, None] * N + columns[None, :]
    if BIAS:
        found = found.to(out.dtype.element_ty).to(tl.float32)
        found += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if ADDS:
        found += tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    rounded = found.to(out.dtype.element_ty)
    tl.store(at, rounded, mask=inside)
    if ADDS:
        _store_squares(rounded.to(tl.float32), squares, tile, BN)


@triton.jit
def _weights_of(
    steps, scales, i, columns, K: constexpr, N: constexpr, LANES: constexpr, GROUP: constexpr, EXTRA: constexpr
):  # fmt: skip
    """Weights [LANES, BN] of inputs from `i` on, in the dtype of `steps`; see `matrices.Quantised`."""
    MANY: constexpr = LANES // GROUP if GROUP < LANES else 1
    EACH: constexpr = LANES // MANY
    groups = scales + (i // GROUP + tl.arange(0, MANY))[:, None] * N + columns[None, :]
    steps = tl.reshape(steps, (MANY, EACH, steps.shape[1]))
    scale = tl.load(groups).to(steps.dtype)[:, None, :]
    if EXTRA == 2:
        steps = (steps - tl.load(groups + (K // GROUP) * N).to(steps.dtype)[:, None, :]) * scale
    elif EXTRA == 1:
        steps = steps * scale + tl.load(groups + (K // GROUP) * N).to(steps.dtype)[:, None, :]
    else:
        steps = steps * scale
    return tl.reshape(steps, (LANES, steps.shape[2]))


@triton.jit
def _nibbles(bytes_, half: constexpr, kind: constexpr, OFFSET: constexpr):
    """The lower or upper halves of bytes, less the offset."""
    steps = (bytes_ >> 4) if half else (bytes_ & 15)
    if kind == tl.bfloat16:
        # The bits of 128 + step in bfloat16, which take no conversion.
        bits = steps.to(tl.uint16) | tl.full(steps.shape, 0x4300, tl.uint16)
        return (bits.to(tl.uint16).to(kind, bitcast=True) - (128.0 + OFFSET)).to(kind)
    return steps.to(kind) - OFFSET


@triton.jit
def _tile(
    loaded, half: constexpr, scales, first, columns, K: constexpr, N: constexpr, LANES: constexpr, BITS: constexpr,
    GROUP: constexpr, EXTRA: constexpr, OFFSET: constexpr, kind: constexpr,
):  # fmt: skip
    """Weights [LANES, BN] of inputs from `first` on, in a half of what was loaded."""
    steps = _nibbles(loaded, half, kind, OFFSET) if BITS == 4 else loaded.to(kind)
    if BITS < 16 and GROUP < K:
        steps = _weights_of(steps, scales, first, columns, K, N, LANES, GROUP, EXTRA)
    return steps


@triton.jit
def _multiply(
    found, other, x, norm, w, scales, columns, begin, end, K: constexpr, N: constexpr, BK: constexpr, NORMS: constexpr,
    BITS: constexpr, GROUP: constexpr, EXTRA: constexpr, OFFSET: constexpr, APART: constexpr,
):  # fmt: skip
    """found [16, BN] plus x [16, K] times columns of w [N, K], over inputs from `begin` to `end`.

    APART: likewise `other`, of columns that are so far behind; 0: there is no other.
    """
    kind: constexpr = x.dtype.element_ty
    LANES: constexpr = BK // 2 if BITS == 4 else BK
    ROW: constexpr = K * LANES // BK  # of w, in its elements
    lanes = tl.arange(0, LANES)
    rows = x + tl.arange(0, ROWS)[:, None] * K
    weights = w + columns[None, :].to(tl.int64) * ROW + lanes[:, None]
    for i in range(begin, end, BK):
        loaded = tl.load(weights + i * LANES // BK)
        behind = tl.load(weights + APART * ROW + i * LANES // BK) if APART else loaded
        for half in tl.static_range(BK // LANES):
            first = i + half * LANES
            some = tl.load(rows + (first + lanes)[None, :])
            if NORMS:
                some = _weighted(some, tl.load(norm + first + lanes))
            tile = _tile(loaded, half, scales, first, columns, K, N, LANES, BITS, GROUP, EXTRA, OFFSET, kind)
            found = tl.dot(some, tile, found, input_precision="ieee")
            if APART:
                tile = _tile(
                    behind, half, scales, first, columns + APART, K, N, LANES, BITS, GROUP, EXTRA, OFFSET, kind
                )
                other = tl.dot(some, tile, other, input_precision="ieee")
    if BITS == 8 and GROUP == K:
        found *= tl.load(scales + columns).to(tl.float32)[None, :]
        if APART:
            other *= tl.load(scales + APART + columns).to(tl.float32)[None, :]
    return found, other


@triton.jit
def multiply(
    x, x_squares, norm, w, scales, bias, out, squares, sums, counts, eps, K: constexpr, N: constexpr, BN: constexpr,
    BK: constexpr, PARTS: constexpr, NORMS: constexpr, ADDS: constexpr, BIAS: constexpr, BITS: constexpr,
    GROUP: constexpr, EXTRA: constexpr, OFFSET: constexpr, OVERLAPS: constexpr,
):  # fmt: skip
    """out [16, N] = x [16, K] times w [N, K]. Grid: (tiles of BN columns, PARTS).

    NORMS: x is normalised first, by its sums of squares in `x_squares`. ADDS: the product is added to `out`, whose sums
    of squares are kept in `squares`. BIAS: `bias` [N] is added. BITS of a weight; if fewer than 16, see
    `matrices.Quantised` for w and scales. PARTS of the inputs K, whole BK, are computed by programs of their own: their
    sums wait in `sums`. counts [tiles] are zeros, and are left so.
    """
    PART: constexpr = (K // BK + PARTS - 1) // PARTS * BK
    tile, part, rows = tl.program_id(0), tl.program_id(1), tl.arange(0, ROWS)
    columns = tile * BN + tl.arange(0, BN)
    known = tl.minimum(columns, N - 1)
    found = tl.zeros((ROWS, BN), tl.float32)
    if OVERLAPS:
        _await(
            w + known[None, :].to(tl.int64) * (K // (2 if BITS == 4 else 1)) + part * PART // (2 if BITS == 4 else 1),
            BN,
        )
    begin = part * PART
    end = tl.minimum(begin + PART, K)
    found, _ = _multiply(
        found, found, x, norm, w, scales, known, begin, end, K, N, BK, NORMS, BITS, GROUP, EXTRA, OFFSET, 0
    )
    if OVERLAPS:
        gdc_launch_dependents()
    if NORMS:  # after the product, so that its first weights do not wait for this
        found *= _scale(x_squares, eps, K)[:, None]
    if PARTS == 1:
        _store(found, bias, out, squares, tile, columns, N, BN, ADDS, BIAS)
    else:
        at = sums + tile * PARTS * ROWS * BN + rows[:, None] * BN + tl.arange(0, BN)[None, :]
        tl.store(at + part * ROWS * BN, found)
        tl.debug_barrier()
        if tl.atomic_add(counts + tile, 1, sem="acq_rel") == PARTS - 1:
            total = tl.zeros((ROWS, BN), tl.float32)
            for each in tl.static_range(PARTS):
                total += tl.load(at + each * ROWS * BN, cache_modifier=".cg")
            _store(total, bias, out, squares, tile, columns, N, BN, ADDS, BIAS)
            tl.store(counts + tile, 0)


@triton.jit
def gate_up(
    x, x_squares, norm, w, scales, out, eps, K: constexpr, N: constexpr, BN: constexpr, BK: constexpr, BITS: constexpr,
    GROUP: constexpr, EXTRA: constexpr, OFFSET: constexpr, OVERLAPS: constexpr,
):  # fmt: skip
    """out [16, N] = silu(gate) * up: products of x [16, K], normalised, with halves of w [2 * N, K]. Grid: tiles."""
    kind: constexpr = out.dtype.element_ty
    rows, columns = tl.arange(0, ROWS), tl.program_id(0) * BN + tl.arange(0, BN)
    known = tl.minimum(columns, N - 1)
    gate, up = tl.zeros((ROWS, BN), tl.float32), tl.zeros((ROWS, BN), tl.float32)
    if OVERLAPS:
        _await(w + known[None, :].to(tl.int64) * (K // (2 if BITS == 4 else 1)), BN)
    gate, up = _multiply(gate, up, x, norm, w, scales, known, 0, K, K, 2 * N, BK, True, BITS, GROUP, EXTRA, OFFSET, N)
    if OVERLAPS:
        gdc_launch_dependents()
    scale = _scale(x_squares, eps, K)[:, None]
    gate, up = gate * scale, up * scale
    gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
    found = (gate / (1 + tl.exp(-gate))).to(kind).to(tl.float32) * up
    tl.store(out + rows[:, None] * N + columns[None, :], found.to(kind), mask=(columns < N)[None, :])


@triton.jit
def dequantise(
    w, scales, out, K: constexpr, N: constexpr, BK: constexpr, GROUP: constexpr, EXTRA: constexpr, OFFSET: constexpr,
    BN: constexpr,
):  # fmt: skip
    """out [N, K]: the weights of a `matrices.Quantised` one of 4 bits. Grid: (tiles of BN columns, K / BK)."""
    LANES: constexpr = BK // 2
    columns, i, lanes = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BK, tl.arange(0, LANES)
    known = tl.minimum(columns, N - 1)
    loaded = tl.load(w + known[None, :].to(tl.int64) * (K // 2) + (i // 2 + lanes)[:, None])
    for half in tl.static_range(2):
        steps = _nibbles(loaded, half, out.dtype.element_ty, OFFSET)
        found = _weights_of(steps, scales, i + half * LANES, known, K, N, LANES, GROUP, EXTRA)
        to = out + columns[None, :].to(tl.int64) * K + (i + half * LANES + lanes)[:, None]
        tl.store(to, found, mask=(columns < N)[None, :])


@triton.jit
def _rotated(source, positions, inside, norm, cos, sin, eps, NORMS: constexpr, D: constexpr):
    """Queries or keys [rows, D] that start at `source` [rows], normalised if NORMS, rotated to their positions.

    The first half of `sin` is negated; see `layers.DecoderLayers.angles`.
    """
    d = tl.arange(0, D)
    kind: constexpr = source.dtype.element_ty
    across = (d + D // 2) % D
    own = tl.load(source[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    other = tl.load(source[:, None] + across[None, :], mask=inside[:, None], other=0.0)
    if NORMS:
        full = own.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(full * full, 1) / D + eps)
        own = _weighted((full * scale[:, None]).to(kind), tl.load(norm + d))
        other = _weighted((other.to(tl.float32) * scale[:, None]).to(kind), tl.load(norm + across))
    at = positions[:, None] * D + d[None, :]
    turned = own.to(tl.float32) * tl.load(cos + at).to(tl.float32)
    return (turned + other.to(tl.float32) * tl.load(sin + at).to(tl.float32)).to(kind)


@triton.jit
def _write_new(
    table, qkv, to_keys, to_values, norm, cos, sin, feed, fed, start, low, high, head, eps,
    HQ: constexpr, HK: constexpr, D: constexpr, NORMS: constexpr,
):  # fmt: skip
    """Write the keys and values of a feed's rows whose positions are from `low` to `high`."""
    d, nodes = tl.arange(0, D), tl.arange(0, ROWS)
    row, at = feed + nodes, start + nodes
    inside = (nodes < fed) & (at >= low) & (at < high)
    source = qkv + row * ((HQ + 2 * HK) * D) + (HQ + head) * D
    positions = tl.load(table + 1 + ROWS + row, mask=inside, other=0)
    key = _rotated(source, positions, inside, norm, cos, sin, eps, NORMS, D)
    to_value = (source + HK * D)[:, None] + d[None, :]
    value = tl.load(to_value, mask=inside[:, None], other=0.0, cache_modifier=".cg")
    to = at[:, None] * D + d[None, :]
    tl.store(to_keys + to, key, mask=inside[:, None])
    tl.store(to_values + to, value, mask=inside[:, None])
    tl.debug_barrier()


@triton.jit
def _attend_part(query, sees, keys, values, start, low, high, scale, R: constexpr, D: constexpr):
    """(mixed values [R, D], greatest score [R], sum of shares [R]) of the positions from `low` to `high`."""
    d = tl.arange(0, D)
    kind: constexpr = query.dtype
    top = tl.full((R,), _LOW, tl.float32)
    weight, mixed = tl.zeros((R,), tl.float32), tl.zeros((R, D), tl.float32)
    for begin in range(low, high, _BLOCK):
        there = begin + tl.arange(0, _BLOCK)
        inside = there < high
        at = there[:, None] * D + d[None, :]
        key = tl.load(keys + at, mask=inside[:, None], other=0.0, cache_modifier=".cg")
        value = tl.load(values + at, mask=inside[:, None], other=0.0, cache_modifier=".cg")
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        node = tl.minimum(tl.maximum(there - start, 0), 62).to(tl.int64)
        seen = inside[None, :] & ((there < start)[None, :] | (((sees[:, None] >> node[None, :]) & 1) == 1))
        scores = tl.where(seen, scores, _LOW)
        higher = tl.maximum(top, tl.max(scores, 1))
        shares = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
        fades = tl.exp(top - higher)
        weight = weight * fades + tl.sum(shares, 1)
        mixed = mixed * fades[:, None] + tl.dot(shares.to(kind), value, input_precision="ieee")
        top = higher
    return mixed, top, weight


@triton.jit
def attend(
    table, qkv, keys, values, q_norm, k_norm, cos, sin, sums, stats, slot_stride, head_stride, scale, eps,
    HQ: constexpr, HK: constexpr, D: constexpr, NORMS: constexpr, OVERLAPS: constexpr,
):  # fmt: skip
    """Write the rows' keys and values to their slots, and attend to each part of what the rows see. Any grid.

    A unit of work is one key-value head of one part of a tile's positions, with all query heads that share it; it
    writes the keys and values of its feed that belong into its part.  `add_parts` adds what the parts give.
    """
    GROUP: constexpr = HQ // HK
    R: constexpr = triton.next_power_of_2(ROWS * GROUP)
    WIDTH: constexpr = (HQ + 2 * HK) * D
    r, d, programs = tl.arange(0, R), tl.arange(0, D), tl.num_programs(0)
    before = 0  # units of the tiles before
    if OVERLAPS:
        gdc_wait()
    for t in range(tl.load(table).to(tl.int32)):
        tile = table + TILES_AT + t * TILE
        first, count = tl.load(tile).to(tl.int32), tl.load(tile + 1).to(tl.int32)
        feed, fed = tl.load(tile + 2).to(tl.int32), tl.load(tile + 3).to(tl.int32)
        slot, start = tl.load(tile + 4), tl.load(tile + 5).to(tl.int32)
        span, parts = tl.load(tile + 6).to(tl.int32), tl.load(tile + 7).to(tl.int32)
        end = start + first - feed + count
        asks, row = (r % ROWS < count) & (r < ROWS * GROUP), first + r % ROWS
        positions = tl.load(table + 1 + ROWS + row, mask=asks, other=0)
        sees = tl.load(table + 1 + 2 * ROWS + row, mask=asks, other=1)
        for unit in range((tl.program_id(0) + programs - before % programs) % programs, HK * parts, programs):
            head, part = unit % HK, unit // HK
            low = part * span
            high = tl.minimum(low + span, end)
            begin = slot * slot_stride + head * head_stride
            _write_new(
                table, qkv, keys + begin, values + begin, k_norm, cos, sin, feed, fed, start, low, high, head, eps,
                HQ, HK, D, NORMS,
            )  # fmt: skip
            source = qkv + row * WIDTH + (head * GROUP + r // ROWS) * D
            query = _rotated(source, positions, asks, q_norm, cos, sin, eps, NORMS, D)
            mixed, top, weight = _attend_part(query, sees, keys + begin, values + begin, start, low, high, scale, R, D)
            its = ((t * MOST_PARTS + part) * HK + head) * ROWS * GROUP + r
            tl.store(sums + its[:, None] * D + d[None, :], mixed, mask=asks[:, None])
            tl.store(stats + its * 2, top, mask=asks)
            tl.store(stats + its * 2 + 1, weight, mask=asks)
        before += HK * parts
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def add_parts(table, sums, stats, out, HQ: constexpr, D: constexpr, OVERLAPS: constexpr):
    """out [16, HQ * D]: what the parts of `attend` give together, added in their order. Grid: query heads."""
    r, d, head = tl.arange(0, ROWS), tl.arange(0, D), tl.program_id(0)
    if OVERLAPS:
        gdc_wait()
    for t in range(tl.load(table).to(tl.int32)):
        tile = table + TILES_AT + t * TILE
        first, count = tl.load(tile).to(tl.int32), tl.load(tile + 1).to(tl.int32)
        parts = tl.load(tile + 7).to(tl.int32)
        top = tl.full((ROWS,), _LOW, tl.float32)
        for part in tl.static_range(MOST_PARTS):  # unrolled: so loads do not wait for one another
            its = ((t * MOST_PARTS + part) * HQ + head) * ROWS + r
            there = r < tl.where(part < parts, count, 0)
            top = tl.maximum(top, tl.load(stats + its * 2, mask=there, other=_LOW))
        mixed, weight = tl.zeros((ROWS, D), tl.float32), tl.zeros((ROWS,), tl.float32)
        for part in tl.static_range(MOST_PARTS):
            its = ((t * MOST_PARTS + part) * HQ + head) * ROWS + r
            there = r < tl.where(part < parts, count, 0)
            fades = tl.exp(tl.load(stats + its * 2, mask=there, other=_LOW) - top)
            weight += fades * tl.load(stats + its * 2 + 1, mask=there, other=0.0)
            some = tl.load(sums + its[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
            mixed += fades[:, None] * some
        found = mixed / tl.where(r < count, weight, 1.0)[:, None]
        to = out + (first + r)[:, None] * (HQ * D) + head * D + d[None, :]
        tl.store(to, found.to(out.dtype.element_ty), mask=(r < count)[:, None])
    if OVERLAPS:
        gdc_launch_dependents()
