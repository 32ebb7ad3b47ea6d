"""Tiles of products in Triton, for `product_kernels` and `expert_kernels`.

Weights of 8 and 16 bits are loaded through shared memory, several blocks ahead. Weights of 4 bits
stay in the registers of the lane that loaded them. If they went through shared memory, each lane
would have to wait until other lanes have unpacked their weights.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import triton
import triton.language as tl
from triton.language import constexpr
from triton.language.extra.cuda import gdc_wait

_COMPILES = constexpr(
    os.environ.get("TRITON_INTERPRET") != "1"
)  # the interpreter has no PTX instructions
_HALF = "{ .reg .b32 t; shr.u32 t, $2, %d; and.b32 t, t, 0x0f0f0f0f; "
_HALF += "prmt.b32 $0, t, 0x43434343, 0x5140; prmt.b32 $1, t, 0x43434343, 0x7362; }"
# These convert the lower or the upper halves of four bytes to two pairs of bfloat16: 128 + half.
_LOWER = constexpr(_HALF % 0)
_UPPER = constexpr(_HALF % 4)


class TileShape(NamedTuple):
    """The constants of `multiply_tile`.

    Attributes:
        K, N: inputs and outputs of the matrix; K is a multiple of BK.
        BN: columns of the tile, which are outputs.
        BK: inputs that a warp multiplies at once.
        S: number of warps. They multiply S successive runs of BK inputs at the same time, and their
            sums are added at the end.
        ROWS: rows of x.
        NORMS: whether x is multiplied by the weights of a norm.
        BITS, GROUP, EXTRA, OFFSET: see `linear_layers.KernelMatrix`.
        APART: 0, or the distance in columns from the BN columns to BN further columns, which are
            multiplied too. For example, the columns are those of gate, and the further columns
            those of up.
        OVERLAPS: see `product_kernels`.
    """

    K: constexpr
    N: constexpr
    BN: constexpr
    BK: constexpr
    S: constexpr
    ROWS: constexpr
    NORMS: constexpr
    BITS: constexpr
    GROUP: constexpr
    EXTRA: constexpr
    OFFSET: constexpr
    APART: constexpr
    OVERLAPS: constexpr


@triton.jit
def _await(weights, BN: constexpr):
    """Prefetch the first weights, at the pointers `weights` [BN], into L2, and wait for the previous kernel."""
    lines = tl.reshape(weights, (BN, 1)) + (tl.arange(0, 4) * 64)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [lines],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    gdc_wait()


@triton.jit
def sum_in_pairs(x):
    """Reduce [M, 2 ** n, R] to [M, R] by adding the second half to the first, again and again.

    The order of tl.sum would depend on the layout, and so on the number of rows.
    """
    M: constexpr = x.shape[0]
    HALF: constexpr = x.shape[1] // 2
    R: constexpr = x.shape[2]
    if HALF == 0:
        sums = tl.reshape(x, (M, R))
    else:
        low, high = tl.split(tl.permute(tl.reshape(x, (M, 2, HALF, R)), (0, 2, 3, 1)))
        sums = sum_in_pairs(low + high)
    return sums


@triton.jit
def weighted(x, weights):
    """Return x times the weights of a norm, rounded to the dtype of x."""
    return (x.to(tl.float32) * weights.to(tl.float32)).to(x.dtype)


@triton.jit
def _load_scales_of(scales, group, columns, N: constexpr, EXTRA: constexpr):
    """Load the scales that the groups `group` of inputs have in `columns`.

    With EXTRA each scale is a pair of numbers, loaded as one word: see `_first`.
    """
    if EXTRA:
        word: constexpr = tl.int64 if scales.dtype.element_ty.primitive_bitwidth == 32 else tl.int32
        scales = scales.to(tl.pointer_type(word), bitcast=True)
    return tl.load(scales + group * N + columns)


@triton.jit
def _load_scales(scales, starts, columns, shape):
    """Load the scales [S, BN, groups] of S runs of BK inputs, which begin at `starts` [S]."""
    BK: constexpr = shape.BK
    GROUP: constexpr = shape.GROUP
    COUNT: constexpr = BK // GROUP if GROUP < BK else 1
    groups = (starts // GROUP)[:, None, None] + tl.arange(0, COUNT)[None, None, :]
    TOTAL: constexpr = shape.N + shape.APART
    return _load_scales_of(scales, groups, columns[None, :, None], TOTAL, shape.EXTRA)


@triton.jit
def _first(pairs, EXTRA: constexpr, second: constexpr, kind: constexpr):
    """Return the first number of each pair; if `second` is true, return the second number.

    Each pair was loaded as one word. Without EXTRA there are no pairs: return the numbers as
    they are.
    """
    if EXTRA:
        BITS: constexpr = kind.primitive_bitwidth
        half: constexpr = tl.int32 if BITS == 32 else tl.int16
        number = (pairs >> (BITS if second else 0)).to(half).to(kind, bitcast=True)
    else:
        number = pairs.to(kind)
    return number


@triton.jit
def _bytes(bytes_, kind: constexpr):
    """Convert int8 or float8 to the dtype of the rows."""
    if _COMPILES and kind == tl.bfloat16 and bytes_.dtype == tl.float8e4nv:
        # The bits of a float8, four places lower, are a bfloat16 of 2 ** -120 times its value.
        numbers = tl.inline_asm_elementwise(
            "{ .reg .b32 t, low, high, sign; mov.b32 t, $2; prmt.b32 low, 0, t, 0x5140; prmt.b32 high, 0, t, 0x7160;"
            " and.b32 sign, low, 0x80008000; shr.u32 low, low, 4; lop3.b32 $0, low, 0x07f007f0, sign, 0xea;"
            " and.b32 sign, high, 0x80008000; shr.u32 high, high, 4; lop3.b32 $1, high, 0x07f007f0, sign, 0xea; }",
            "=r,=r,r",
            [bytes_],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
        numbers = (numbers * 1329227995784915872903807060280344576.0).to(kind)
    else:
        numbers = bytes_.to(kind)
    return numbers


@triton.jit
def _tile(loaded, scales, EXTRA: constexpr, SCALES: constexpr, kind: constexpr):
    """Return the weights [S, BN, BK] of loaded numbers of 8 or 16 bits, see `KernelMatrix`.

    Without SCALES they are returned unscaled.
    """
    S: constexpr = loaded.shape[0]
    BN: constexpr = loaded.shape[1]
    BK: constexpr = loaded.shape[2]
    steps = _bytes(loaded, kind)
    if SCALES:
        COUNT: constexpr = scales.shape[2]
        steps = tl.reshape(steps, (S, BN, COUNT, BK // COUNT))
        second = _first(scales, EXTRA, True, kind)
        if EXTRA == 2:
            steps = steps - second[:, :, :, None]
        steps = steps * _first(scales, EXTRA, False, kind)[:, :, :, None]
        if EXTRA == 1:
            steps = steps + second[:, :, :, None]
        steps = tl.reshape(steps, (S, BN, BK))
    return steps


@triton.jit
def _load_both(scales, starts, columns, shape):
    """Load the scales of `columns`, and those of the columns that are APART further on.

    If APART is 0, return the scales of `columns` twice.
    """
    near = _load_scales(scales, starts, columns, shape)
    far = near
    if shape.APART:
        far = _load_scales(scales, starts, columns + shape.APART, shape)
    return near, far


@triton.jit
def add_warps(sums):
    """Add the sums of the warps: [S, BN, ROWS] -> [BN, ROWS]."""
    S: constexpr = sums.shape[0]
    BN: constexpr = sums.shape[1]
    ROWS: constexpr = sums.shape[2]
    return tl.reshape(sum_in_pairs(tl.reshape(sums, (1, S, BN * ROWS))), (BN, ROWS))


@triton.jit
def multiply_tile(fed, x, norm, w, scales, column, shape):
    """Multiply BN rows of w [N, K], which compute the outputs from `column` on, by x [ROWS, K].

    Return two products [BN, ROWS].  The first is that of the BN rows; the second is that of the BN
    rows that are APART further on, or 0 if APART is 0.

    Args:
        fed: [ROWS], 0 for padding rows, whose product is not needed; None: there are no padding
            rows.
        shape: a `TileShape`.
    """
    if shape.BITS == 4:
        near, far = _multiply_packed(fed, x, norm, w, scales, column, shape)
    else:
        near, far = _multiply_plain(x, norm, w, scales, column, shape)
    return add_warps(near), add_warps(far) if shape.APART else 0


@triton.jit
def _multiply_plain(x, norm, w, scales, column, shape):
    """Compute the products of `multiply_tile` for weights of 8 or 16 bits, a sum for each warp: [S, BN, ROWS]."""
    K: constexpr = shape.K
    BN: constexpr = shape.BN
    BK: constexpr = shape.BK
    S: constexpr = shape.S
    EXTRA: constexpr = shape.EXTRA
    APART: constexpr = shape.APART
    kind: constexpr = x.dtype.element_ty
    # Quantised weights without SCALES have one scale for all inputs of a column.
    SCALES: constexpr = shape.BITS < 16 and (shape.GROUP < K or EXTRA > 0)
    WHOLE: constexpr = K % (S * BK) == 0
    columns = tl.minimum(column + tl.arange(0, BN), shape.N - 1)
    lanes = tl.arange(0, BK)
    warps = tl.arange(0, S) * BK
    rows = x + tl.arange(0, shape.ROWS)[None, None, :] * K
    weights = w + columns[None, :, None].to(tl.int64) * K + lanes[None, None, :]
    if shape.OVERLAPS:
        _await(w + columns.to(tl.int64) * K, BN)
    near = tl.zeros((S, BN, shape.ROWS), tl.float32)
    far = tl.zeros((S, BN, shape.ROWS), tl.float32)
    scale = 0
    scale_apart = 0
    if SCALES:  # loaded a block ahead, so that no product waits for them
        starts = tl.minimum(warps, K - BK)
        scale, scale_apart = _load_both(scales, starts, columns, shape)
    for i in range(0, K, S * BK):
        starts = i + warps
        if not WHOLE:
            starts = tl.minimum(starts, K - BK)
        at = weights + starts[:, None, None]
        loaded = tl.load(at)
        apart = tl.load(at + APART * K) if APART else loaded
        now = scale
        now_apart = scale_apart
        if SCALES:
            following = tl.minimum(i + S * BK + warps, K - BK)
            scale, scale_apart = _load_both(scales, following, columns, shape)
        inputs = starts[:, None, None] + lanes[None, :, None]
        if WHOLE:
            right = tl.load(rows + inputs)
        else:
            right = tl.load(rows + inputs, mask=(i + warps < K)[:, None, None], other=0.0)
        if shape.NORMS:
            right = weighted(right, tl.load(norm + inputs))
        tile = _tile(loaded, now, EXTRA, SCALES, kind)
        near = tl.dot(tile, right, near, input_precision="ieee")
        if APART:
            tile = _tile(apart, now_apart, EXTRA, SCALES, kind)
            far = tl.dot(tile, right, far, input_precision="ieee")
    if shape.BITS < 16 and not SCALES:
        near *= tl.load(scales + columns).to(tl.float32)[None, :, None]
        if APART:
            far *= tl.load(scales + APART + columns).to(tl.float32)[None, :, None]
    return near, far


@triton.jit
def _times_plus(x, factor, summand, WORDS: constexpr):
    """Return x * factor + summand, rounded once. With WORDS, all are words of two bfloat16 each."""
    if WORDS:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;",
            "=r,r,r,r",
            [x, factor, summand],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return x * factor + summand


@triton.jit
def _of_column(numbers, WORDS: constexpr):
    """Return numbers [M] as [M, 1], to combine them with [M, inputs].

    With WORDS, each number is put into both halves of a word.
    """
    if WORDS:
        bits = numbers.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        numbers = bits | (bits << 16)
    return numbers[:, None]


@triton.jit
def _weights(steps, scales, kind: constexpr, WORDS: constexpr, EXTRA: constexpr, OFFSET: constexpr):
    """Return the weights of steps [M, inputs], which have the scales [M].

    A weight is computed from its step, OFFSET and EXTRA as `linear_layers.KernelMatrix` says.
    """
    ONE: constexpr = 0x3F803F80 if WORDS else 1.0
    less = tl.full((1,), -OFFSET, kind)
    if EXTRA == 2:
        less = -(_first(scales, EXTRA, True, kind) + OFFSET).to(kind)
    steps = _times_plus(steps, ONE, _of_column(less, WORDS), WORDS)
    factors = _of_column(_first(scales, EXTRA, False, kind), WORDS)
    steps = _times_plus(steps, factors, -0x7FFF8000 if WORDS else -0.0, WORDS)
    if EXTRA == 1:
        steps = _times_plus(steps, ONE, _of_column(_first(scales, EXTRA, True, kind), WORDS), WORDS)
    return steps


@triton.jit
def _numbers(words):
    """Split words into two bfloat16 each: [...] -> [..., 2]."""
    low = words.to(tl.int16)
    high = (words >> 16).to(tl.int16)
    return tl.join(low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True))


@triton.jit
def _half_of(
    loaded,
    upper: constexpr,
    scales,
    kind: constexpr,
    WORDS: constexpr,
    EXTRA: constexpr,
    OFFSET: constexpr,
    J: constexpr,
):
    """Return the weights [M, J] whose steps are the lower halves of the loaded bytes.

    With `upper`, their steps are the upper halves. With WORDS, four bytes are converted at once,
    because converting each step by itself would take several times as long as loading it.
    """
    if WORDS:
        a, b = tl.inline_asm_elementwise(
            _UPPER if upper else _LOWER,
            "=&r,=&r,r",
            [loaded],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        a = _weights(a, scales, kind, WORDS, EXTRA, OFFSET + 128)
        b = _weights(b, scales, kind, WORDS, EXTRA, OFFSET + 128)
        weights = _numbers(tl.join(a, b))
    else:
        steps = (loaded >> 4) if upper else (loaded & 15)
        weights = _weights(steps.to(kind), scales, kind, WORDS, EXTRA, OFFSET)
    return tl.reshape(weights, (loaded.shape[0], J))


@triton.jit
def _left(lanes, S: constexpr, KEPT: constexpr):
    """Arrange the weights of each lane as the left side of a product.

    [BN * S * 4, J] -> [S, BN, 4 * J]. For lanes and the constants see `_multiply_packed`.
    """
    B: constexpr = lanes.shape[0] // (S * 32)
    J: constexpr = lanes.shape[1]
    parts = tl.reshape(lanes, (B, S, 8, 4, J // (2 * KEPT), 2, KEPT))
    return tl.reshape(tl.permute(parts, (1, 0, 2, 4, 5, 3, 6)), (S, B * 8, 4 * J))


@triton.jit
def _right(lanes, S: constexpr, H: constexpr, KEPT: constexpr):
    """Arrange the inputs of each lane as the right side of a product, the rows' side.

    [ROWS * H * S * 4, 8] -> [S, 32 * H, ROWS]. For the constants see `_multiply_packed`.
    """
    B: constexpr = lanes.shape[0] // (H * S * 32)
    parts = tl.reshape(lanes, (B, H, S, 8, 4, 8 // (2 * KEPT), 2, KEPT))
    return tl.reshape(tl.permute(parts, (2, 1, 5, 6, 4, 7, 0, 3)), (S, 32 * H, B * 8))


@triton.jit
def _load_packed(weights, scales, starts, columns, inner, PER: constexpr, shape):
    """Load each lane's weights and scales, for inputs from `starts` on.

    Return (weights, scale, weights apart, scale apart). The last two are those of the column APART
    further on; without APART they repeat the first two.
    """
    APART: constexpr = shape.APART
    TOTAL: constexpr = shape.N + APART
    at = weights + (starts // PER)[:, None]
    group = (starts + inner) // shape.GROUP
    near = tl.load(at)
    scale = _load_scales_of(scales, group, columns, TOTAL, shape.EXTRA)
    far = near
    scale_apart = scale
    if APART:
        far = tl.load(at + APART * (shape.K // PER))
        scale_apart = _load_scales_of(scales, group, columns + APART, TOTAL, shape.EXTRA)
    return near, scale, far, scale_apart


@triton.jit
def _places(H: constexpr, shape):
    """Return which inputs each lane loads, for lanes in the order of the right side (see `_right`).

    Return (row, start, inputs) of each lane. `start` is the first input of the lane's warp. The
    lane loads inputs of `row`: those at `start` + `inputs`.
    """
    S: constexpr = shape.S
    BK: constexpr = shape.BK
    places = tl.arange(0, shape.ROWS * H * S * 4)
    starts = (places // (S * 32) % H * 8 + places % 4 * (BK // 4))[:, None]
    inputs = starts + tl.arange(0, 8)[None, :]
    return places // (H * S * 32) * 8 + places // 4 % 8, places // 32 % S * BK, inputs


@triton.jit
def _needed(fed, row, is_input):
    """Return `is_input`, but false for padding rows.

    Padding rows are those where `fed` [rows] is 0. If `fed` is None, there are none.
    """
    if fed is not None:
        is_input = is_input & (tl.load(fed + row) != 0)
    return is_input


@triton.jit
def _add_half(
    sums,
    right,
    loaded,
    upper: constexpr,
    scale,
    kind: constexpr,
    WORDS: constexpr,
    KEPT: constexpr,
    shape,
):
    """Return `sums` plus the product of the rows by the lower or upper halves of the loaded weights."""
    J: constexpr = shape.BK // 8
    half = _half_of(loaded, upper, scale, kind, WORDS, shape.EXTRA, shape.OFFSET, J)
    return tl.dot(_left(half, shape.S, KEPT), right, sums, input_precision="ieee")


@triton.jit
def _multiply_packed(fed, x, norm, w, scales, column, shape):
    """Compute the products of `multiply_tile` for weights of 4 bits, a sum for each warp: [S, BN, ROWS].

    A lane loads BK / 4 successive inputs of a column, one block ahead of their use, and unpacks
    them in its registers. Tensors are [lanes, inputs of a lane], with the lanes in the order that
    tensor cores need on the left side of a product. So nothing passes through shared memory, and no
    warp waits for another. Rows are loaded in the order that tensor cores need on the right side.

    A lane's inputs are two halves of J = BK / 8 inputs, and H is J / 8. In both orders, KEPT
    successive inputs of a lane stay together.
    """
    K: constexpr = shape.K
    BN: constexpr = shape.BN
    BK: constexpr = shape.BK
    S: constexpr = shape.S
    kind: constexpr = x.dtype.element_ty
    WORDS: constexpr = _COMPILES and kind == tl.bfloat16
    PER: constexpr = 8 if WORDS else 2  # inputs of a loaded element
    CHUNK: constexpr = BK // 4
    J: constexpr = CHUNK // 2
    H: constexpr = J // 8
    KEPT: constexpr = 4 if WORDS else 2  # successive inputs of a lane, as Triton wants them

    lanes = tl.arange(0, BN * S * 4)
    columns = tl.minimum(column + lanes // (S * 32) * 8 + lanes // 4 % 8, shape.N - 1)
    warps = lanes // 32 % S * BK
    inner = lanes % 4 * CHUNK
    weights = w.to(tl.pointer_type(tl.int32), bitcast=True) if WORDS else w
    words = tl.arange(0, CHUNK // PER)[None, :]
    weights += (columns.to(tl.int64) * (K // PER) + inner // PER)[:, None] + words
    row, warp_start, inputs = _places(H, shape)

    near = tl.zeros((S, BN, shape.ROWS), tl.float32)
    far = tl.zeros((S, BN, shape.ROWS), tl.float32)
    starts = tl.minimum(warps, K - BK)
    loaded, scale, apart, scale_apart = _load_packed(
        weights, scales, starts, columns, inner, PER, shape
    )
    if shape.OVERLAPS:
        gdc_wait()
    for i in range(0, K, S * BK):
        now, now_scale, now_apart, now_scale_apart = loaded, scale, apart, scale_apart
        starts = tl.minimum(i + S * BK + warps, K - BK)
        loaded, scale, apart, scale_apart = _load_packed(
            weights, scales, starts, columns, inner, PER, shape
        )
        is_needed = _needed(fed, row, i + warp_start < K)[:, None]
        begins = tl.minimum(i + warp_start, K - BK)
        for upper in tl.static_range(2):
            at = (begins + upper * J)[:, None] + inputs
            states = tl.load(x + row[:, None] * K + at, mask=is_needed, other=0.0)
            if shape.NORMS:
                states = weighted(states, tl.load(norm + at))
            right = _right(states, S, H, KEPT)
            near = _add_half(near, right, now, upper, now_scale, kind, WORDS, KEPT, shape)
            if shape.APART:
                far = _add_half(
                    far, right, now_apart, upper, now_scale_apart, kind, WORDS, KEPT, shape
                )
    return near, far


@triton.jit
def dequantise(
    w,
    scales,
    out,
    K: constexpr,
    N: constexpr,
    BK: constexpr,
    GROUP: constexpr,
    EXTRA: constexpr,
    OFFSET: constexpr,
    BN: constexpr,
):
    """Compute out [N, K], the weights of a `linear_layers.KernelMatrix` of 4 bits.

    Grid: (tiles of BN columns, K / BK).
    """
    kind: constexpr = out.dtype.element_ty
    PACKED: constexpr = BK // 4
    pieces = tl.arange(0, BN * 4)
    lanes = tl.arange(0, PACKED // 2)
    columns = tl.program_id(0) * BN + pieces // 4
    i = tl.program_id(1) * BK + pieces % 4 * PACKED
    inside = tl.minimum(columns, N - 1)
    loaded = tl.load(w + (inside.to(tl.int64) * (K // 2) + i // 2)[:, None] + lanes[None, :])
    scale = _load_scales_of(scales, i // GROUP, inside, N, EXTRA)
    for upper in tl.static_range(2):
        weights = _half_of(loaded, upper, scale, kind, False, EXTRA, OFFSET, PACKED // 2)
        to = out + (columns.to(tl.int64) * K + i + upper * (PACKED // 2))[:, None] + lanes[None, :]
        tl.store(to, weights, mask=(columns < N)[:, None])
