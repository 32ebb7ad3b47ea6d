"""Triton kernels of a decoding forward of a fixed number of rows: embeddings, products, norms.

Reading the weights is what a forward of few rows spends its time on, so a layer is few kernels: normalising and the
query-key-value product; attention in two (see `attention_kernels`); output and residual; normalising, gate and up; down
and residual.  A product that leaves the hidden state leaves its sums of squares too, for the next norm.

A row's bits depend on its own tokens only.  Weights are the left side of a product and rows the right one, so that
another number of rows is more columns of the same instructions; sums that are computed in parts of the inputs are added
in the order of the parts, by whichever program is the last to finish one.

ROWS: of the table (see `row_table`).  OVERLAPS: a kernel is launched while the one before it ends, and waits for it
("programmatic dependent launch").

`TRITON_INTERPRET=1` runs the kernels on a CPU.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language import constexpr
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SQUARED = constexpr(16)  # columns whose sum of squares is kept
_COMPILES = constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # else there are no instructions to name
_SPREAD = constexpr("prmt.b32 low, t, 0, 0x4140; prmt.b32 high, t, 0, 0x4342;")  # four bytes to two pairs of 16 bits
_STEPS = constexpr("lop3.b32 $0, low, 0x000f000f, 0x43004300, 0xea; lop3.b32 $1, high, 0x000f000f, 0x43004300, 0xea; }")


@triton.jit
def _await(weights, BN: constexpr):
    """Wait for the kernel before this one, while the first weights, at `weights` [BN], come to the cache (L2)."""
    lines = tl.reshape(weights, (BN, 1)) + (tl.arange(0, 4) * 64)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )
    gdc_wait()


@triton.jit
def sum_in_pairs(x):
    """[M, 2 ** n, R] -> [M, R]: the first half plus the second, again and again.

    tl.sum adds in an order that depends on the layout, and so on the number of rows.
    """
    M: constexpr = x.shape[0]
    HALF: constexpr = x.shape[1] // 2
    R: constexpr = x.shape[2]
    if HALF == 0:
        found = tl.reshape(x, (M, R))
    else:
        low, high = tl.split(tl.permute(tl.reshape(x, (M, 2, HALF, R)), (0, 2, 3, 1)))
        found = sum_in_pairs(low + high)
    return found


@triton.jit
def root_scale(squares, first: constexpr, WIDTH: constexpr, eps, ROWS: constexpr, rows):
    """Reciprocal root mean squares of `rows` over WIDTH columns, from the sums of squares of every 16 columns.

    squares: [columns / 16, ROWS]. first: the first of those columns, in 16.
    """
    TILES: constexpr = WIDTH // SQUARED
    R: constexpr = rows.shape[0]
    found = tl.zeros((SQUARED, R), tl.float32)
    for begin in tl.static_range(0, TILES, SQUARED):
        tiles = begin + tl.arange(0, SQUARED)[:, None]
        found += tl.load(squares + (first + tiles) * ROWS + rows[None, :], mask=tiles < TILES, other=0.0)
    found = tl.reshape(sum_in_pairs(tl.reshape(found, (1, SQUARED, R))), (R,))
    return 1.0 / tl.sqrt(found / WIDTH + eps)


@triton.jit
def _store_squares(x, squares, tile, BN: constexpr, ROWS: constexpr):
    """Keep the sums of squares of x [BN, ROWS], the columns of a tile."""
    MANY: constexpr = BN // SQUARED
    each = sum_in_pairs(tl.reshape(x * x, (MANY, SQUARED, ROWS)))
    rows, many = tl.arange(0, ROWS), tl.arange(0, MANY)
    tl.store(squares + (tile * MANY + many)[:, None] * ROWS + rows[None, :], each)


@triton.jit
def weighted(x, weights):
    """x times the weights of a norm, rounded."""
    return (x.to(tl.float32) * weights.to(tl.float32)).to(x.dtype)


@triton.jit
def embed(table, embedding, x, squares, scale, H: constexpr, BN: constexpr, ROWS: constexpr, OVERLAPS: constexpr):
    """x [ROWS, H]: the embeddings of a table's tokens, times `scale`. Grid: tiles of BN columns."""
    rows, columns = tl.arange(0, ROWS), tl.program_id(0) * BN + tl.arange(0, BN)
    if OVERLAPS:
        gdc_wait()
    found = tl.load(embedding + tl.load(table + 1 + rows)[None, :] * H + columns[:, None])
    found = (found.to(tl.float32) * scale).to(found.dtype)
    tl.store(x + rows[None, :] * H + columns[:, None], found)
    _store_squares(found.to(tl.float32), squares, tl.program_id(0), BN, ROWS)
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def add(
    x, part, part_squares, norm, squares, multiplier, eps, H: constexpr, BN: constexpr, ROWS: constexpr,
    NORMS: constexpr, OVERLAPS: constexpr,
):  # fmt: skip
    """Add `part` [ROWS, H], normalised if NORMS and times `multiplier`, to x, and keep the sums of squares of that.

    Grid: tiles of BN columns.
    """
    rows, columns = tl.arange(0, ROWS), tl.program_id(0) * BN + tl.arange(0, BN)
    at = rows[None, :] * H + columns[:, None]
    if OVERLAPS:
        gdc_wait()
    found = tl.load(part + at)
    if NORMS:
        scale = root_scale(part_squares, 0, H, eps, ROWS, rows)
        found = weighted((found.to(tl.float32) * scale[None, :]).to(found.dtype), tl.load(norm + columns)[:, None])
    found = (tl.load(x + at).to(tl.float32) + found.to(tl.float32) * multiplier).to(x.dtype.element_ty)
    tl.store(x + at, found)
    _store_squares(found.to(tl.float32), squares, tl.program_id(0), BN, ROWS)
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def _store(
    found, bias, out, squares, tile, columns, multiplier, N: constexpr, BN: constexpr, ROWS: constexpr, ADDS: constexpr,
    SQUARES: constexpr, BIAS: constexpr,
):  # fmt: skip
    rows, inside = tl.arange(0, ROWS), (columns < N)[:, None]
    at = out + rows[None, :] * N + columns[:, None]
    if BIAS:
        found = found.to(out.dtype.element_ty).to(tl.float32)
        found += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    if ADDS:
        found = found * multiplier + tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    rounded = found.to(out.dtype.element_ty)
    tl.store(at, rounded, mask=inside)
    if SQUARES:
        _store_squares(rounded.to(tl.float32), squares, tile, BN, ROWS)


@triton.jit
def load_scales(scales, starts, columns, N: constexpr, BK: constexpr, GROUP: constexpr, EXTRA: constexpr):
    """The scales of BK inputs from each of `starts` on, [S, BN, groups]; with EXTRA pairs, see `_first`."""
    MANY: constexpr = BK // GROUP if GROUP < BK else 1
    at = ((starts // GROUP)[:, None, None] + tl.arange(0, MANY)[None, None, :]) * N + columns[None, :, None]
    if EXTRA:
        word: constexpr = tl.int64 if scales.dtype.element_ty.primitive_bitwidth == 32 else tl.int32
        found = tl.load(scales.to(tl.pointer_type(word), bitcast=True) + at)
    else:
        found = tl.load(scales + at)
    return found


@triton.jit
def _first(pairs, EXTRA: constexpr, second: constexpr, kind: constexpr):
    """Of two numbers that were loaded as one word, the first or the second; without EXTRA there is one."""
    if EXTRA:
        BITS: constexpr = kind.primitive_bitwidth
        half: constexpr = tl.int32 if BITS == 32 else tl.int16
        found = (pairs >> (BITS if second else 0)).to(half).to(kind, bitcast=True)
    else:
        found = pairs.to(kind)
    return found


@triton.jit
def _of_half(scales, half: constexpr, BITS: constexpr):
    """Those of the first or second half of the inputs: weights of 4 bits are unpacked in two halves."""
    S: constexpr = scales.shape[0]
    BN: constexpr = scales.shape[1]
    MANY: constexpr = scales.shape[2]
    if BITS == 4 and MANY > 1:
        low, high = tl.split(tl.permute(tl.reshape(scales, (S, BN, 2, MANY // 2)), (0, 1, 3, 2)))
        found = high if half else low
    else:
        found = scales
    return found


@triton.jit
def _nibbles(bytes_, half: constexpr, kind: constexpr):
    """The lower or upper halves of bytes: in bfloat16 plus 128, whose bits take no conversion."""
    if _COMPILES and kind == tl.bfloat16:
        SHIFT: constexpr = "shr.u32 t, $2, 4; " if half else "mov.u32 t, $2; "
        steps = tl.inline_asm_elementwise(
            "{ .reg .b32 t, low, high; " + SHIFT + _SPREAD + _STEPS, "=r,=r,r", [bytes_], dtype=tl.bfloat16,
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        steps = ((bytes_ >> 4) if half else (bytes_ & 15)).to(kind)
        if kind == tl.bfloat16:
            steps += 128
    return steps


@triton.jit
def _bytes(bytes_, kind: constexpr):
    """int8 or float8 in the dtype of the rows."""
    if _COMPILES and kind == tl.bfloat16 and bytes_.dtype == tl.float8e4nv:
        # A bfloat16 has the same bits four places lower, and 2 ** 120 times the value.
        found = tl.inline_asm_elementwise(
            "{ .reg .b32 t, low, high, sign; mov.b32 t, $2; prmt.b32 low, 0, t, 0x5140; prmt.b32 high, 0, t, 0x7160;"
            " and.b32 sign, low, 0x80008000; shr.u32 low, low, 4; lop3.b32 $0, low, 0x07f007f0, sign, 0xea;"
            " and.b32 sign, high, 0x80008000; shr.u32 high, high, 4; lop3.b32 $1, high, 0x07f007f0, sign, 0xea; }",
            "=r,=r,r", [bytes_], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
        found = (found * 1329227995784915872903807060280344576.0).to(kind)
    else:
        found = bytes_.to(kind)
    return found


@triton.jit
def _tile(
    loaded, half: constexpr, scales, BITS: constexpr, EXTRA: constexpr, OFFSET: constexpr, SCALES: constexpr,
    kind: constexpr,
):  # fmt: skip
    """Weights [S, BN, LANES]: a half of what was loaded, see `matrices.Quantised`. Without SCALES those of one step."""
    S: constexpr = loaded.shape[0]
    BN: constexpr = loaded.shape[1]
    LANES: constexpr = loaded.shape[2]
    HIDDEN: constexpr = 128.0 if BITS == 4 and kind == tl.bfloat16 else 0.0  # see `_nibbles`
    steps = _nibbles(loaded, half, kind) if BITS == 4 else _bytes(loaded, kind)
    if SCALES:
        its = _of_half(scales, half, BITS)
        MANY: constexpr = its.shape[2]
        steps = tl.reshape(steps, (S, BN, MANY, LANES // MANY))
        more = _first(its, EXTRA, True, kind)
        if EXTRA == 2:
            steps = steps - (more + (HIDDEN + OFFSET)).to(kind)[:, :, :, None]
        elif BITS == 4:
            steps = (steps - (HIDDEN + OFFSET)).to(kind)
        steps = steps * _first(its, EXTRA, False, kind)[:, :, :, None]
        if EXTRA == 1:
            steps = steps + more[:, :, :, None]
        steps = tl.reshape(steps, (S, BN, LANES))
    elif BITS == 4:
        steps = (steps - (HIDDEN + OFFSET)).to(kind)
    return steps


@triton.jit
def _load_both(
    scales, starts, columns, N: constexpr, BK: constexpr, GROUP: constexpr, EXTRA: constexpr, APART: constexpr
):
    """Those of the columns, and of those APART further on."""
    found = load_scales(scales, starts, columns, N, BK, GROUP, EXTRA)
    return found, load_scales(scales, starts, columns + APART, N, BK, GROUP, EXTRA) if APART else found


@triton.jit
def _load_rows(rows, inputs, there, norm, NORMS: constexpr, WHOLE: constexpr):
    """Rows [S, LANES, ROWS] at `inputs`, times the weights of their norm; zeros where not `there` [S]."""
    found = tl.load(rows + inputs) if WHOLE else tl.load(rows + inputs, mask=there[:, None, None], other=0.0)
    return weighted(found, tl.load(norm + inputs)) if NORMS else found


@triton.jit
def multiply_tile(
    x, norm, w, scales, columns, begin, end, K: constexpr, N: constexpr, BK: constexpr, S: constexpr, ROWS: constexpr,
    NORMS: constexpr, BITS: constexpr, GROUP: constexpr, EXTRA: constexpr, OFFSET: constexpr, APART: constexpr,
    WHOLE: constexpr,
):  # fmt: skip
    """Columns of w [N, K] times x [ROWS, K], [BN, ROWS], over inputs from `begin` to `end`, whole BK.

    Each of S warps takes one of S successive BK inputs, and their sums are added in the end. APART: multiply by the
    columns so much further on too; 0: by none. WHOLE: the number of inputs is a multiple of S * BK.
    """
    kind: constexpr = x.dtype.element_ty
    BN: constexpr = columns.shape[0]
    LANES: constexpr = BK // 2 if BITS == 4 else BK
    ROW: constexpr = K * LANES // BK  # of w, in its elements
    SCALES: constexpr = BITS < 16 and (GROUP < K or EXTRA > 0)  # else there is one for all inputs
    lanes, warps = tl.arange(0, LANES), tl.arange(0, S) * BK
    rows = x + tl.arange(0, ROWS)[None, None, :] * K
    weights = w + columns[None, :, None].to(tl.int64) * ROW + lanes[None, None, :]
    found, other = tl.zeros((S, BN, ROWS), tl.float32), tl.zeros((S, BN, ROWS), tl.float32)
    scale, scale_behind = 0, 0
    if SCALES:  # a block ahead, so that nothing waits for them
        starts = tl.minimum(begin + warps, end - BK)
        scale, scale_behind = _load_both(scales, starts, columns, N, BK, GROUP, EXTRA, APART)
    for i in range(begin, end, S * BK):
        starts = i + warps
        if not WHOLE:
            starts = tl.minimum(starts, end - BK)
        at = weights + (starts * LANES // BK)[:, None, None]
        loaded = tl.load(at)
        behind = tl.load(at + APART * ROW) if APART else loaded
        now, now_behind = scale, scale_behind
        if SCALES:
            following = tl.minimum(i + S * BK + warps, end - BK)
            scale, scale_behind = _load_both(scales, following, columns, N, BK, GROUP, EXTRA, APART)
        for half in tl.static_range(BK // LANES):
            inputs = starts[:, None, None] + half * LANES + lanes[None, :, None]
            some = _load_rows(rows, inputs, i + warps < end, norm, NORMS, WHOLE)
            tile = _tile(loaded, half, now, BITS, EXTRA, OFFSET, SCALES, kind)
            found = tl.dot(tile, some, found, input_precision="ieee")
            if APART:
                tile = _tile(behind, half, now_behind, BITS, EXTRA, OFFSET, SCALES, kind)
                other = tl.dot(tile, some, other, input_precision="ieee")
    first, second = _add_warps(found), _add_warps(other) if APART else 0
    if BITS < 16 and not SCALES:
        first *= tl.load(scales + columns).to(tl.float32)[:, None]
        if APART:
            second *= tl.load(scales + APART + columns).to(tl.float32)[:, None]
    return first, second


@triton.jit
def _add_warps(found):
    """[S, BN, ROWS] -> [BN, ROWS]"""
    S: constexpr = found.shape[0]
    BN: constexpr = found.shape[1]
    ROWS: constexpr = found.shape[2]
    return tl.reshape(sum_in_pairs(tl.reshape(found, (1, S, BN * ROWS))), (BN, ROWS))


@triton.jit
def multiply(
    x, x_squares, norm, w, scales, bias, out, squares, sums, counts, multiplier, eps, K: constexpr, N: constexpr,
    BN: constexpr, BK: constexpr, S: constexpr, PARTS: constexpr, ROWS: constexpr, NORMS: constexpr, ADDS: constexpr,
    SQUARES: constexpr, BIAS: constexpr, BITS: constexpr, GROUP: constexpr, EXTRA: constexpr, OFFSET: constexpr,
    OVERLAPS: constexpr,
):  # fmt: skip
    """out [ROWS, N] = x [ROWS, K] times w [N, K]. Grid: (tiles of BN columns, PARTS).

    NORMS: 1: x is normalised first, by its sums of squares in `x_squares`. ADDS: the product, times `multiplier`, is
    added to `out`. SQUARES: the sums of squares of `out` are kept in `squares`. BIAS: `bias` [N] is added. BITS of a
    weight; if fewer than 16, see `matrices.Quantised` for w and scales. PARTS of the inputs K, whole BK, are computed
    by programs of their own: their sums wait in `sums`. counts [tiles] are zeros, and are left so.
    """
    PART: constexpr = (K // BK + PARTS - 1) // PARTS * BK
    BYTES: constexpr = 2 if BITS == 4 else 1  # inputs of an element of w
    tile, part, rows = tl.program_id(0), tl.program_id(1), tl.arange(0, ROWS)
    columns = tile * BN + tl.arange(0, BN)
    known = tl.minimum(columns, N - 1)
    begin = part * PART
    if OVERLAPS:
        _await(w + known.to(tl.int64) * (K // BYTES) + begin // BYTES, BN)
    end = tl.minimum(begin + PART, K)
    found, _ = multiply_tile(
        x, norm, w, scales, known, begin, end, K, N, BK, S, ROWS, NORMS, BITS, GROUP, EXTRA, OFFSET, 0,
        PART % (S * BK) == 0 and K % PART == 0,
    )  # fmt: skip
    if OVERLAPS:
        gdc_launch_dependents()
    if NORMS:  # after the product, so that its first weights do not wait for this
        found *= root_scale(x_squares, 0, K, eps, ROWS, rows)[None, :]
    if PARTS == 1:
        _store(found, bias, out, squares, tile, columns, multiplier, N, BN, ROWS, ADDS, SQUARES, BIAS)
    else:
        at = sums + tile * PARTS * ROWS * BN + tl.arange(0, BN)[:, None] * ROWS + rows[None, :]
        tl.store(at + part * ROWS * BN, found)
        tl.debug_barrier()
        if tl.atomic_add(counts + tile, 1, sem="acq_rel") == PARTS - 1:
            total = tl.zeros((BN, ROWS), tl.float32)
            for each in tl.static_range(PARTS):
                total += tl.load(at + each * ROWS * BN, cache_modifier=".cg")
            _store(total, bias, out, squares, tile, columns, multiplier, N, BN, ROWS, ADDS, SQUARES, BIAS)
            tl.store(counts + tile, 0)


@triton.jit
def _activated(gate, GELU: constexpr):
    """GELU: by tanh, as Gemma's; else SiLU."""
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * (1 - 1 / (tl.exp(2 * inner) + 1))
    return gate / (1 + tl.exp(-gate))


@triton.jit
def _store_gated(
    gate, up, x_squares, bias, out, columns, known, eps, K: constexpr, N: constexpr, ROWS: constexpr, NORMS: constexpr,
    GELU: constexpr, BIAS: constexpr,
):  # fmt: skip
    kind: constexpr = out.dtype.element_ty
    rows = tl.arange(0, ROWS)
    if NORMS:
        scale = root_scale(x_squares, 0, K, eps, ROWS, rows)[None, :]
        gate, up = gate * scale, up * scale
    if BIAS:
        gate += tl.load(bias + known).to(tl.float32)[:, None]
        up += tl.load(bias + N + known).to(tl.float32)[:, None]
    gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
    found = _activated(gate, GELU).to(kind).to(tl.float32) * up
    tl.store(out + rows[None, :] * N + columns[:, None], found.to(kind), mask=(columns < N)[:, None])


@triton.jit
def gate_up(
    x, x_squares, norm, w, scales, bias, out, sums, counts, eps, K: constexpr, N: constexpr, BN: constexpr,
    BK: constexpr, S: constexpr, PARTS: constexpr, ROWS: constexpr, NORMS: constexpr, GELU: constexpr, BIAS: constexpr,
    BITS: constexpr, GROUP: constexpr, EXTRA: constexpr, OFFSET: constexpr, OVERLAPS: constexpr,
):  # fmt: skip
    """out [ROWS, N]: the activation of gate times up, products of x [ROWS, K] with the halves of w [2 * N, K].

    Grid: (tiles of BN columns, PARTS). All else: see `multiply`.
    """
    PART: constexpr = (K // BK + PARTS - 1) // PARTS * BK
    BYTES: constexpr = 2 if BITS == 4 else 1
    tile, part, rows = tl.program_id(0), tl.program_id(1), tl.arange(0, ROWS)
    columns = tile * BN + tl.arange(0, BN)
    known = tl.minimum(columns, N - 1)
    begin = part * PART
    if OVERLAPS:
        _await(w + known.to(tl.int64) * (K // BYTES) + begin // BYTES, BN)
    gate, up = multiply_tile(
        x, norm, w, scales, known, begin, tl.minimum(begin + PART, K), K, 2 * N, BK, S, ROWS, NORMS, BITS, GROUP, EXTRA,
        OFFSET, N, PART % (S * BK) == 0 and K % PART == 0,
    )  # fmt: skip
    if OVERLAPS:
        gdc_launch_dependents()
    if PARTS == 1:
        _store_gated(gate, up, x_squares, bias, out, columns, known, eps, K, N, ROWS, NORMS, GELU, BIAS)
    else:
        at = sums + tile * (2 * PARTS * ROWS * BN) + tl.arange(0, BN)[:, None] * ROWS + rows[None, :]
        tl.store(at + 2 * part * ROWS * BN, gate)
        tl.store(at + (2 * part + 1) * ROWS * BN, up)
        tl.debug_barrier()
        if tl.atomic_add(counts + tile, 1, sem="acq_rel") == PARTS - 1:
            gate, up = tl.zeros((BN, ROWS), tl.float32), tl.zeros((BN, ROWS), tl.float32)
            for each in tl.static_range(PARTS):
                gate += tl.load(at + 2 * each * ROWS * BN, cache_modifier=".cg")
                up += tl.load(at + (2 * each + 1) * ROWS * BN, cache_modifier=".cg")
            _store_gated(gate, up, x_squares, bias, out, columns, known, eps, K, N, ROWS, NORMS, GELU, BIAS)
            tl.store(counts + tile, 0)


@triton.jit
def dequantise(
    w, scales, out, K: constexpr, N: constexpr, BK: constexpr, GROUP: constexpr, EXTRA: constexpr, OFFSET: constexpr,
    BN: constexpr,
):  # fmt: skip
    """out [N, K]: the weights of a `matrices.Quantised` one of 4 bits. Grid: (tiles of BN columns, K / BK)."""
    LANES: constexpr = BK // 2
    columns, i, lanes = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BK, tl.arange(0, LANES)
    known = tl.minimum(columns, N - 1)
    loaded = tl.load(w + known[None, :, None].to(tl.int64) * (K // 2) + (i // 2 + lanes)[None, None, :])
    its = load_scales(scales, i + tl.arange(0, 1), known, N, BK, GROUP, EXTRA)
    for half in tl.static_range(2):
        found = _tile(loaded, half, its, 4, EXTRA, OFFSET, True, out.dtype.element_ty)
        to = out + columns[None, :, None].to(tl.int64) * K + (i + half * LANES + lanes)[None, None, :]
        tl.store(to, found, mask=(columns < N)[None, :, None])
