"""Products of a forward pass whose bits do not depend on how many rows are computed together.

Most libraries choose their order of summation by the number of rows. So we multiply with `products.c` on
a CPU (`Native`), and with our kernels on a GPU (`KernelMatrix`). A `Matrix` holds weights in the layout
that is fastest on its device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import gcd
from typing import Any, Literal, Protocol

import torch
from torch.nn.functional import gelu, linear, relu, rms_norm, silu

from pearl.models.cpu import native
from pearl.models.forward.quantised import (
    GROUP,
    QuantisedMatrix,
    StoredMatrix,
    Weights,
    are_alike,
    rounded,
    stacked,
)

Rounding = Literal["", "int8", "int4"]
# From this number of weights in its layers on, a model counts as large: the forward of one token
# takes as long as reading the weights.
LARGE = 100_000_000


class Matrix(Protocol):
    """A linear layer's weights in the layout of a device."""

    def __call__(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x times the matrix, plus y if y is given."""
        ...


@dataclass(frozen=True)
class KernelMatrix:
    """Holds weights for our kernels on a GPU, which multiply them in the rows' dtype.

    Weights that are not quantised are stored as they are, [out, in]. Quantised weights are stored
    as small numbers ("steps") and scales. Steps of 8 bits are [out, in], int8 or float8_e4m3fn.
    Steps of 4 bits are packed into bytes [out, in / 2]. For example, if `packed_together` is 32,
    byte 0 of a row holds input 0 in its lower half and input 16 in its upper half, and byte 15
    holds inputs 15 and 31.

    Attributes:
        weight: the weights or steps.
        bias: [out].
        scales: [groups, out, 1 or 2]: each group's scale and, unless `extra` is 0, a second number;
            None if the weights are not quantised.
        bits: bits of a step; 16 for weights that are not quantised.
        group: number of inputs that share a scale.
        extra: how a weight is computed:
            0: (step - offset) * scale;
            1: (step - offset) * scale + second;
            2: (step - offset - second) * scale.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    scales: torch.Tensor | None = None
    bits: int = 16
    group: int = 0
    extra: int = 0
    offset: float = 0.0

    @staticmethod
    def of(
        weights: QuantisedMatrix,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> KernelMatrix:
        """Lay quantised weights out for the kernels.

        If the kernels have no layout for them, the weights are dequantised to `dtype`.
        """
        outputs, inputs = weights.shape
        if weights.table is not None and weights.fits_bytes:
            weights = weights.in_bytes(weights.group)
        group = weights.group
        packed = packed_together(inputs, group)
        is_unknown = weights.order is not None or weights.table is not None
        is_even = group % 16 == 0 and (group & (group - 1) == 0 or group == inputs)
        if is_unknown or not is_even or (weights.bits == 4 and not packed):
            return KernelMatrix(weights.dequantised().to(dtype), bias)
        columns = [weights.whole_scales()]
        extra = 0
        least = weights.whole_least()
        if weights.least is not None and least is not None:
            extra = 1
            columns.append(least)
        elif weights.zeros is not None:
            extra = 2
            columns.append(weights.zeros)
        scales = torch.stack([column.T.to(dtype) for column in columns], -1)
        steps = weights.steps
        offset = weights.offset
        bits = 8
        if weights.bits == 4:
            bits = 4
            low, high = steps.view(outputs, -1, 2, packed // 2).unbind(2)
            steps = (low | high << 4).flatten(1)
        elif steps.dtype == torch.uint8:
            steps = (steps.to(torch.int16) - int(offset)).to(torch.int8)
            offset = 0.0
        return KernelMatrix(steps, bias, scales, bits, group, extra, offset)

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        outputs, width = self.weight.shape[-2:]
        if self.bits == 4:
            return outputs, 2 * width
        return outputs, width

    def options(self) -> dict[str, Any]:
        """Return the kernel constants that describe how the weights are stored."""
        group = self.group or self.shape[1]
        return {
            "BITS": self.bits,
            "GROUP": group,
            "EXTRA": self.extra,
            "OFFSET": self.offset,
        }

    def constants(self) -> dict[str, Any]:
        """Return the constants that a product's kernel takes from the matrix, but without N."""
        return self.options() | {
            "K": self.shape[1],
            "BIAS": self.bias is not None,
        }

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (weights, scales, bias) as kernel arguments.

        The weights also stand in place of missing scales or a missing bias, which no kernel reads.
        """
        weight = self.weight
        scales = weight if self.scales is None else self.scales
        bias = weight if self.bias is None else self.bias
        return weight, scales, bias

    def __call__(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None = None,
    ) -> torch.Tensor:
        product = linear(x, self.dequantised(), self.bias)
        if y is None:
            return product
        return y + product

    def dequantised(self) -> torch.Tensor:
        """Return the weights [out, in]; those that were quantised have the dtype of the scales."""
        if self.scales is None:
            return self.weight
        packed = packed_together(self.shape[1], self.group)
        if self.bits == 4 and self.weight.is_cuda:
            return self._dequantised_on_gpu(4 * packed)
        outputs = len(self.weight)
        steps = self.weight
        if self.bits == 4:
            chunks = steps.view(outputs, -1, packed // 2)
            steps = torch.stack((chunks & 15, chunks >> 4), 2)
        numbers = self.scales.transpose(0, 1)[..., None]
        scale = numbers[:, :, 0]
        second = numbers[:, :, -1]
        weights = steps.to(scale.dtype).view(outputs, -1, self.group) - self.offset
        if self.extra == 2:
            weights = weights - second
        weights = weights * scale
        if self.extra == 1:
            weights = weights + second
        return weights.view(self.shape)

    def _dequantised_on_gpu(self, inputs_at_once: int) -> torch.Tensor:
        from pearl.models.gpu import tile_kernels

        assert self.scales is not None
        outputs, inputs = self.shape
        weights = torch.empty(self.shape, dtype=self.scales.dtype, device=self.weight.device)
        grid = (-(-outputs // 32), inputs // inputs_at_once)
        tile_kernels.dequantise[grid](
            self.weight,
            self.scales,
            weights,
            GROUP=self.group,
            EXTRA=self.extra,
            OFFSET=self.offset,
            K=inputs,
            N=outputs,
            BK=inputs_at_once,
            BN=32,
        )
        return weights


def packed_together(inputs: int, group: int) -> int:
    """Return how many inputs share a group of packed bytes in `KernelMatrix`: 32 or 16.

    Return 0 if neither fits the number of inputs and the group of a scale.
    """
    for size in (32, 16):
        if inputs % (4 * size) == 0 and group % size == 0:
            return size
    return 0


def matrix(
    *linears: Any,
    dtype: torch.dtype,
    is_native: bool,
    rounding: Rounding = "",
    wide: bool = False,
    rounds_rows: bool = False,
) -> Matrix:
    """Join linear layers that have the same input into one matrix; their outputs are side by side.

    The weights are taken away from the layers, so that a large model is never in memory twice.

    Args:
        dtype: the dtype of the model, and so of most rows.
        is_native: whether to lay the weights out for our C, if it takes their number of inputs.
            Otherwise they are laid out for our GPU kernels.
        rounding: see `quantised.rounded`; quantised weights stay as they are.
        wide: whether our C returns float32 results, whatever the dtype of the rows.
        rounds_rows: whether our C rounds rows to 8 bits; see `native.Native`.
    """
    taken = [_take_weight(layer, rounding) for layer in linears]
    biases = [layer.bias for layer in linears]
    is_native = is_native and native.takes_inputs(taken[0].shape[1])
    if is_native and len(taken) == 1:
        return _native(taken[0], biases[0], wide, rounds_rows)
    weights = [_whole(weight) for weight in taken]
    if not is_native:
        return for_kernels(weights, _joined_bias(biases), dtype)
    runs = [[0]]
    for number in range(1, len(weights)):
        if are_alike(weights[number - 1], weights[number]):
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = []
    for run in runs:
        together = _together([weights[number] for number in run])
        bias = _joined_bias([biases[number] for number in run])
        parts.append(_native(together, bias, wide, rounds_rows))
    if len(parts) == 1:
        return parts[0]
    return SideBySide(parts)


def _take_weight(layer: Any, rounding: Rounding) -> Weights | StoredMatrix:
    weight: Weights | StoredMatrix = layer.weight
    layer.weight = None
    if not isinstance(weight, torch.Tensor):
        return weight
    weight = weight.detach()
    if rounding:
        return rounded(weight, rounding)
    return weight


def _whole(weight: Weights | StoredMatrix) -> Weights:
    if isinstance(weight, StoredMatrix):
        return weight.whole()
    return weight


def _together(weights: Sequence[Any]) -> Weights:
    if len(weights) == 1:
        weight: Weights = weights[0]
        return weight
    if isinstance(weights[0], QuantisedMatrix):
        return stacked(weights)
    return torch.cat(list(weights))


def _joined_bias(biases: Sequence[Any]) -> torch.Tensor | None:
    if biases[0] is None:
        return None
    return torch.cat(list(biases))


def for_kernels(
    weights: Sequence[Weights],
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> KernelMatrix:
    """Join several matrices into one for our GPU kernels, with their outputs side by side.

    Matrices that are quantised in different ways are converted to steps of 8 bits. All are
    dequantised if one of them does not fit into such steps, or is not quantised.
    """
    quantised = [weight for weight in weights if isinstance(weight, QuantisedMatrix)]
    are_bytes = all(weight.fits_bytes and weight.order is None for weight in quantised)
    is_mixed = not all(are_alike(weights[0], weight) for weight in weights)
    if len(quantised) < len(weights) or (is_mixed and not are_bytes):
        plain = []
        for weight in weights:
            if isinstance(weight, QuantisedMatrix):
                weight = weight.dequantised().to(dtype)
            plain.append(weight)
        return KernelMatrix(torch.cat(plain), bias)
    if is_mixed:
        group = gcd(*(weight.group for weight in quantised))
        quantised = [weight.in_bytes(group) for weight in quantised]
    return KernelMatrix.of(stacked(quantised), bias, dtype)


def _native(
    weight: Weights | StoredMatrix,
    bias: torch.Tensor | None,
    wide: bool,
    rounds_rows: bool,
) -> native.Native:
    """Lay weights out for our C. Quantised weights that our C cannot multiply by are dequantised."""
    if isinstance(weight, StoredMatrix) and not native.takes(next(weight.pieces(1))):
        weight = weight.whole()
    if isinstance(weight, QuantisedMatrix) and not native.takes(weight):
        weight = weight.dequantised()
        if multiplies_bf16():
            weight = weight.to(torch.bfloat16)
    return native.Native(weight, bias, wide, rounds_rows)


@dataclass(frozen=True)
class SideBySide:
    """Multiplies by several matrices of different layouts, and puts their outputs side by side."""

    parts: Sequence[native.Native]

    @property
    def rounds_rows(self) -> bool:
        return any(part.rounds_rows for part in self.parts)

    def __call__(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None = None,
    ) -> torch.Tensor:
        product = torch.cat([part(x) for part in self.parts], -1)
        if y is None:
            return product
        return y + product


def dtype_of_rows(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which our C computes the rows of a model of `dtype`.

    It is float32 for a model in float16, which our C does not compute.
    """
    if dtype == torch.float16:
        return torch.float32
    return dtype


def rounding_for(model: Any) -> Rounding:
    """Return how to round a draft's weights: "int4" for a large bfloat16 model on a CPU, else "".

    With "int4" a token of such a model takes a third of the time. Models whose matrices are
    quantised already are not rounded.
    """
    layers = model.model.layers
    attention = layers[0].self_attn
    mlp = layers[0].mlp
    if native.library() is None or not hasattr(mlp, "gate_proj"):  # has experts
        return ""
    size = 0
    matrices = [
        attention.q_proj,
        attention.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
    ]
    for part in matrices:
        if isinstance(part.weight, QuantisedMatrix) or part.weight.shape[1] % GROUP:
            return ""
        size += part.weight.numel()
    is_large = len(layers) * size >= LARGE
    gate = mlp.gate_proj.weight
    is_bf16 = torch.equal(gate.bfloat16().float(), gate.float())
    if is_large and is_bf16:
        return "int4"
    return ""


@cache
def multiplies_bf16() -> bool:
    """Return whether this CPU has bfloat16 instructions.

    On a CPU that has none, products in bfloat16 take several times as long.
    """
    has_mkldnn = torch.backends.mkldnn.is_available()
    return has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def gated(gate_up: torch.Tensor, name: str = "silu") -> torch.Tensor:
    """Return activation(gate) * up of columns [gate, up]: [n, 2 * inner] -> [n, inner].

    Args:
        name: one of `_ACTIVATIONS`.
    """
    if name in _NATIVE_ACTIVATIONS and native.computes(gate_up):
        return native.gated(gate_up, name == "gelu")
    gate, up = gate_up.chunk(2, -1)
    return _ACTIVATIONS[name](gate).mul_(up)


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return relu(x).square()


_NATIVE_ACTIVATIONS = ("silu", "gelu")
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu": partial(gelu, approximate="tanh"),  # as Gemma's
    "erf_gelu": gelu,
    "quick_gelu": _quick_gelu,
    "relu": relu,
    "squared_relu": _squared_relu,
}


def normalise(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the RMS norm over the last dimension, x / sqrt(mean(x^2) + eps) * weight.

    As in transformers, x is normalised in float32, rounded, and then multiplied by the weights. If the
    weights have another dtype than `x`, only the product is rounded.

    Args:
        dtype: the dtype of the result; None: the dtype of `weight`.
    """
    dtype = dtype or weight.dtype
    if native.computes(x, weight) and dtype in (torch.float32, torch.bfloat16):
        return native.normalise(x, weight, eps, dtype)
    if x.dtype != weight.dtype:
        x = x.float()
        weight = weight.float()
    return rms_norm(x, weight.shape, weight, eps).to(dtype)
