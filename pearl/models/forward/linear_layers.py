"""Products of a forward pass whose bits do not depend on how many rows are computed together.

A `Matrix` multiplies rows by weights in the layout that is fastest for them: on a CPU by `products.c`, on a GPU by our
kernels.  Most others choose their order of summation by the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import gcd
from typing import Any, Literal

import torch
from torch.nn.functional import gelu, linear, relu, rms_norm, silu

from pearl.models.cpu import native
from pearl.models.forward.quantised import (
    GROUP,
    QuantisedMatrix,
    Weights,
    are_alike,
    rounded,
    stacked,
)

Rounding = Literal["", "int8", "int4"]
Matrix = Callable[
    [torch.Tensor, torch.Tensor | None], torch.Tensor
]  # (x, y) -> x times the matrix, plus y if any

_LARGE = 100_000_000  # weights in layers: a model whose forward of one token takes as long as reading them


@dataclass(frozen=True)
class Plain:
    """Weights [out, in] as they are, and a bias [out] if any."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    bits = 16  # at most that: what the kernels multiply as it is

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def options(self) -> dict[str, Any]:
        """The constants of the kernels."""
        return {"BITS": self.bits, "GROUP": self.shape[1], "EXTRA": 0, "OFFSET": 0.0}

    def __call__(self, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        product = linear(x, self.weight, self.bias)
        return product if y is None else y + product


@dataclass(frozen=True)
class Quantised:
    """Weights of 4 or 8 bits for our kernels on a GPU, which multiply by them in the rows' dtype.

    4 bits: bytes [out, in / 2]: of each `packed` inputs the first half in the lower halves of bytes.  8 bits: steps
    [out, in], of int8 or float8_e4m3fn.

    Attributes:
        scales: [groups, out, 1 or 2]. A weight is (step - offset) * the first; plus the second if `extra` is 1; if it
            is 2, the second are zero points, subtracted from the step.
        shape: (outputs, inputs).
        group: inputs that share a scale.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    shape: tuple[int, int]
    bits: int
    group: int
    extra: int = 0
    offset: float = 0.0

    @staticmethod
    def of(
        given: QuantisedMatrix, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> Quantised | Plain:
        """`Plain` weights of `dtype` where the kernels have no layout for these."""
        outputs, inputs = given.shape
        if given.table is not None and given.fits_bytes:
            given = given.in_bytes(given.group)
        steps, extra, offset = given.steps, 0, given.offset
        packed = packed_together(inputs, given.group)
        is_unknown = given.order is not None or given.table is not None
        is_even = given.group % 16 == 0 and (
            given.group & (given.group - 1) == 0 or given.group == inputs
        )
        if is_unknown or not is_even or (given.bits == 4 and not packed):
            return Plain(given.dequantised().to(dtype), bias)
        second = given.zeros if given.least is None else given.whole_least()
        if second is not None:
            extra = 2 if given.least is None else 1
        both = [given.whole_scales()] + ([] if second is None else [second])
        scales = torch.stack([each.T.to(dtype) for each in both], -1)
        if given.bits == 4:
            low, high = steps.view(outputs, -1, 2, packed // 2).unbind(2)
            steps = (low | high << 4).flatten(1)
        elif steps.dtype == torch.uint8:
            steps, offset = (steps.to(torch.int16) - int(offset)).to(torch.int8), 0.0
        bits = 4 if given.bits == 4 else 8
        return Quantised(steps, scales, bias, (outputs, inputs), bits, given.group, extra, offset)

    def options(self) -> dict[str, Any]:
        """The constants of the kernels."""
        return {"BITS": self.bits, "GROUP": self.group, "EXTRA": self.extra, "OFFSET": self.offset}

    def __call__(self, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        product = linear(x, self.dequantised(), self.bias)
        return product if y is None else y + product

    def dequantised(self) -> torch.Tensor:
        """[out, in], in the dtype of the scales."""
        (outputs, inputs), packed = self.shape, packed_together(self.shape[1], self.group)
        if self.bits == 4 and self.weight.device.type == "cuda":
            from pearl.models.gpu import tile_kernels

            found = torch.empty(self.shape, dtype=self.scales.dtype, device=self.weight.device)
            options = self.options() | {"K": inputs, "N": outputs, "BK": 4 * packed, "BN": 32}
            options.pop("BITS")
            grid = -(-outputs // 32), inputs // (4 * packed)
            tile_kernels.dequantise[grid](self.weight, self.scales, found, **options)
            return found
        steps = self.weight
        if self.bits == 4:
            chunks = steps.view(outputs, -1, packed // 2)
            steps = torch.stack((chunks & 15, chunks >> 4), 2)
        scale, *second = (each.T[..., None] for each in self.scales.unbind(-1))
        found = steps.to(scale.dtype).view(outputs, -1, self.group) - self.offset
        if self.extra == 2:
            found = found - second[0]
        found = found * scale
        return (found + second[0] if self.extra == 1 else found).view(self.shape)


def packed_together(inputs: int, group: int) -> int:
    """Inputs whose steps of 4 bits a lane of our kernels loads at once: 32 or 16; 0 where neither fits."""
    return next((size for size in (32, 16) if inputs % (4 * size) == 0 and group % size == 0), 0)


def matrix(
    *linears: Any,
    dtype: torch.dtype,
    rounding: Rounding = "",
    wide: bool = False,
    plain: bool = False,
) -> Matrix:
    """Return several linear layers with one input as one matrix, their outputs side by side.

    Takes the weights away from the layers, so that a large model is never in memory twice.

    Args:
        dtype: of the model, and so of most rows.
        rounding: see `quantised.rounded`; what is quantised already stays as it is.
        wide: keep float32 results in float32.
        plain: for our kernels, as on a GPU: return a `Plain` or a `Quantised` one.
    """
    weights, biases = [each.weight for each in linears], [each.bias for each in linears]
    for each in linears:
        each.weight = None
    weights = [each if isinstance(each, QuantisedMatrix) else each.detach() for each in weights]
    if rounding:
        weights = [
            each if isinstance(each, QuantisedMatrix) else rounded(each, rounding)
            for each in weights
        ]
    if plain or weights[0].device.type == "cuda":
        return _for_kernels(weights, None if biases[0] is None else torch.cat(biases), dtype)
    runs = [[0]]
    for number in range(1, len(weights)):
        if are_alike(weights[number - 1], weights[number]):
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [
        _laid_out(
            _together([weights[number] for number in run]),
            torch.cat([biases[number] for number in run]) if biases[0] is not None else None,
            wide,
        )
        for run in runs
    ]
    return parts[0] if len(parts) == 1 else SideBySide(parts)


def _together(weights: Sequence[Any]) -> Weights:
    if len(weights) == 1:
        one: Weights = weights[0]
        return one
    return stacked(weights) if isinstance(weights[0], QuantisedMatrix) else torch.cat(list(weights))


def _for_kernels(
    weights: list[Weights], bias: torch.Tensor | None, dtype: torch.dtype
) -> Plain | Quantised:
    kinds = [each for each in weights if isinstance(each, QuantisedMatrix)]
    is_mixed = len(kinds) < len(weights) or not all(are_alike(kinds[0], each) for each in kinds)
    are_bytes = all(each.fits_bytes and each.order is None for each in kinds)
    if len(kinds) < len(weights) or (is_mixed and not are_bytes):
        whole = [
            each.dequantised().to(dtype) if isinstance(each, QuantisedMatrix) else each
            for each in weights
        ]
        return Plain(torch.cat(whole), bias)
    if is_mixed:
        group = gcd(*(each.group for each in kinds))
        kinds = [each.in_bytes(group) for each in kinds]
    return Quantised.of(stacked(kinds), bias, dtype)


def _laid_out(weight: Weights, bias: torch.Tensor | None, wide: bool) -> Matrix:
    if isinstance(weight, QuantisedMatrix) and not native.takes(weight):
        weight = weight.dequantised().to(torch.bfloat16 if multiplies_bf16() else torch.float32)
    if isinstance(weight, QuantisedMatrix) or native.takes(weight):
        return native.Native(weight, bias, wide)
    return Plain(weight, bias)


@dataclass(frozen=True)
class SideBySide:
    """Matrices of one input in several layouts, their outputs side by side."""

    parts: Sequence[Matrix]

    def __call__(self, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        product = torch.cat([part(x, None) for part in self.parts], -1)
        return product if y is None else y + product


def dtype_of_rows(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of rows in a model of `dtype`: float32 for float16 on a CPU, where our C takes no such rows."""
    return torch.float32 if device.type == "cpu" and dtype == torch.float16 else dtype


def rounding_for(model: Any) -> Rounding:
    """ "int4" for a large model of bfloat16 weights on a CPU, whose single tokens then take a third of the time.

    Else "", and where its matrices are quantised already.
    """
    layers = model.model.layers
    attention, mlp = layers[0].self_attn, layers[0].mlp
    if native.library() is None or not hasattr(mlp, "gate_proj"):  # experts
        return ""
    parts = attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj
    weights = [part.weight for part in parts]
    if any(isinstance(weight, QuantisedMatrix) or weight.shape[1] % GROUP for weight in weights):
        return ""
    is_large = len(layers) * sum(weight.numel() for weight in weights) >= _LARGE
    is_bf16 = torch.equal(mlp.gate_proj.weight.bfloat16().float(), mlp.gate_proj.weight.float())
    return "int4" if is_large and is_bf16 else ""


@cache
def multiplies_bf16() -> bool:
    """Whether this CPU has instructions for products of bfloat16; without them these take several times as long."""
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def gated(gate_up: torch.Tensor, name: str = "silu") -> torch.Tensor:
    """The activation of the first half of the columns times the second half: [n, 2 * inner] -> [n, inner].

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
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """RMS norm over the last dimension, in `dtype`; None: in that of `weight`.

    As in transformers: in float32, rounded before the weights are applied; after, where these have another dtype than
    `x`.
    """
    dtype = dtype or weight.dtype
    if native.computes(x, weight) and dtype in (torch.float32, torch.bfloat16):
        return native.normalise(x, weight, eps, dtype)
    given = (x, weight) if x.dtype == weight.dtype else (x.float(), weight.float())
    return rms_norm(given[0], weight.shape, given[1], eps).to(dtype)
