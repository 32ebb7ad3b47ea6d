"""Recipes of quantised checkpoints: the bits and the layout of each module, by `quantization_config`.

Each tool has its own rules to choose the settings of a module by the module's name:

* compressed-tensors has groups, which list targets. A target is a full name, a regular expression that
  must match the beginning of a name, or a class. The first target that fits a module decides. Full names
  are tried first, then expressions in alphabetical order, then classes; their order in the file does not
  matter.
* GPTQModel has `dynamic` rules, regular expressions that must match the beginning of a name. They are
  tried in their order in the file.
* AutoRound has `extra_config`, with full names and with regular expressions that may match anywhere in a
  name. If no full name fits, the expressions are tried in their order in the file.

This module must not know tensors.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pearl.models.families import Config

_CLASSES = ("Linear", "Module")  # class targets that fit every quantised module


class Unread(ValueError):
    """A checkpoint has a setting or a tensor that is not read here; the text names it."""


class Recipe(NamedTuple):
    """How the tensors of a quantised module are laid out.

    Attributes:
        layout: one of `packed.LAYOUTS`.
        bits: bits of a weight.
        is_symmetric: whether all zero points are the middle of the range, so that none are read.
        zero_shift: number that is added to the file's zero points. It is 1 for the first version of GPTQ's
            format, which stores zero points minus 1.
    """

    layout: str
    bits: int
    is_symmetric: bool = True
    zero_shift: int = 0


Choose = Callable[[str], Recipe]  # the recipe of a module, by its name; raises `Unread`


def _same(recipe: Recipe) -> Choose:
    return lambda module: recipe


def _awq(scheme: Config) -> Choose:
    for name in ("version", "format", "checkpoint_format"):
        _expect(scheme, name, "gemm", absent="gemm")
    _expect(scheme, "bits", 4, absent=scheme.get("w_bit"))
    return _same(Recipe("awq", 4))


def _fp8(scheme: Config) -> Choose:
    _expect(scheme, "weight_block_size", None, [128, 128])
    return _same(Recipe("fp8", 8))


def _bitsandbytes(scheme: Config) -> Choose:
    _expect(scheme, "load_in_4bit", True)
    _expect(scheme, "bnb_4bit_quant_type", "nf4", "fp4")
    return _same(Recipe("bitsandbytes", 4))


# ---- GPTQ ----


def _gptq(scheme: Config) -> Choose:
    version = "checkpoint_format" if "checkpoint_format" in scheme else "format"
    _expect(scheme, version, "gptq", "gptq_v2", absent="gptq")
    _expect(scheme, "pack_dtype", "int32", absent="int32")
    shift = int(scheme.get(version) != "gptq_v2")
    rules = [_rule(name, rule) for name, rule in (scheme.get("dynamic") or {}).items()]

    def choose(module: str) -> Recipe:
        for rule in rules:
            if rule.pattern.match(module):
                where = f"dynamic[{rule.name!r}]"
                if rule.skips:
                    raise Unread(f"{module} is quantised, which {where} excludes")
                overridden = {"bits": scheme.get("bits"), **rule.settings}
                return Recipe("gptq", _bits(overridden, f"{where}."), zero_shift=shift)
        return Recipe("gptq", _bits(scheme, ""), zero_shift=shift)

    return choose


class _Rule(NamedTuple):
    name: str
    skips: bool
    pattern: re.Pattern[str]
    settings: Config


def _rule(name: str, settings: Config) -> _Rule:
    """Return a rule of `dynamic`.

    Examples are "+:.*k_proj" with {"bits": 8}, which changes settings, and "-:.*gate", whose
    modules are not quantised.
    """
    accepted = ("bits", "group_size", "sym", "desc_act", "mse", "damp_percent")
    _accept(settings, f"dynamic[{name!r}].", accepted)
    skips = name.startswith("-:")
    return _Rule(name, skips, _pattern(re.sub("^[-+]:", "", name), "dynamic"), settings)


# ---- AutoRound ----

_OF_ACTIVATIONS = ("act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym")
_OF_FLOATS = {("nv_fp", 4): "nvfp4", ("mx_fp", 4): "mxfp4", ("mx_fp", 8): "mxfp8"}


def _auto_round(scheme: Config) -> Choose:
    overrides = scheme.get("extra_config") or {}
    accepted = ("bits", "group_size", "sym", "data_type", *_OF_ACTIVATIONS)
    for name, settings in overrides.items():
        _accept(settings, f"extra_config[{name!r}].", accepted)
    _expect(scheme, "rotation_config", None, {})
    usual = {"data_type": "int", **scheme}

    def choose(module: str) -> Recipe:
        name = _overriding(module, overrides)
        where = ""
        if name:
            where = f"extra_config[{name!r}]."
        return _auto_round_recipe(usual | overrides.get(name, {}), where)

    return choose


def _overriding(module: str, overrides: Config) -> str:
    """Return the name of the entry of `extra_config` for a module; "" if there is none."""
    if module in overrides:
        return module
    for name in overrides:
        if _pattern(name, "extra_config").search(module):
            return name
    return ""


def _auto_round_recipe(settings: Config, where: str) -> Recipe:
    packing = settings.get("packing_format")
    kind = settings["data_type"]
    bits = _bits(settings, where)
    if packing in ("auto_round:auto_gptq", "auto_round:gptqmodel") and kind == "int":
        return Recipe("gptq", bits, zero_shift=int(packing == "auto_round:auto_gptq"))
    if packing == "auto_round:auto_awq" and (kind, bits) == ("int", 4):
        return Recipe("awq", bits)
    if packing == "auto_round" and kind == "int":
        return Recipe("gptq", bits)
    if packing == "auto_round:fp8_static" and (kind, bits) == ("fp", 8):
        return Recipe("float8", bits)
    if packing == "auto_round:llm_compressor" and (kind, bits) in _OF_FLOATS:
        return Recipe(_OF_FLOATS[kind, bits], bits)
    raise Unread(f"packing_format is {packing!r}, with {where}data_type {kind!r} of {bits} bits")


# ---- compressed-tensors ----

_FORMATS = {
    # format: (layout, type and bits of its weights)
    "pack-quantized": ("packed", "int", range(2, 9)),
    "int-quantized": ("int8", "int", range(2, 9)),
    "float-quantized": ("float8", "float", (8,)),
    "nvfp4-pack-quantized": ("nvfp4", "float", (4,)),
    "mxfp4-pack-quantized": ("mxfp4", "float", (4,)),
    "mxfp8-quantized": ("mxfp8", "float", (8,)),
}
# Type of the weights -> the format that "naive-quantized" means.
_PLAIN_FORMATS = {"int": "int-quantized", "float": "float-quantized"}


def _compressed(scheme: Config) -> Choose:
    for name in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        _expect(scheme, name, None, {})
    groups = dict(_targets(scheme))
    targets = _by_rank(groups)
    ignored = scheme.get("ignore") or []

    def choose(module: str) -> Recipe:
        if any(_matches(target, module) for target in ignored):
            raise Unread(f"{module} is quantised, which ignore excludes")
        for target in targets:
            if _matches(target, module):
                return groups[target]
        raise Unread(f"{module} is quantised, and no target of config_groups names it")

    return choose


def _targets(scheme: Config) -> Iterator[tuple[str, Recipe]]:
    for name, group in scheme.get("config_groups", {}).items():
        where = f"config_groups.{name}."
        if not isinstance(group, Mapping):
            raise Unread(f"{where[:-1]} is the name of a preset")
        if group.get("weights") is not None:
            recipe = _group_recipe(group, scheme.get("format"), where)
            yield from ((target, recipe) for target in group.get("targets", ()))


def _group_recipe(group: Config, usual: Any, where: str) -> Recipe:
    weights = group["weights"]
    kind = str(weights.get("type", "int"))
    name = str(group.get("format") or usual)
    if name == "naive-quantized":
        name = _PLAIN_FORMATS.get(kind, name)
    if name not in _FORMATS:
        raise Unread(f"{where}format is {name!r}")
    layout, expected, bits = _FORMATS[name]
    if kind != expected or weights.get("num_bits") not in bits:
        raise Unread(
            f"{where}weights has type {kind!r} and num_bits {weights.get('num_bits')} in {name!r}"
        )
    _expect(weights, "dynamic", False, None, where=f"{where}weights.")
    is_symmetric = weights.get("symmetric", True)
    if kind == "float" and not is_symmetric:
        raise Unread(f"{where}weights.symmetric is {is_symmetric!r}")
    return Recipe(layout, weights["num_bits"], is_symmetric)


def _by_rank(targets: Config) -> list[str]:
    """Return targets in the order in which compressed-tensors tries them.

    Source: `match_targets` of compressed-tensors 0.20.1.
    """
    return sorted(targets, key=lambda target: (target in _CLASSES, "re:" in target, target))


def _matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return _pattern(target.removeprefix("re:"), "config_groups").match(module) is not None
    return target == module or target in _CLASSES


# ---- all ----

METHODS: Mapping[str, Callable[[Config], Choose]] = {
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "bitsandbytes": _bitsandbytes,
}


def chooser(scheme: Config) -> Choose:
    """Return the function that chooses each module's recipe, as a `quantization_config` says.

    Raises `Unread` for a method or a setting that is not read here.
    """
    method = str(scheme.get("quant_method"))
    if method not in METHODS:
        raise Unread(f"quant_method is {method!r}")
    return METHODS[method](scheme)


def _expect(settings: Config, name: str, *values: Any, absent: Any = None, where: str = "") -> None:
    value = settings.get(name, absent)
    if value not in values:
        raise Unread(f"{where}{name} is {value!r}")


def _accept(settings: Config, where: str, names: tuple[str, ...]) -> None:
    """Raise `Unread` if a setting whose name is not among `names` has a value."""
    for name, value in settings.items():
        if value is not None and name not in names:
            raise Unread(f"{where}{name} is {value!r}")


def _bits(settings: Config, where: str) -> int:
    bits: Any = settings.get("bits")
    if bits not in range(2, 9):
        raise Unread(f"{where}bits is {bits!r}")
    return int(bits)


def _pattern(expression: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise Unread(f"{where} has {expression!r}, no regular expression: {error}") from None
