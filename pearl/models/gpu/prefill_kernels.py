"""Triton kernels for a piece of a prompt: they rotate queries and keys, write to the cache, and attend to it.

The kernels read the slot, the start and the number of tokens from the device's memory. So one recording
(a CUDA graph) serves all pieces; see `prefill`.

A row's bits depend only on its position and its sequence. Blocks of keys are counted from position 0 and
added one after the other; a block or a position that a row does not see adds exactly zero. Blocks that all
rows of a tile see are computed without a mask. This changes no bits: a mask replaces the scores of
hidden positions before any arithmetic on scores, and does not change those of visible positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language import constexpr

from pearl.models.forward.attention import Scoring
from pearl.models.forward.slot_attention import Rope
from pearl.models.forward.slots import Slots

_LOW = constexpr(-1.0e30)  # finite, because -inf - -inf is NaN
_LOG2_E = constexpr(1.4426950408889634)


class Tile(NamedTuple):
    """The size of a program of `attend`: rows, positions that are added at once, warps, and pipeline stages."""

    rows: int
    positions: int
    warps: int
    stages: int


def tile_of(dim: int) -> Tile:
    """Return the tile for heads of this size.

    The queries, and the keys and values of all stages, fit into the shared memory of a Hopper GPU.
    `positions` divides `attention.BLOCK`, and therefore also the number of positions of a slot.
    """
    if dim <= 64:
        return Tile(128, 64, 4, 3)
    if dim == 128:
        return Tile(128, 128, 8, 2)
    if dim == 256:
        return Tile(64, 64, 8, 2)
    return Tile(64, 32, 8, 2)


class BlockShape(NamedTuple):
    """The constants of `_add_blocks`: see `attend`."""

    D: constexpr
    BN: constexpr
    WINDOW: constexpr
    CAPS: constexpr


@triton.jit
def _turned(source, at, cos, sin, TURNS: constexpr, D: constexpr):
    """Load queries or keys [rows, D] from the pointers `source` [rows].

    With TURNS they are rotated to the positions `at` [rows]. The first half of `sin` is negated; see
    `layers.DecoderLayers.angles`.
    """
    d = tl.arange(0, D)
    states = tl.load(source[:, None] + d[None, :])
    if TURNS:
        opposite = tl.load(source[:, None] + ((d + D // 2) % D)[None, :]).to(tl.float32)
        angle = at[:, None] * D + d[None, :]
        turned = states.to(tl.float32) * tl.load(cos + angle).to(tl.float32)
        states = (turned + opposite * tl.load(sin + angle).to(tl.float32)).to(states.dtype)
    return states


@triton.jit
def write(
    inputs,
    queries_keys,
    values,
    cos,
    sin,
    to_keys,
    to_values,
    slot_stride,
    head_stride,
    queries_keys_stride,
    values_stride,
    HQ: constexpr,
    D: constexpr,
    BM: constexpr,
    TURNS: constexpr,
):
    """Write the rows' keys and values to the slot. Grid: (rows / BM, key-value heads).

    For the arguments see `attend`.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    head = tl.program_id(1)
    d = tl.arange(0, D)
    at = tl.load(inputs + 1).to(tl.int32) + rows
    to = tl.load(inputs) * slot_stride + head * head_stride + at[:, None] * D + d[None, :]
    source = queries_keys + rows * queries_keys_stride + (HQ + head) * D
    tl.store(to_keys + to, _turned(source, at, cos, sin, TURNS, D))
    value = tl.load(values + rows[:, None] * values_stride + head * D + d[None, :])
    tl.store(to_values + to, value)


@triton.jit
def _add_blocks(state, low, high, query, keys, values, at, inner, outer, MASKS: constexpr, shape):
    """Add the positions from `low` to `high` - 1 to a state of attention, and return the new state.

    Args:
        state: (weighted sum of values [BM, D], greatest score [BM], sum of weights [BM]), where the weight of
            a position is 2 ** (score - greatest score).
    """
    D: constexpr = shape.D
    mixed, top, weight = state
    n = tl.arange(0, shape.BN)
    d = tl.arange(0, D)
    for begin in range(low, high, shape.BN):
        seats = begin + n
        block = seats[:, None] * D + d[None, :]
        scores = tl.dot(query, tl.trans(tl.load(keys + block)), input_precision="ieee")
        if shape.CAPS:  # outer * tanh(scores * inner / 2 / log2(e))
            scores = outer - 2.0 * outer / (tl.exp2(scores * inner) + 1.0)
        if MASKS:
            seen = seats[None, :] <= at[:, None]
            if shape.WINDOW:
                seen = seen & (seats[None, :] > at[:, None] - shape.WINDOW)
            scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1) if shape.CAPS else tl.max(scores, 1) * inner)
        shares = tl.exp2((scores if shape.CAPS else scores * inner) - higher[:, None])
        fades = tl.exp2(top - higher)
        weight = weight * fades + tl.sum(shares, 1)
        value = tl.load(values + block)
        mixed = tl.dot(
            shares.to(value.dtype), value, mixed * fades[:, None], input_precision="ieee"
        )
        top = higher
    return mixed, top, weight


@triton.jit
def attend(
    inputs,
    queries_keys,
    keys,
    values,
    cos,
    sin,
    sinks,
    out,
    slot_stride,
    head_stride,
    queries_keys_stride,
    inner,
    outer,
    HQ: constexpr,
    HK: constexpr,
    D: constexpr,
    BM: constexpr,
    BN: constexpr,
    WINDOW: constexpr,
    CAPS: constexpr,
    SINKS: constexpr,
    TURNS: constexpr,
):
    """Compute out [rows, HQ * D]: each row attends to the slot's positions up to its own.

    Blocks of BN positions are read whole. Grid: (query heads, rows / BM).

    Args:
        inputs: the slot, the position of the first row, and the number of tokens (`count`). Tiles
            that begin at row `count` or later are padding, and their outputs are zeros.
        queries_keys: the queries and then the keys of each row, not rotated yet; rows are
            `queries_keys_stride` apart.
        inner: scale * log2(e), so that the weights are powers of two; with CAPS, 2 * scale * log2(e) / cap.
        outer: cap * log2(e), with scale and cap as in `attention.Scoring`.
        WINDOW: the layer's window, see `attention.Scoring`; 0: there is none.
        CAPS: whether there is a cap.
        SINKS: whether heads have attention sinks. If so, `sinks` [HQ] adds one score to each head's
            softmax, and no value belongs to this score.
    """
    shape: constexpr = BlockShape(D, BN, WINDOW, CAPS)
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # tiles with most positions begin first
    rows = tile * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    to = out + rows[:, None] * (HQ * D) + head * D + d[None, :]
    if tile * BM >= tl.load(inputs + 2):
        tl.store(to, tl.zeros((BM, D), out.dtype.element_ty))
        return
    slot_head = tl.load(inputs) * slot_stride + head // (HQ // HK) * head_stride
    keys += slot_head
    values += slot_head
    start = tl.load(inputs + 1).to(tl.int32) + tile * BM
    at = start + tl.arange(0, BM)
    query = _turned(queries_keys + rows * queries_keys_stride + head * D, at, cos, sin, TURNS, D)
    top = tl.full((BM,), _LOW, tl.float32)
    weight = tl.zeros((BM,), tl.float32)
    if SINKS:
        top = tl.zeros((BM,), tl.float32) + tl.load(sinks + head).to(tl.float32) * _LOG2_E
        weight += 1.0
    state = (tl.zeros((BM, D), tl.float32), top, weight)
    # Without a window, all rows of the tile see the positions before this one.
    seen_by_all = (start + 1) // BN * BN
    inside = 0
    if WINDOW:
        low = tl.maximum(start - WINDOW + 1, 0) // BN * BN
        inside = (tl.maximum(start + BM - WINDOW, 0) + BN - 1) // BN * BN
        inside = tl.minimum(inside, seen_by_all)
        state = _add_blocks(state, low, inside, query, keys, values, at, inner, outer, True, shape)
    state = _add_blocks(
        state, inside, seen_by_all, query, keys, values, at, inner, outer, False, shape
    )
    mixed, _, weight = _add_blocks(
        state, seen_by_all, start + BM, query, keys, values, at, inner, outer, True, shape
    )
    tl.store(to, (mixed / weight[:, None]).to(out.dtype.element_ty))


@dataclass
class PromptAttention:
    """Computes the attention of a prompt's piece with our kernels, which also rotate queries and keys.

    Args:
        inputs: slot, position of the first row, and number of tokens, on the device.
    """

    inputs: torch.Tensor
    slots: Slots
    scoring: Scoring

    def attend(
        self,
        layer: int,
        queries_keys: torch.Tensor,
        values: torch.Tensor,
        rope: Rope | None,
    ) -> torch.Tensor:
        """See `TorchAttention.attend`."""
        n, kv_heads, dim = values.shape
        heads = queries_keys.shape[1] - kv_heads
        scoring = self.scoring
        keys = self.slots.keys[:, layer]
        all_values = self.slots.values[:, layer]
        sinks = scoring.sinks_of(layer)
        out = queries_keys.new_empty(n, heads * dim)
        cos, sin = rope or (queries_keys, queries_keys)
        strides = (keys.stride(0), keys.stride(1), queries_keys.stride(0))
        sizes = {"HQ": heads, "D": dim, "TURNS": rope is not None}
        written_rows = min(32, n)
        write[(n // written_rows, kv_heads)](
            self.inputs,
            queries_keys,
            values,
            cos,
            sin,
            keys,
            all_values,
            *strides,
            values.stride(0),
            BM=written_rows,
            **sizes,
        )
        tile = tile_of(dim)
        rows = min(tile.rows, n)
        log2e = 1 / math.log(2)
        inner = scoring.scale * log2e
        if scoring.cap:
            inner = 2 * inner / scoring.cap
        attend[(heads, n // rows)](
            self.inputs,
            queries_keys,
            keys,
            all_values,
            cos,
            sin,
            queries_keys if sinks is None else sinks,
            out,
            *strides,
            inner,
            scoring.cap * log2e,
            HK=kv_heads,
            BM=rows,
            BN=tile.positions,
            WINDOW=scoring.windows[layer],
            CAPS=scoring.cap != 0,
            SINKS=sinks is not None,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **sizes,
        )
        return out
