"""Request options by the names that flags, files and HTTP requests use, and their help texts."""

from collections.abc import Mapping
from itertools import chain
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from msgspec import Meta, structs

from pearl.config.options import OPTIONS, RequestOptions
from pearl.config.section import refuse_unknown
from pearl.spec.methods import AS_PUBLISHED
from pearl.spec.rules import RULES, named_parameters
from pearl.spec.stops import STOPS

_WITHOUT_FLAG = (
    "parameters",
    "stop_parameters",
    "prompt_length",
    "grammar",
    "grammar_ends",
    "predicted",
    "reasoning",
)
OF_RULES = named_parameters(RULES.values())
OF_STOPS = named_parameters(STOPS.values())
assert not set(OF_RULES) & set(OF_STOPS), "a flag is either a rule's or a stop policy's"
OPTION_NAMES = tuple(
    name for name in chain(OPTIONS, OF_RULES, OF_STOPS) if name not in _WITHOUT_FLAG
)
_FIRST_OF_DRAWING = OPTION_NAMES.index("temperature")
# The options of drafting and judging. All other options say how tokens are drawn and a text ends.
DECODING_NAMES = (*OPTION_NAMES[:_FIRST_OF_DRAWING], *OF_RULES, *OF_STOPS)


def by_flag(options: RequestOptions, is_given: bool = False) -> dict[str, Any]:
    """Return the options as a flat mapping, by the names that flags and files use.

    Parameters of rules and stop policies have keys of their own. If `is_given`, options that equal
    their defaults are left out.
    """
    values = options.given() if is_given else structs.asdict(options)
    for name in _WITHOUT_FLAG:
        values.pop(name, None)
    for name, value in options.parameters + options.stop_parameters:
        values[name] = kind_of_parameter(name)(value)
    return values


def sampling_of(options: RequestOptions) -> RequestOptions:
    """Return a copy in which all options of drafting and judging have their defaults."""
    values = by_flag(options, is_given=True)
    for name in DECODING_NAMES:
        values.pop(name, None)
    return options_of(values)


def options_of(values: Mapping[str, Any]) -> RequestOptions:
    """Return the options in a flat mapping, as flags and files have them.

    Each parameter of a rule or stop policy has a key of its own. A number may be text, because YAML
    reads 1e-3 as text.

        options_of({"method": "sd", "rule": "opt", "epsilon": 0.1, "look_ahead": "off"})

    Raises `ConfigError` for an unknown key or a bad value.
    """
    fields = {}
    of_rule = {}
    of_stop = {}
    for name, value in values.items():
        if isinstance(value, str):
            value = _parsed(name, value)
        if name in OF_RULES:
            of_rule[name] = value
        elif name in OF_STOPS:
            of_stop[name] = value
        else:
            fields[name] = value
    refuse_unknown(fields, dict.fromkeys(OPTION_NAMES))
    return RequestOptions(**fields, parameters=of_rule, stop_parameters=of_stop)


def _parsed(name: str, text: str) -> Any:
    """Return the number or bool that `text` stands for in option `name`.

    Return `text` itself in all other cases; the option's own checks come later.
    """
    if name in AS_PUBLISHED or name not in OPTION_NAMES:
        return text
    kind = type_of(OPTIONS[name].type) if name in OPTIONS else kind_of_parameter(name)
    if kind is bool:
        return {"true": True, "on": True, "false": False, "off": False}.get(text, text)
    if kind not in (int, float):
        return text
    try:
        return kind(text)
    except ValueError:
        return text


def kind_of_parameter(name: str) -> type[int] | type[float]:
    """Return the type of a parameter of a rule or stop policy."""
    owners = OF_RULES.get(name) or OF_STOPS[name]
    return next(iter(owners.values())).kind


# ---- what flags, help and the HTTP schema read ----


def type_of(kind: Any) -> Any:
    """Return a field's type without None and `Annotated`.

    For example, `Annotated[float, Meta(...)] | None` becomes `float`.
    """
    while True:
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        elif get_origin(kind) in (Union, UnionType):
            (kind,) = (part for part in get_args(kind) if part is not type(None))
        else:
            return kind


def bounds_of(kind: Any) -> list[Meta]:
    """Return every `Meta` in a field's type; those of a nested type precede its outer type's."""
    bounds = []
    for part in get_args(kind):
        if isinstance(part, Meta):
            bounds.append(part)
        else:
            bounds += bounds_of(part)
    return bounds


def description_of(name: str) -> str:
    """Return the help text of a field, or of a parameter of a rule or stop policy."""
    description = ""
    if name in OPTIONS:
        for bound in bounds_of(OPTIONS[name].type):
            description = bound.description or description
        return description
    owner_kind = "rule"
    owners = OF_RULES.get(name)
    if owners is None:
        owner_kind = "draft_stop"
        owners = OF_STOPS[name]
    sentences = []
    for owner, parameter in owners.items():
        sentences.append(f"Of {owner_kind} {owner}: {parameter}: {parameter.description}.")
    return " ".join(sentences)


def _numbers() -> tuple[str, ...]:
    names = []
    for name in OPTION_NAMES[_FIRST_OF_DRAWING:]:
        is_number = name in OPTIONS and type_of(OPTIONS[name].type) in (int, float, bool)
        if is_number and name not in ("sample", "logprobs"):  # HTTP has fields of its own for these
            names.append(name)
    return tuple(names)


NUMBERS = _numbers()  # the options that HTTP requests have by the same names
