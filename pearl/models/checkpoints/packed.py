"""Converts quantised weights, as other tools write them into safetensors files, to `QuantisedMatrix`.

A linear layer's weights are several tensors in the file. Their layout differs between tools:
`recipes` decides which layout a layer has, and the functions here read it.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from math import gcd
from typing import Any

import torch

from pearl.models.checkpoints.formats import FP4, Make, fields, mxfp4, paired
from pearl.models.checkpoints.recipes import Recipe, Unread, chooser
from pearl.models.forward.quantised import QuantisedMatrix

# Tensors that only quantised modules have.
_MARKS = frozenset({"qweight", "weight_scale", "weight_scale_inv", "weight.absmax"})
# Tensors with which other engines quantise activations, keys and values while they compute. Here
# activations, keys and values are not quantised.
_OF_CACHE = re.compile(r"(q|k|v|kv)_(scale|zero_point|global_scale)")
_UNUSED = re.compile(r"bias|(input|output|q|k|v|kv)_(scale|zero_point|global_scale)")
_GROUPED = 16  # the number of inputs of a group is a multiple of this


def is_of_cache(name: str) -> bool:
    """Return whether a tensor belongs to a quantised cache of keys and values."""
    return _OF_CACHE.fullmatch(name.rpartition(".")[2]) is not None


def module_of(name: str) -> str:
    """Return the module of a tensor: "a" for "a.qweight" and for "a.weight.absmax"."""
    module, is_of_weight, _ = name.partition(".weight.")
    if is_of_weight:
        return module
    return name.rpartition(".")[0]


def unpacked_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Split words of 32 bits [rows, n] into unsigned fields, uint8 [rows, count].

    A word holds as many whole fields as fit, from the lowest bit on.  Its other bits are unused.
    """
    return fields(words, bits)[:, :count].contiguous()


def unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Split words of 32 bits [rows, n] into unsigned fields, uint8 [rows, count].

    Fields have `bits` bits each, and are packed without gaps, from the lowest bit on: a field may
    begin in one word and end in the next.
    """
    if 32 % bits == 0:
        return unpacked_words(words, bits, count)
    missing = -words.shape[1] % bits
    words = torch.nn.functional.pad(words, (0, missing)).long() & 0xFFFFFFFF
    runs = words.unflatten(1, (-1, bits))  # 32 fields in `bits` words
    starts = torch.arange(32) * bits
    first_word = starts // 32
    next_word = (first_word + 1).clamp(max=bits - 1)
    field = runs[..., first_word] >> starts % 32 | runs[..., next_word] << 32 - starts % 32
    return (field & 2**bits - 1).to(torch.uint8).flatten(1)[:, :count].contiguous()


def _integers(
    steps: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor | None = None,
) -> QuantisedMatrix:
    """Return the matrix of weights that are given as unsigned integers.

    Integers of up to 4 bits are kept as they are. From larger integers, and from their zero points,
    2 ** (bits - 1) is subtracted, so that the integers fit into int8.

    Args:
        steps: [out, in], uint8, the integers; each has `bits` bits.
        scales: [out, groups].
        zeros: zero points [out, groups]; None: all are 2 ** (bits - 1), as in symmetric schemes.
        order: see `QuantisedMatrix`.
    """
    half = 2 ** (bits - 1)
    if bits <= 4:
        if zeros is None:
            return QuantisedMatrix(steps, 4, scales, offset=float(half), order=order)
        zeros = zeros.to(torch.uint8).contiguous()
        return QuantisedMatrix(steps, 4, scales, zeros=zeros, order=order)
    signed = (steps.to(torch.int16) - half).to(torch.int8)
    if zeros is not None:
        zeros = (zeros.to(torch.int16) - half).contiguous()
        if not bool(zeros.any()):
            zeros = None
    return QuantisedMatrix(signed, 8, scales, zeros=zeros, order=order)


class Tensors:
    """The tensors of a quantised module. Each is read from its file when it is asked for.

    Attributes:
        parts: names of the tensors within the module, such as "qweight", without those that no layout needs.
        unread: the names in `parts` that were neither read nor skipped so far.
    """

    def __init__(
        self, module: str, parts: Iterable[str], get: Callable[[str], torch.Tensor]
    ) -> None:
        self.module = module
        self.parts = frozenset(part for part in parts if not _UNUSED.fullmatch(part))
        self.unread = set(self.parts)
        self._get = get

    def of(self, part: str) -> torch.Tensor:
        """Read the tensor with this name. Raises `Unread` if the module has none."""
        if part not in self.parts:
            raise Unread(f"it has no {part}")
        self.skip(part)
        return self._get(f"{self.module}.{part}")

    def skip(self, part: str) -> None:
        """Count a tensor as read, because the layout does not need it. It may be missing."""
        self.unread.discard(part)


_STATE = "weight.quant_state.bitsandbytes__"
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def _awq(tensors: Tensors, recipe: Recipe) -> QuantisedMatrix:
    steps = fields(tensors.of("qweight"), 4, _AWQ_ORDER).T.contiguous()
    zeros = fields(tensors.of("qzeros"), 4, _AWQ_ORDER).T.contiguous()
    return QuantisedMatrix(steps, 4, tensors.of("scales").T.contiguous(), zeros=zeros)


def _gptq(tensors: Tensors, recipe: Recipe) -> QuantisedMatrix:
    words = tensors.of("qweight")
    zero_words = tensors.of("qzeros")
    scales = tensors.of("scales")
    groups, outputs = scales.shape
    inputs = len(words) * 32 // recipe.bits
    _check_shape("qweight", words, (inputs * recipe.bits // 32, outputs), recipe)
    _check_shape("qzeros", zero_words, (groups, -(-outputs * recipe.bits // 32)), recipe)
    steps = unpacked(words.T.contiguous(), recipe.bits, inputs)
    zeros = unpacked(zero_words, recipe.bits, outputs).T.to(torch.int16) + recipe.zero_shift
    order = None
    if "g_idx" in tensors.parts:
        order = _order(tensors.of("g_idx"), groups)
    if order is not None:
        steps = steps[:, order].contiguous()
    return _integers(steps, recipe.bits, scales.T.contiguous(), zeros, order)


def _order(group_of: torch.Tensor, groups: int) -> torch.Tensor | None:
    """Return the indices of the inputs, sorted by group; None if the inputs are in this order.

    Raises `Unread` if the groups have different sizes.

    Args:
        group_of: [in], the group of each input.
        groups: number of groups.
    """
    counts = group_of.bincount(minlength=groups)
    if len(counts) != groups or bool((counts != counts[0]).any()):
        raise Unread("g_idx has groups of several sizes")
    if bool((group_of[1:] >= group_of[:-1]).all()):
        return None
    return group_of.long().argsort(stable=True)


_FP8_BLOCK = 128


def float8(weight: torch.Tensor, scales: torch.Tensor) -> QuantisedMatrix:
    """Return the matrix of float8 weights [out, in] and their scales.

    There may be one scale for the matrix, or one for each row, each group of a row, or each block
    of 128 x 128 weights.  Raises `Unread` for other scales.
    """
    outputs, inputs = weight.shape
    if scales.numel() == 1:
        scales = scales.reshape(1, 1)
    elif scales.shape == (outputs,):
        scales = scales[:, None]
    if scales.dim() != 2 or weight.dtype != torch.float8_e4m3fn:
        raise Unread(f"weight is {weight.dtype} with scales {list(scales.shape)}")
    scale_rows, scale_columns = scales.shape
    block_rows = {1: outputs, outputs: 1}.get(scale_rows, _FP8_BLOCK)
    # If the inputs are no multiple of a group, the last group of a row would be smaller.
    has_groups = block_rows == 1 and inputs % scale_columns == 0
    if scale_rows != -(-outputs // block_rows) or not (
        has_groups or scale_columns in (1, inputs / _FP8_BLOCK)
    ):
        raise Unread(f"weight {[outputs, inputs]} has scales {list(scales.shape)}")
    scales = scales.float().repeat_interleave(block_rows, 0)[:outputs]
    return QuantisedMatrix(weight, 8, scales.contiguous())


def _float8(scales: str, tensors: Tensors, recipe: Recipe) -> QuantisedMatrix:
    return float8(tensors.of("weight"), tensors.of(scales))


def _packed(tensors: Tensors, recipe: Recipe) -> QuantisedMatrix:
    """Read integers in words of 32 bits.

    compressed-tensors packs integers of 3, 5, 6 and 7 bits without gaps since 0.18. Earlier
    versions did not split an integer between two words, and needed more words for a row.
    """
    words = tensors.of("weight_packed")
    scales = tensors.of("weight_scale")
    outputs, inputs = tensors.of("weight_shape").tolist()
    dense_shape = (outputs, -(-inputs * recipe.bits // 32))
    padded_shape = (outputs, -(-inputs // (32 // recipe.bits)))
    unpack = unpacked
    if words.shape == padded_shape and padded_shape != dense_shape:
        unpack = unpacked_words
    else:
        _check_shape("weight_packed", words, dense_shape, recipe)
    steps = unpack(words, recipe.bits, inputs)
    zeros = None
    if recipe.is_symmetric:
        tensors.skip("weight_zero_point")
    else:  # zero points are packed along the outputs
        zeros = unpack(tensors.of("weight_zero_point").T.contiguous(), recipe.bits, outputs).T
    return _integers(steps, recipe.bits, scales, zeros)


def _int8(tensors: Tensors, recipe: Recipe) -> QuantisedMatrix:
    """Read signed steps, each of which takes a byte even if it has fewer bits."""
    half = 2 ** (recipe.bits - 1)
    steps = (tensors.of("weight").to(torch.int16) + half).to(torch.uint8)
    zeros = None
    if recipe.is_symmetric:
        tensors.skip("weight_zero_point")
    else:
        zeros = tensors.of("weight_zero_point").to(torch.int16) + half
    scales = tensors.of("weight_scale")
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).repeat(len(steps), 1)
    return _integers(steps, recipe.bits, scales, zeros)


def _nvfp4(tensors: Tensors, recipe: Recipe) -> QuantisedMatrix:
    """Read NVFP4, in which 16 weights share a scale in e4m3.

    All scales of the matrix are divided by the same number.
    """
    steps = paired(tensors.of("weight_packed"))
    scales = tensors.of("weight_scale")
    divisor = tensors.of("weight_global_scale")
    is_e4m3 = scales.dtype == torch.float8_e4m3fn
    if not is_e4m3 or divisor.numel() != 1 or scales.shape[1] * 16 != steps.shape[1]:
        raise Unread(
            f"weight_scale is {scales.dtype} {list(scales.shape)}, "
            f"weight_global_scale {list(divisor.shape)}"
        )
    divisors = 2 * divisor.float().reshape(1, 1)  # `FP4` has twice the values
    return QuantisedMatrix(steps, 4, scales, table=FP4, divisors=divisors.repeat(len(steps), 1))


def _mxfp4(tensors: Tensors, recipe: Recipe) -> QuantisedMatrix:
    return mxfp4(tensors.of("weight_packed"), _exponents(tensors))


def _mxfp8(tensors: Tensors, recipe: Recipe) -> QuantisedMatrix:
    weight = tensors.of("weight")
    exponents = _exponents(tensors)
    if weight.dtype != torch.float8_e4m3fn:
        raise Unread(f"weight is {weight.dtype}")
    scales = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
    return QuantisedMatrix(weight, 8, scales.bfloat16())


def _exponents(tensors: Tensors) -> torch.Tensor:
    exponents = tensors.of("weight_scale")
    if exponents.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise Unread(f"weight_scale is {exponents.dtype}")
    return exponents.view(torch.uint8)


def _bitsandbytes(tensors: Tensors, recipe: Recipe) -> QuantisedMatrix:
    """Read NF4 or FP4, where blocks of the flattened matrix share a scale.

    The scales may be quantised too, with factors of their own.
    """
    kind = "nf4" if f"{_STATE}nf4" in tensors.parts else "fp4"
    state = json.loads(bytes(tensors.of(f"{_STATE}{kind}").tolist()))
    outputs, inputs = state["shape"]
    group = gcd(inputs, state["blocksize"])  # a block may hold several rows
    packed = tensors.of("weight").flatten()
    scales = tensors.of("weight.absmax")
    if "nested_blocksize" in state:
        factors = tensors.of("weight.nested_absmax").repeat_interleave(state["nested_blocksize"])
        steps_of_scales = tensors.of("weight.nested_quant_map")[scales.long()]
        scales = steps_of_scales * factors[: len(scales)] + state["nested_offset"]
    scales = scales.float().repeat_interleave(state["blocksize"] // group)
    scales = scales[: outputs * inputs // group].view(outputs, -1)
    steps = torch.stack((packed >> 4, packed & 15), -1).view(outputs, inputs)
    return QuantisedMatrix(steps, 4, scales, table=tensors.of("weight.quant_map").float())


def _check_shape(part: str, tensor: torch.Tensor, shape: tuple[int, ...], recipe: Recipe) -> None:
    if tensor.shape != shape:
        raise Unread(
            f"{part} has the shape {list(tensor.shape)}, and {list(shape)} is of {recipe.bits} bits"
        )


# Layout -> the function that reads its modules. It must read or skip all tensors of a module.
LAYOUTS: Mapping[str, Callable[[Tensors, Recipe], QuantisedMatrix]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": partial(_float8, "weight_scale_inv"),
    "float8": partial(_float8, "weight_scale"),
    "int8": _int8,
    "packed": _packed,
    "nvfp4": _nvfp4,
    "mxfp4": _mxfp4,
    "mxfp8": _mxfp8,
    "bitsandbytes": _bitsandbytes,
}


def matrices(
    scheme: Mapping[str, Any], names: Collection[str], get: Callable[[str], torch.Tensor]
) -> dict[str, Make]:
    """Return functions that load the quantised matrices of a checkpoint, by the weight's name.

    Modules with the same recipe and the same tensor names have the same layout.  The first module
    of each layout is loaded at once, as a check.  Raises `Unread` for a setting or a tensor that is
    not read here.

    Args:
        scheme: the checkpoint's `quantization_config`.
        names: names of the checkpoint's tensors.
        get: reads the tensor of a name.
    """
    choose = chooser(scheme)
    loaders: dict[str, Make] = {}
    checked_kinds = set()
    for tensors in _quantised(names, get):
        module = tensors.module
        recipe = choose(module)
        load = partial(_matrix, tensors, recipe)
        loaders[f"{module}.weight"] = load
        if (recipe, tensors.parts) in checked_kinds:
            continue
        checked_kinds.add((recipe, tensors.parts))
        group_size = load().group
        if tensors.unread:
            raise Unread(f"{module}.{min(tensors.unread)} is a tensor that nothing reads")
        if group_size % _GROUPED:
            raise Unread(f"{module} has groups of {group_size} inputs")
    # With empty config_groups a checkpoint quantises only the KV cache.
    if not loaders and scheme.get("config_groups") != {}:
        raise Unread(
            f"quant_method is {scheme.get('quant_method')!r}, and no module has quantised weights"
        )
    return loaders


def _matrix(tensors: Tensors, recipe: Recipe) -> QuantisedMatrix:
    try:
        matrix = LAYOUTS[recipe.layout](tensors, recipe)
    except Unread as cause:
        raise Unread(f"{tensors.module}: {cause}") from None
    rows, groups = matrix.scales.shape
    outputs, inputs = matrix.shape
    if rows != outputs or inputs % groups:
        raise Unread(f"{tensors.module}: {[outputs, inputs]} weights have scales {[rows, groups]}")
    return matrix


def _quantised(names: Iterable[str], get: Callable[[str], torch.Tensor]) -> list[Tensors]:
    """Return the quantised modules that have tensors among `names`."""
    parts = defaultdict(set)
    for name in names:
        module = module_of(name)
        parts[module].add(name.removeprefix(f"{module}."))
    return [Tensors(module, tensors, get) for module, tensors in parts.items() if tensors & _MARKS]
