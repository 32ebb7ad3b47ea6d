"""Quantised weights as files have them, taken apart into `QuantisedMatrix`: blocks of GGUF files, and the tensors of
AWQ, GPTQ, compressed-tensors and fp8 checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from math import gcd
from typing import Any

import torch

from pearl.models.forward.quantised import QuantisedMatrix, stacked


class _Unknown(ValueError):
    """Quantised in a way that is not read here."""

    def __init__(self) -> None:
        super().__init__("its quantised weights have a shape or an option that is not read")


Get = Callable[[str], torch.Tensor]  # a tensor of a module by the last part of its name
Make = Callable[[], QuantisedMatrix]


# ---- GGUF ----

_TOGETHER = 8192  # rows taken apart at once: what is made on the way takes several bytes a weight


def _half(block: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at a byte of each block [out, blocks, bytes]: [out, blocks]."""
    return block[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(block: torch.Tensor) -> torch.Tensor:
    """[..., n] bytes -> [..., 2 * n]: the low halves, then the high ones."""
    return torch.cat((block & 15, block >> 4), -1)


def _bits(block: torch.Tensor) -> torch.Tensor:
    """[..., n] bytes -> [..., 8 * n] bits, the lowest of each byte first."""
    return (block[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _legacy(has_least: bool, bits: int) -> Callable[[torch.Tensor], QuantisedMatrix]:
    """Q4_0, Q4_1, Q5_0 and Q5_1: groups of 32."""

    def read(block: torch.Tensor) -> QuantisedMatrix:
        at = 4 if has_least else 2
        steps = _nibbles(block[..., -16:])
        if bits == 5:
            steps = steps | _bits(block[..., at : at + 4]) << 4
        least = _half(block, 2) if has_least else None
        offset = 0.0 if has_least else 2.0 ** (bits - 1)
        return QuantisedMatrix(steps.flatten(1), bits, _half(block, 0), least=least, offset=offset)

    return read


def _q8_0(block: torch.Tensor) -> QuantisedMatrix:
    return QuantisedMatrix(block[..., 2:].contiguous().view(torch.int8).flatten(1), 8, _half(block, 0))


def _k(bits: int) -> Callable[[torch.Tensor], QuantisedMatrix]:
    """Q4_K and Q5_K: groups of 32 weights; 8 groups share a factor of their scales, and one of their least weights."""

    def read(block: torch.Tensor) -> QuantisedMatrix:
        first, second, third = block[..., 4:16].split(4, -1)
        scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
        least = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
        steps = _nibbles(block[..., -128:].unflatten(-1, (4, 32)))  # [out, blocks, 4, 64]
        if bits == 5:
            above = block[..., 16:48, None] >> torch.arange(8, dtype=torch.uint8) & 1  # [out, blocks, 32, 8]
            steps = steps | above.transpose(-1, -2).reshape(steps.shape) << 4
        return QuantisedMatrix(
            steps.flatten(1), bits, scales.flatten(1), _half(block, 0), least.flatten(1), -_half(block, 2)
        )

    return read


def _q6_k(block: torch.Tensor) -> QuantisedMatrix:
    """Groups of 16 weights; 16 groups share a factor of their scales."""
    low = _nibbles(block[..., :128].unflatten(-1, (2, 64)))  # [out, blocks, 2, 128]
    high = block[..., 128:192].unflatten(-1, (2, 1, 32)) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    scales = block[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return QuantisedMatrix((low | high.flatten(-2) << 4).flatten(1), 6, scales, _half(block, 208), offset=32.0)


_FP4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12.0])  # in halves
_IQ4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.0])


def mxfp4(pairs: torch.Tensor, exponents: torch.Tensor) -> QuantisedMatrix:
    """pairs [out, groups, 16] of steps, the first one low; exponents uint8 [out, groups].

    Source: "OCP Microscaling Formats", 5.3.3.
    """
    return _mx(torch.stack((pairs & 15, pairs >> 4), -1).flatten(1), exponents)


def _mx(steps: torch.Tensor, exponents: torch.Tensor) -> QuantisedMatrix:
    """steps [out, in]; exponents [out, groups]."""
    scales = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 128)  # 127, and a half
    return QuantisedMatrix(steps, 4, scales.bfloat16(), table=_FP4)


def _mxfp4(block: torch.Tensor) -> QuantisedMatrix:
    return _mx(_nibbles(block[..., 1:]).flatten(1), block[..., 0])


def _iq4_nl(block: torch.Tensor) -> QuantisedMatrix:
    return QuantisedMatrix(_nibbles(block[..., 2:]).flatten(1), 4, _half(block, 0), table=_IQ4)


def _iq4_xs(block: torch.Tensor) -> QuantisedMatrix:
    """Groups of 32 weights; 8 groups share a factor of their scales, which have 6 bits."""
    low = _fields(block[..., 4:8].contiguous().view(torch.int32), 4)
    high = _fields(block[..., 2:4].contiguous().view(torch.int16).int(), 2)[..., :8]
    scales = (low | high << 4).to(torch.int8) - 32
    steps = _nibbles(block[..., 8:].unflatten(-1, (8, 16)))
    return QuantisedMatrix(steps.flatten(1), 4, scales.flatten(1), _half(block, 0), table=_IQ4)


GGUF_BLOCKS: Mapping[str, tuple[int, int, Callable[[torch.Tensor], QuantisedMatrix]]] = {
    # type: (weights, bytes of a block, what takes blocks [out, blocks, bytes] apart)
    "Q4_0": (32, 18, _legacy(False, 4)),
    "Q4_1": (32, 20, _legacy(True, 4)),
    "Q5_0": (32, 22, _legacy(False, 5)),
    "Q5_1": (32, 24, _legacy(True, 5)),
    "Q8_0": (32, 34, _q8_0),
    "Q4_K": (256, 144, _k(4)),
    "Q5_K": (256, 176, _k(5)),
    "Q6_K": (256, 210, _q6_k),
    "IQ4_NL": (32, 18, _iq4_nl),
    "IQ4_XS": (256, 136, _iq4_xs),
    "MXFP4": (32, 17, _mxfp4),
}


def from_gguf(kind: str, rows: torch.Tensor) -> QuantisedMatrix:
    """A matrix out of the bytes [out, bytes] of a GGUF file's tensor."""
    _, size, read = GGUF_BLOCKS[kind]
    return stacked((read(some.view(len(some), -1, size)) for some in rows.split(_TOGETHER)), len(rows))


# ---- safetensors of other tools ----


def _fields(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Words [..., n] of 32 bits as unsigned fields [..., n * 32 / bits], the lowest first, or in `order`."""
    shifts = torch.tensor(order or range(32 // bits), dtype=torch.int32) * bits
    return (words[..., None] >> shifts & 2**bits - 1).to(torch.uint8).flatten(-2)


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def _awq(get: Get, config: Mapping[str, Any]) -> QuantisedMatrix:
    if config.get("bits", config.get("w_bit")) != 4 or config.get("version", "gemm") != "gemm":
        raise _Unknown
    steps, zeros = (_fields(get(name), 4, _AWQ_ORDER).T.contiguous() for name in ("qweight", "qzeros"))
    return QuantisedMatrix(steps, 4, get("scales").T.contiguous(), zeros=zeros)


def _gptq(get: Get, config: Mapping[str, Any]) -> QuantisedMatrix:
    if config.get("bits") != 4:
        raise _Unknown
    steps = _fields(get("qweight").T.contiguous(), 4)
    # Files of the first version, the usual one, have zero points less one.
    zeros = _fields(get("qzeros"), 4).T + (config.get("checkpoint_format", "gptq") != "gptq_v2")
    of = get("g_idx").long()
    order = None if bool((of[1:] >= of[:-1]).all()) else of.argsort(stable=True)
    steps = steps if order is None else steps[:, order]
    return QuantisedMatrix(
        steps.contiguous(), 4, get("scales").T.contiguous(), zeros=(zeros & 255).contiguous(), order=order
    )


_FP8_BLOCK = 128


def _float8(weight: torch.Tensor, scales: torch.Tensor) -> QuantisedMatrix:
    """With a scale for all, for each row, or for each block of 128 by 128."""
    outputs, inputs = weight.shape
    scales = scales.float().reshape(1, 1) if scales.numel() == 1 else scales.float()
    if scales.dim() != 2 or weight.dtype != torch.float8_e4m3fn:
        raise _Unknown
    down, across = scales.shape
    rows = {1: outputs, outputs: 1}.get(down, _FP8_BLOCK)
    # A last block that is not whole would be a group of another size.
    if down != -(-outputs // rows) or across not in (1, inputs / _FP8_BLOCK):
        raise _Unknown
    return QuantisedMatrix(weight, 8, scales.repeat_interleave(rows, 0)[:outputs].contiguous())


def _fp8(get: Get, config: Mapping[str, Any]) -> QuantisedMatrix:
    if config.get("weight_block_size") not in (None, [_FP8_BLOCK, _FP8_BLOCK]):
        raise _Unknown
    return _float8(get("weight"), get("weight_scale_inv"))


def _compressed(get: Get, config: Mapping[str, Any]) -> QuantisedMatrix:
    """compressed-tensors, one group of weights for all."""
    groups = list(config.get("config_groups", {}).values())
    weights = groups[0].get("weights", {}) if len(groups) == 1 else {}
    kind, bits = config.get("format"), int(weights.get("num_bits") or 0)
    if kind == "float-quantized":
        return _float8(get("weight"), get("weight_scale"))
    scales = get("weight_scale")
    if kind == "int-quantized" and bits == 8 and weights.get("symmetric"):
        return QuantisedMatrix(get("weight"), 8, scales)
    is_symmetric = bool(weights.get("symmetric"))
    if kind != "pack-quantized" or weights.get("actorder") not in (None, "static") or (bits == 8 and not is_symmetric):
        raise _Unknown
    outputs, inputs = get("weight_shape").tolist()
    steps = _fields(get("weight_packed"), bits)[:outputs, :inputs].contiguous()
    if bits == 8:
        return QuantisedMatrix((steps.to(torch.int16) - 128).to(torch.int8), 8, scales)
    if bits != 4:
        raise _Unknown
    if is_symmetric:
        return QuantisedMatrix(steps, 4, scales, offset=8.0)
    zeros = _fields(get("weight_zero_point").T.contiguous(), 4)[:, :outputs].T.contiguous()
    return QuantisedMatrix(steps, 4, scales, zeros=zeros)


def _bitsandbytes(get: Get, config: Mapping[str, Any]) -> QuantisedMatrix:
    """NF4 or FP4: blocks of a flattened matrix; their scales may be quantised too."""
    state = json.loads(bytes(get(f"weight.quant_state.bitsandbytes__{config['bnb_4bit_quant_type']}").tolist()))
    outputs, inputs = state["shape"]
    group = gcd(inputs, state["blocksize"])  # a block may hold several rows
    packed, scales = get("weight").flatten(), get("weight.absmax")
    if "nested_blocksize" in state:
        upper = get("weight.nested_absmax").repeat_interleave(state["nested_blocksize"])[: len(scales)]
        scales = get("weight.nested_quant_map")[scales.long()] * upper + state["nested_offset"]
    steps = torch.stack((packed >> 4, packed & 15), -1).view(outputs, inputs)
    scales = scales.float().repeat_interleave(state["blocksize"] // group)[: outputs * inputs // group]
    return QuantisedMatrix(steps, 4, scales.view(outputs, -1), table=get("weight.quant_map").float())


TOOLS: Mapping[str, tuple[str, Callable[[Get, Mapping[str, Any]], QuantisedMatrix]]] = {
    # quant_method: (a tensor that only quantised modules have, what makes a matrix of a module's tensors)
    "awq": ("qweight", _awq),
    "gptq": ("qweight", _gptq),
    "fp8": ("weight_scale_inv", _fp8),
    "compressed-tensors": ("weight_scale", _compressed),
    "bitsandbytes": ("weight.absmax", _bitsandbytes),
}


def of_tool(scheme: Mapping[str, Any], names: Collection[str], get: Get) -> dict[str, Make] | None:
    """What makes each quantised matrix of a checkpoint, by the name of its weight; None: unknown to us.

    Args:
        scheme: its `quantization_config`. names: of its tensors. get: reads one.
    """
    if (method := str(scheme.get("quant_method"))) not in TOOLS:
        return None
    mark, read = TOOLS[method]
    modules = [name.removesuffix(f".{mark}") for name in names if name.endswith(f".{mark}")]

    def maker(module: str) -> Make:
        return lambda: read(lambda part: get(f"{module}.{part}"), scheme)

    try:
        if not modules or maker(modules[0])().group % 16:
            return None
    except _Unknown:
        return None
    return {f"{module}.weight": maker(module) for module in modules}
