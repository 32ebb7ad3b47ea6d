"""Products of a forward pass whose bits do not depend on how many rows are computed together.

A `Matrix` multiplies rows by weights in the layout that is fastest for them.  Most kernels choose their order of
summation by the number of rows; those used here do not, or do not from some number of rows on, which `probe` finds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch.nn.functional import gelu, linear, rms_norm, silu

from pearl.errors import ModelError

Rounding = Literal["", "int8", "int4", "stored"]
Matrix = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]  # (x, y) -> x times the matrix, plus y if any

_INT8_COLUMNS = 32  # the int8 kernel reads beyond rows of weights that are no multiple of this
_INT4_GROUP = 32  # weights that share a scale, as in Q4_0 and Q4_1 files
_INT4_ROWS = 64  # rows in a panel of the int4 kernel's layout, which depends on the instruction set: 32 or 64
_CACHED = 1 << 17  # weights that fit a processor's cache, in float32 and a few times over
_LARGE = 100_000_000  # weights in layers: a model whose forward of one token takes as long as reading them
_SERIAL = 32768  # elements: torch splits elementwise operations of at least this size between threads


@dataclass(frozen=True)
class Plain:
    """Weights [out, in] as they are, and a bias [out] if any."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    bits = 16  # at most that: what the kernels multiply as it is

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def __call__(self, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        product = linear(x, self.weight, self.bias)
        return product if y is None else y + product


@dataclass(frozen=True)
class Quantised:
    """Weights of 4 or 8 bits for our kernels on a GPU, in the numbers that the CPU's `Rounded` ones have.

    8 bits: steps [out, in], scales [out]: weight = step * scale.  4 bits, for inputs that are a multiple of 64: words
    [in / 32 / n, out, 32] of n = 2 or 4 steps, the lowest first, of which word i has those of inputs i, i + 32, ...;
    scales [2, in / 32, out], of which the second are the least weights: weight = step * scale + least.

    Attributes:
        shape: (outputs, inputs).
    """

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    shape: tuple[int, int]

    @property
    def bits(self) -> int:
        return 4 if self.scales.dim() == 3 else 8

    def __call__(self, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        if self.bits == 8:
            product = linear(x, self.weight.to(x.dtype)).mul_(self.scales)
            product = product if self.bias is None else product + self.bias
        else:
            product = linear(x, self.dequantised(), self.bias)
        return product if y is None else y + product

    def dequantised(self) -> torch.Tensor:
        """[out, in], in the dtype of the scales."""
        outputs, inputs = self.shape
        if self.bits == 8:
            return self.weight.to(self.scales.dtype).mul_(self.scales[:, None])
        if self.weight.device.type == "cuda":
            from pearl.models.forward import kernels

            found = torch.empty(self.shape, dtype=self.scales.dtype, device=self.weight.device)
            kernels.dequantise[(-(-outputs // 64), len(self.weight))](
                self.weight, self.scales, found, inputs, outputs, 64
            )
            return found
        count = 2 * self.weight.dtype.itemsize
        steps = torch.stack([(self.weight >> 4 * j) & 15 for j in range(count)], 1).float()  # [words, count, out, 32]
        scale, least = (each.view(-1, count, outputs, 1).float() for each in self.scales)
        return (steps * scale + least).to(self.scales.dtype).permute(2, 0, 1, 3).reshape(outputs, inputs)


@dataclass(frozen=True)
class Rounded:
    """Rounded weights in the layout of the int8 or int4 kernel: multiplies rows by them.

    Attributes:
        rows: of the matrix; the int4 kernel pads them to whole panels.
    """

    steps: torch.Tensor
    scales: torch.Tensor
    rows: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.steps.dtype == torch.int8:
            return torch._weight_int8pack_mm(x, self.steps, self.scales)
        result = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.steps, _INT4_GROUP, self.scales)
        return result if result.shape[1] == self.rows else result[:, : self.rows].contiguous()


@dataclass(frozen=True)
class Packed:
    """Weights in oneDNN's layout: multiplies rows of their dtype by them."""

    matrix: torch.Tensor

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, y: torch.Tensor | None = None
    ) -> torch.Tensor:
        product = torch.ops.mkldnn._linear_pointwise
        result: torch.Tensor = (
            product(x, self.matrix, bias, "none", [], "")
            if y is None
            else product.binary(x, y, self.matrix, bias, "add")
        )
        return result


Laid = Rounded | Packed  # weights in the layout of a kernel of this processor


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The matrix [out, in] in oneDNN's layout, for `Packed`."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def matrix(
    *linears: Any,
    rounding: Rounding = "",
    wide: bool = False,
    plain: bool = False,
) -> Matrix:
    """Return several linear layers with one input as one matrix, their outputs side by side.

    Takes the weights away from the layers, so that a large model is never in memory twice.

    Args:
        rounding: "int8": each row in 255 steps; "int4": each 32 weights of a row in 16 steps; "stored": like "int4"
            where the weights are in 4 bits already, else unchanged (float32 on a CPU without bf16 instructions).
        wide: keep float32 results in float32.
        plain: for our kernels, as on a GPU: return a `Plain` one, or a `Quantised` one if `rounding` asks for it.

    Raises `ModelError` for widths that "int8" and "int4" cannot have.
    """
    weights = [each.weight.detach() for each in linears]
    bias = torch.cat([each.bias for each in linears]) if linears[0].bias is not None else None
    for each in linears:
        each.weight = None
    widens = not rounding and _widens(weights[0])
    if rounding and (plain or weights[0].device.type == "cuda"):
        return _quantised(_stacked(weights), bias, rounding)
    if plain or (not rounding and not widens and not packs(weights[0])):
        return Plain(_stacked(weights), bias)
    product = _lay_out(_stacked(weights), rounding)
    if not rounding and not widens:
        assert isinstance(product, Packed)
        return lambda x, y: product(x, bias, y)

    as_is = isinstance(product, Rounded) or (rounding == "stored" and multiplies_bf16())

    def multiply_rounded(x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        result = product(x if as_is else x.float())
        result = result if bias is None else result + bias
        result = result if wide else result.to(x.dtype)
        return result if y is None else result + y

    return multiply_rounded


def _stacked(weights: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(weights) if len(weights) > 1 else weights[0]


def _lay_out(weight: torch.Tensor, rounding: Rounding) -> Laid:
    if rounding == "int8":
        return _in_8_bits(weight)
    rounded = _in_4_bits(weight, stored=rounding == "stored") if rounding else None
    widens = _widens(weight) or (rounding and not multiplies_bf16())
    return rounded or Packed(pack(weight.float() if widens else weight))


def _widens(weight: torch.Tensor) -> bool:
    """Whether a matrix of this dtype is multiplied in float32, and results are rounded to its dtype.

    float16 on a CPU: one row uses another kernel than several, and their sums differ so rarely after rounding that
    the probe does not see it.
    """
    return weight.dtype == torch.float16 and weight.device.type == "cpu" and torch.backends.mkldnn.is_available()


def _check_width(weight: torch.Tensor, dtype: str, least: int) -> None:
    if weight.shape[1] % least:
        raise ModelError(
            f"{dtype} weights need matrices whose inputs are a multiple of {least}; one of this model takes "
            f"{weight.shape[1]}. Choose another dtype."
        )


def _in_8_bits(weight: torch.Tensor) -> Rounded:
    _check_width(weight, "int8", _INT8_COLUMNS)
    scales = (weight.abs().amax(1) / 127).clamp_min(torch.finfo(weight.dtype).tiny)
    steps = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for some, into, scale in zip(weight.split(1024), steps.split(1024), scales.split(1024), strict=True):
        into.copy_((some.float() / scale[:, None].float()).round_().clamp_(-127, 127))
    return Rounded(steps, scales, len(steps))


def _in_4_bits(weight: torch.Tensor, stored: bool = False) -> Rounded | None:
    """Groups of 32 weights in 16 steps from their least to their largest.

    Exactly the weights of a Q4_1 or Q4_0 file, up to the rounding of scales to the dtype of `weight`. None where
    `stored` asks for such weights, and these are others.
    """
    if stored and weight.shape[1] % _INT4_GROUP:
        return None
    _check_width(weight, "int4", _INT4_GROUP)
    rows = weight.shape[0]
    weight = torch.nn.functional.pad(weight, (0, 0, 0, -rows % _INT4_ROWS))  # the kernel takes whole panels of rows
    packed, scales = [], []
    for some in weight.split(_rows_at_once(weight)):
        groups = some.float().view(len(some), -1, _INT4_GROUP)
        step, low, fits = _steps(groups)
        if stored and not fits:
            return None
        scale = torch.stack((step, low + 8 * step), -1).to(weight.dtype)  # the kernel's: (steps - 8) * first + second
        step, middle = scale.float().unbind(-1)
        steps = ((groups - middle[..., None]) / step[..., None]).round_().add_(8).clamp_(0, 15)
        packed.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(steps.view(len(some), -1).int(), 1))
        scales.append(scale.transpose(0, 1))
    return Rounded(torch.cat(packed), torch.cat(scales, 1).contiguous(), rows)


def _quantised(weight: torch.Tensor, bias: torch.Tensor | None, rounding: Rounding) -> Quantised:
    """As `_in_8_bits` and `_in_4_bits`, for our kernels on a GPU."""
    outputs, inputs = weight.shape
    if rounding == "int8":
        rounded = _in_8_bits(weight)
        return Quantised(rounded.steps, rounded.scales, bias, (outputs, inputs))
    _check_width(weight, "int4", 2 * _INT4_GROUP)
    count = 4 if inputs % (4 * _INT4_GROUP) == 0 else 2
    packed, scales = [], []
    for some in weight.split(4096):  # as float32 a large matrix would take a GPU's last memory
        groups = some.float().view(len(some), -1, _INT4_GROUP)
        step, low, _ = _steps(groups)
        scale = torch.stack((step, low + 8 * step)).to(weight.dtype)  # as `Rounded` has them
        step, middle = scale.float()
        steps = ((groups - middle[..., None]) / step[..., None]).round_().add_(8).clamp_(0, 15).to(torch.int64)
        packed.append(_words(steps.view(len(some), -1, count, _INT4_GROUP)).transpose(0, 1))
        scales.append(torch.stack((step, middle - 8 * step)).to(weight.dtype).transpose(1, 2))
    return Quantised(torch.cat(packed, 1).contiguous(), torch.cat(scales, 2).contiguous(), bias, (outputs, inputs))


def _words(steps: torch.Tensor) -> torch.Tensor:
    """Steps [rows, words, n, 32] as words [rows, words, 32] of n steps."""
    count = steps.shape[2]
    shifts = 4 * torch.arange(count, device=steps.device)[:, None]
    return (steps << shifts).sum(2).to(torch.int16 if count == 4 else torch.uint8)


def _steps(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """For groups [..., 32]: the width of a step and the lowest of 16, as in Q4_1 or Q4_0; whether all weights fit."""
    low, high = groups.aminmax(dim=-1)
    tiny = torch.finfo(torch.bfloat16).tiny
    step = ((high - low) / 15).clamp_min(tiny)
    fits = _fit(groups, step, low)
    if fits.all():  # the usual case where they are stored so, and most of the time that loading them takes
        return step, low, True
    # Q4_0: eight steps below zero and seven above, or vice versa; the outermost of the eight is always taken.
    signed = torch.where(-low >= high, -low, -high) / 8
    size = signed.abs().clamp_min(tiny)
    lowest = torch.where(signed >= 0, -8 * size, -7 * size)
    fits_signed = _fit(groups, size, lowest)
    takes_signed = fits_signed & ~fits
    all_fit = bool((fits | fits_signed).all())
    return torch.where(takes_signed, size, step), torch.where(takes_signed, lowest, low), all_fit


def _fit(groups: torch.Tensor, step: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Whether all weights of each group [..., 32] are one of its 16 steps, up to the rounding of a bfloat16."""
    steps = ((groups - low[..., None]) / step[..., None]).round_().clamp_(0, 15)
    off = (steps.mul_(step[..., None]).add_(low[..., None]) - groups).abs_().amax(-1)
    return off <= groups.abs().amax(-1) * 2**-7


def rounding_for(model: Any, may_round: bool) -> Rounding:
    """How a CPU computes this model fastest without changing it by more than the rounding of a bfloat16.

    "stored" where weights are in 4 bits: a quarter of the bytes, so one token and four are faster everywhere.
    Where it `may_round` and weights are bfloat16: "int4" for a large model, whose single tokens then take half the
    time; "int8" for others, on a CPU without instructions for bfloat16.  Else "".
    """
    layers = model.model.layers
    attention, mlp = layers[0].self_attn, layers[0].mlp
    if not torch.backends.mkldnn.is_available() or not hasattr(mlp, "gate_proj"):  # experts
        return ""
    if multiplies_4_bits() and is_in_4_bits(mlp.gate_proj.weight):
        return "stored"
    matrices = [each.weight for each in (attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    least = max(_INT4_GROUP, _INT8_COLUMNS)
    fits = all(weight.shape[1] % least == 0 for weight in matrices)
    if not (may_round and fits and torch.equal(mlp.gate_proj.weight.bfloat16().float(), mlp.gate_proj.weight)):
        return ""
    if multiplies_4_bits() and len(layers) * sum(weight.numel() for weight in matrices) >= _LARGE:
        return "int4"
    return "" if multiplies_bf16() else "int8"


def _rows_at_once(weight: torch.Tensor) -> int:
    """Whole panels of rows that fit the processor's cache: this halves the time to find their steps."""
    return _INT4_ROWS * max(1, _CACHED // (_INT4_ROWS * weight.shape[1]))


def is_in_4_bits(weight: torch.Tensor) -> bool:
    """Whether a matrix's weights are 16 steps in each group of 32, up to the rounding of a bfloat16."""
    if weight.shape[1] % _INT4_GROUP:
        return False
    parts = weight.split(_rows_at_once(weight))
    return all(_steps(some.float().view(len(some), -1, _INT4_GROUP))[2] for some in parts)


def packs(weight: torch.Tensor) -> bool:
    """Whether oneDNN can lay this matrix out for the CPU once, instead of in every multiplication.

    Rows of its packed float32 products do not depend on one another; rows of plain ones do.
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and multiplies_bf16())


@cache
def multiplies_bf16() -> bool:
    """Whether this CPU has instructions for products of bfloat16; without them these take several times as long."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def multiplies_4_bits() -> bool:
    """Whether the kernel for weights in 4 bits is vectorised for this CPU."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")


def gated(gate_up: torch.Tensor, name: Literal["silu", "gelu"] = "silu") -> torch.Tensor:
    """The activation of the first half of the columns times the second half: [n, 2 * inner] -> [n, inner].

    gelu: by tanh, as Gemma's.  On a CPU in pieces that torch does not split between threads: elements next to a cut
    within a row use the scalar exponential, whose bits are not the vector one's.
    """
    n, inner = gate_up.shape[0], gate_up.shape[1] // 2
    activate = silu if name == "silu" else partial(gelu, approximate="tanh")
    if gate_up.device.type != "cpu" or n * inner < _SERIAL:
        gate, up = gate_up.chunk(2, -1)
        return activate(gate).mul_(up)
    result = gate_up.new_empty(n, inner)
    some = max(1, (_SERIAL - 1) // inner)
    for start in range(0, n, some):
        gate, up = gate_up[start : start + some].chunk(2, -1)
        torch.mul(activate(gate), up, out=result[start : start + some])
    return result


def normalise(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """RMS norm over the last dimension, in `dtype`; None: in that of `weight`.

    As in transformers: in float32, rounded before the weights are applied; after, where these have another dtype than
    `x`.

    On a CPU in operations that each round once, so that vectorised and scalar code agree; the built-in one is
    composed of more of them, and takes three times as long for a row.
    """
    dtype, is_alike = dtype or weight.dtype, x.dtype == weight.dtype
    if x.device.type != "cpu":
        given = (x, weight) if is_alike else (x.float(), weight.float())
        return rms_norm(given[0], weight.shape, given[1], eps).to(dtype)
    full = x.float()
    inverse = torch.linalg.vector_norm(full, dim=-1, keepdim=True)
    inverse.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    if not is_alike:
        return (full * inverse).mul_(weight).to(dtype)
    return (full * inverse).to(x.dtype).mul_(weight).to(dtype)
