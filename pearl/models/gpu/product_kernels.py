"""Triton kernels of a decoding forward of a fixed number of rows: embeddings, products, norms.

A forward of few rows spends its time on reading the weights, so a layer has few kernels:
* norm and qkv;
* attention, two kernels (see `attention_kernels`);
* output and residual;
* norm, gate and up;
* down and residual.
A kernel that adds a product to the hidden state also stores the sums of squares for the next norm.

A row's bits depend on its own tokens only. In a product the weights are the left side and the rows the
right side, so that a table of more rows only adds columns to the same instructions.

ROWS is the number of the table's rows (see `row_table`). With OVERLAPS, a kernel is launched before
the previous kernel has ended, and waits for its end ("programmatic dependent launch").

`TRITON_INTERPRET=1` runs the kernels on a CPU, in float32. With bfloat16 the interpreter gives other
results than a GPU, as `tests/test_interpreter.py` shows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pearl.models.gpu.tile_kernels import TileShape, multiply_tile, sum_in_pairs, weighted

SQUARED = constexpr(16)  # columns of a sum of squares


@triton.jit
def root_scale(squares, first: constexpr, WIDTH: constexpr, eps, ROWS: constexpr, rows):
    """Return 1 / sqrt(mean(x^2) + eps) of `rows`, where the mean is over WIDTH columns.

    squares: [columns / 16, ROWS], the sum of squares of every 16 columns.
    first: the first of the WIDTH columns, divided by 16.
    """
    TILES: constexpr = WIDTH // SQUARED
    R: constexpr = rows.shape[0]
    sums = tl.zeros((SQUARED, R), tl.float32)
    for begin in tl.static_range(0, TILES, SQUARED):
        tiles = begin + tl.arange(0, SQUARED)[:, None]
        sums += tl.load(
            squares + (first + tiles) * ROWS + rows[None, :], mask=tiles < TILES, other=0.0
        )
    sums = tl.reshape(sum_in_pairs(tl.reshape(sums, (1, SQUARED, R))), (R,))
    return 1.0 / tl.sqrt(sums / WIDTH + eps)


@triton.jit
def _store_squares(x, squares, tile, BN: constexpr, ROWS: constexpr):
    """Store, for each row and each 16 outputs, the sum of squares of x [BN outputs, ROWS].

    `x` is tile number `tile` of the outputs.
    """
    MANY: constexpr = BN // SQUARED
    sums = sum_in_pairs(tl.reshape(x * x, (MANY, SQUARED, ROWS)))
    rows = tl.arange(0, ROWS)
    offsets = tl.arange(0, MANY)
    tl.store(squares + (tile * MANY + offsets)[:, None] * ROWS + rows[None, :], sums)


@triton.jit
def embed(
    table,
    embedding,
    x,
    squares,
    scale,
    H: constexpr,
    BN: constexpr,
    ROWS: constexpr,
    OVERLAPS: constexpr,
):
    """Compute x [ROWS, H]: the embeddings of a table's tokens, times `scale`. Grid: tiles of BN columns."""
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    if OVERLAPS:
        gdc_wait()
    states = tl.load(embedding + tl.load(table + 1 + rows)[None, :] * H + columns[:, None])
    states = (states.to(tl.float32) * scale).to(states.dtype)
    tl.store(x + rows[None, :] * H + columns[:, None], states)
    _store_squares(states.to(tl.float32), squares, tl.program_id(0), BN, ROWS)
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def add(
    x,
    part,
    part_squares,
    norm,
    squares,
    multiplier,
    eps,
    H: constexpr,
    BN: constexpr,
    ROWS: constexpr,
    NORMS: constexpr,
    OVERLAPS: constexpr,
):
    """Compute x += multiplier * part [ROWS, H], and store the sums of squares of x.

    NORMS: `part` is normalised first, with its sums of squares `part_squares`. Grid: tiles of BN columns.
    """
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    at = rows[None, :] * H + columns[:, None]
    if OVERLAPS:
        gdc_wait()
    states = tl.load(part + at)
    if NORMS:
        scale = root_scale(part_squares, 0, H, eps, ROWS, rows)
        normed = (states.to(tl.float32) * scale[None, :]).to(states.dtype)
        states = weighted(normed, tl.load(norm + columns)[:, None])
    hidden = tl.load(x + at).to(tl.float32)
    states = (hidden + states.to(tl.float32) * multiplier).to(x.dtype.element_ty)
    tl.store(x + at, states)
    _store_squares(states.to(tl.float32), squares, tl.program_id(0), BN, ROWS)
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def multiply(
    table,
    x,
    x_squares,
    norm,
    w,
    scales,
    bias,
    out,
    squares,
    multiplier,
    eps,
    K: constexpr,
    N: constexpr,
    BN: constexpr,
    BK: constexpr,
    S: constexpr,
    ROWS: constexpr,
    NORMS: constexpr,
    ADDS: constexpr,
    SQUARES: constexpr,
    BIAS: constexpr,
    BITS: constexpr,
    GROUP: constexpr,
    EXTRA: constexpr,
    OFFSET: constexpr,
    OVERLAPS: constexpr,
):
    """Compute out [ROWS, N], the product of x [ROWS, K] with each row of w [N, K]. Grid: tiles of BN columns.

    NORMS: x is normalised first, with its sums of squares `x_squares`.
    BIAS: `bias` [N] is added to the product.
    ADDS: the product, times `multiplier`, is added to `out`.
    SQUARES: the sums of squares of `out` are stored in `squares`.
    BITS: bits of a weight; if below 16, w and scales are those of a `linear_layers.KernelMatrix`.
    BK, S: see `tile_kernels.TileShape`.
    """
    tile = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    columns = tile * BN + tl.arange(0, BN)
    shape: constexpr = TileShape(
        K, N, BN, BK, S, ROWS, NORMS, BITS, GROUP, EXTRA, OFFSET, 0, OVERLAPS
    )
    product, _ = multiply_tile(table + 1 + 2 * ROWS, x, norm, w, scales, tile * BN, shape)
    if OVERLAPS:
        gdc_launch_dependents()
    # Only after the product, so that its first weights need not wait for the sums of squares.
    if NORMS:
        product *= root_scale(x_squares, 0, K, eps, ROWS, rows)[None, :]
    inside = (columns < N)[:, None]
    at = out + rows[None, :] * N + columns[:, None]
    if BIAS:
        product = product.to(out.dtype.element_ty).to(tl.float32)
        product += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    if ADDS:
        hidden = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
        product = product * multiplier + hidden.to(tl.float32)
    rounded = product.to(out.dtype.element_ty)
    tl.store(at, rounded, mask=inside)
    if SQUARES:
        _store_squares(rounded.to(tl.float32), squares, tile, BN, ROWS)


@triton.jit
def _activated(gate, GELU: constexpr):
    """Return the activation of the gate: the tanh GELU (as in Gemma) if GELU is true, else SiLU."""
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * (1 - 1 / (tl.exp(2 * inner) + 1))
    return gate / (1 + tl.exp(-gate))


@triton.jit
def gate_up(
    table,
    x,
    x_squares,
    norm,
    w,
    scales,
    bias,
    out,
    eps,
    K: constexpr,
    N: constexpr,
    BN: constexpr,
    BK: constexpr,
    S: constexpr,
    ROWS: constexpr,
    NORMS: constexpr,
    GELU: constexpr,
    BIAS: constexpr,
    BITS: constexpr,
    GROUP: constexpr,
    EXTRA: constexpr,
    OFFSET: constexpr,
    OVERLAPS: constexpr,
):
    """Compute out [ROWS, N] = activation(gate) * up.

    gate is the product of x [ROWS, K] with the first half of w [2 * N, K], and up is the product
    with the second half. Grid: tiles of BN columns. For the other arguments see `multiply`.
    """
    kind: constexpr = out.dtype.element_ty
    tile = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    columns = tile * BN + tl.arange(0, BN)
    inside = tl.minimum(columns, N - 1)
    shape: constexpr = TileShape(
        K, N, BN, BK, S, ROWS, NORMS, BITS, GROUP, EXTRA, OFFSET, N, OVERLAPS
    )
    gate, up = multiply_tile(table + 1 + 2 * ROWS, x, norm, w, scales, tile * BN, shape)
    if OVERLAPS:
        gdc_launch_dependents()
    if NORMS:
        scale = root_scale(x_squares, 0, K, eps, ROWS, rows)[None, :]
        gate *= scale
        up *= scale
    if BIAS:
        gate += tl.load(bias + inside).to(tl.float32)[:, None]
        up += tl.load(bias + N + inside).to(tl.float32)[:, None]
    gate = gate.to(kind).to(tl.float32)
    up = up.to(kind).to(tl.float32)
    act = _activated(gate, GELU).to(kind).to(tl.float32) * up
    at = out + rows[None, :] * N + columns[:, None]
    tl.store(at, act.to(kind), mask=(columns < N)[:, None])
