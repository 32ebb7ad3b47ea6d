"""Triton kernels of the experts of a forward of 16 rows, and the stacked weights that they read.

The kernels read from the device's memory which experts each row chose, so that one recording (a
CUDA graph) serves every choice. A program computes one tile of an expert's outputs for all rows. So
each expert's weights are read once, and a row's bits do not depend on the other rows.

`TRITON_INTERPRET=1` runs the kernels on a CPU, in float32. With bfloat16 the interpreter gives other
results than a GPU, as `tests/test_interpreter.py` shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import constexpr

from pearl.models.forward.linear_layers import KernelMatrix, packed_together
from pearl.models.gpu.recordings import FED
from pearl.models.gpu.tile_kernels import TileShape, multiply_tile

_COLUMNS = 32  # outputs of a tile
ROWS = constexpr(FED)
_WARPS = 4  # S of a `TileShape`
_TENSORS = ("weight", "scales", "bias")  # the tensors of a `KernelMatrix`


@triton.jit
def _is_first(ids, pair, PAIRS: constexpr):
    """Return whether `pair` is the first pair with its expert.

    A pair is a row and one of the experts that it chose; `ids` [PAIRS] has the expert of each pair.
    """
    pairs = tl.arange(0, triton.next_power_of_2(PAIRS))
    is_alike = tl.load(ids + pairs, mask=pairs < pair, other=-1) == tl.load(ids + pair)
    return tl.sum(is_alike.to(tl.int32), 0) == 0


@triton.jit
def expert_gate_up(
    x,
    ids,
    w,
    scales,
    bias,
    act,
    w_stride,
    scales_stride,
    alpha,
    limit,
    K: constexpr,
    N: constexpr,
    TOP: constexpr,
    BN: constexpr,
    BK: constexpr,
    S: constexpr,
    BITS: constexpr,
    GROUP: constexpr,
    EXTRA: constexpr,
    OFFSET: constexpr,
    BIAS: constexpr,
    CLAMPS: constexpr,
):
    """Compute act [16 * TOP, 16, N]: for each pair, its expert's activations of all rows x [16, K].

    A pair is a row and one of the TOP experts that it chose. It is left out if an earlier pair has
    the same expert.

    Grid: (pairs, tiles). ids: [16, TOP], the expert of each pair. w: [experts, 2 * N, K].
    """
    kind: constexpr = act.dtype.element_ty
    pair = tl.program_id(0)
    if _is_first(ids, pair, ROWS * TOP):
        expert = tl.load(ids + pair)
        rows = tl.arange(0, ROWS)
        columns = tl.program_id(1) * BN + tl.arange(0, BN)
        inside = tl.minimum(columns, N - 1)
        w += expert * w_stride
        scales += expert * scales_stride
        shape: constexpr = TileShape(
            K, N, BN, BK, S, ROWS, False, BITS, GROUP, EXTRA, OFFSET, N, False
        )
        gate, up = multiply_tile(None, x, x, w, scales, tl.program_id(1) * BN, shape)
        if BIAS:
            biases = bias + expert * 2 * N + inside
            gate += tl.load(biases).to(tl.float32)[:, None]
            up += tl.load(biases + N).to(tl.float32)[:, None]
        gate = gate.to(kind).to(tl.float32)
        up = up.to(kind).to(tl.float32)
        if CLAMPS:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit) + 1
        gated = (gate / (1 + tl.exp(-alpha * gate))).to(kind).to(tl.float32) * up
        to = act + (pair * ROWS + rows)[None, :] * N + columns[:, None]
        tl.store(to, gated.to(kind), mask=(columns < N)[:, None])


@triton.jit
def expert_down(
    act,
    ids,
    w,
    scales,
    bias,
    out,
    w_stride,
    scales_stride,
    K: constexpr,
    N: constexpr,
    TOP: constexpr,
    BN: constexpr,
    BK: constexpr,
    S: constexpr,
    BITS: constexpr,
    GROUP: constexpr,
    EXTRA: constexpr,
    OFFSET: constexpr,
    BIAS: constexpr,
):
    """Compute out [16, TOP, N], the outputs of each row's experts, from the `act` of `expert_gate_up`.

    Grid: (pairs, tiles). For pairs and ids see `expert_gate_up`.
    """
    pair = tl.program_id(0)
    if _is_first(ids, pair, ROWS * TOP):
        expert = tl.load(ids + pair)
        rows = tl.arange(0, ROWS)
        columns = tl.program_id(1) * BN + tl.arange(0, BN)
        inside = tl.minimum(columns, N - 1)
        w += expert * w_stride
        scales += expert * scales_stride
        rows_of_pair = act + pair * ROWS * K
        shape: constexpr = TileShape(
            K, N, BN, BK, S, ROWS, False, BITS, GROUP, EXTRA, OFFSET, 0, False
        )
        product, _ = multiply_tile(None, rows_of_pair, act, w, scales, tl.program_id(1) * BN, shape)
        if BIAS:
            product += tl.load(bias + expert * N + inside).to(tl.float32)[:, None]
        for choice in tl.static_range(TOP):
            place = rows * TOP + choice
            chooses = (tl.load(ids + place) == expert)[None, :] & (columns < N)[:, None]
            to = out + place[None, :] * N + columns[:, None]
            tl.store(to, product.to(out.dtype.element_ty), mask=chooses)


class ExpertProducts:
    """Computes a layer's experts, whose matrices are stacked.

    Args:
        each: (gate_up, down) of each expert.
        limits: (alpha, limit) of gpt-oss's activation; None: the activation is SiLU.

    Attributes:
        each: the same matrices, as views of the stacks.
    """

    def __init__(
        self,
        each: Sequence[tuple[KernelMatrix, KernelMatrix]],
        limits: tuple[float, float] | None,
    ) -> None:
        self._limits = limits or (1.0, 0.0)
        self._clamps = limits is not None
        gate_ups, downs = zip(*each, strict=True)
        self._gate_up = _stacked(gate_ups)
        self._down = _stacked(downs)
        self.each = list(zip(_parts(self._gate_up), _parts(self._down), strict=True))

    def __call__(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
    ) -> torch.Tensor:
        """Return the output of each row's experts: x [16, hidden], chosen [16, top] -> [16, top, hidden]."""
        rows, top = chosen.shape
        hidden, inner = self._down.shape
        pairs = rows * top
        act = x.new_empty(pairs, rows, inner)
        outputs = x.new_empty(rows, top, hidden)
        expert_gate_up[(pairs, triton.cdiv(inner, _COLUMNS))](
            x,
            chosen,
            *self._gate_up.tensors(),
            act,
            *_strides(self._gate_up),
            *self._limits,
            N=inner,
            TOP=top,
            CLAMPS=self._clamps,
            **_constants(self._gate_up),
        )
        expert_down[(pairs, triton.cdiv(hidden, _COLUMNS))](
            act,
            chosen,
            *self._down.tensors(),
            outputs,
            *_strides(self._down),
            N=hidden,
            TOP=top,
            **_constants(self._down),
        )
        return outputs


def _stacked(matrices: Sequence[KernelMatrix]) -> KernelMatrix:
    """Return the matrices of all experts as one, with the expert as the first dimension of each tensor."""
    tensors: dict[str, Any] = {}
    for name in _TENSORS:
        if getattr(matrices[0], name) is not None:
            tensors[name] = torch.stack([getattr(matrix, name) for matrix in matrices])
    return replace(matrices[0], **tensors)


def _parts(stack: KernelMatrix) -> list[KernelMatrix]:
    """Return the matrix of each expert, as a view of the stack."""
    parts = []
    for number in range(len(stack.weight)):
        tensors: dict[str, Any] = {}
        for name in _TENSORS:
            tensor = getattr(stack, name)
            if tensor is not None:
                tensors[name] = tensor[number]
        parts.append(replace(stack, **tensors))
    return parts


def _strides(stack: KernelMatrix) -> tuple[int, int]:
    """Return the stride from one expert to the next in the weights, and the same in the scales."""
    weight, scales, _ = stack.tensors()
    return weight.stride(0), scales.stride(0)


def _constants(stack: KernelMatrix) -> dict[str, Any]:
    inputs = stack.shape[1]
    at_once = min(128, inputs & -inputs)
    if stack.bits == 4:
        at_once = 4 * packed_together(inputs, stack.group)
    return {**stack.constants(), "BN": _COLUMNS, "BK": at_once, "S": _WARPS}
