"""What all bodies of requests share: which fields are known, and errors that name the field. Raises `ApiError`.

A field is honoured, refused by name if it would change the text and is not supported, or ignored: unknown fields with
a warning in the log, so that clients of other servers need no change. A strict server refuses those, too.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pearl.server.errors import ApiError

log = logging.getLogger(__name__)

Unserved = dict[str, tuple[Any, ...]]  # fields that are not supported -> values that are accepted: without an effect
# Fields that change nothing here, and need no warning.
_NEUTRAL = {"user", "safety_identifier", "prompt_cache_key", "metadata", "store", "service_tier", "annotations"}
_NEUTRAL |= {"prediction", "verbosity", "prompt_cache_retention", "include_obfuscation", "refusal", "cache_control"}
_NEUTRAL.add("include")
MOST_UNKNOWN = 8  # fields of a request that its warning names
_warned: set[str] = set()  # unknown fields that the log has named
_MOST_WARNED = 100  # clients choose these names
# Errors below one of these paths name this path.
_WHOLE = re.compile(
    r"^(prompt|input|stop|stop_token_ids|logit_bias|tool_choice|tools\[\d+\](?=\.type)|tools\[\d+\]\.function"
    r"|structured_outputs(?=\.(?:json|regex)$)"
    r"|response_format\.json_schema|messages\[\d+\]\.content\[\d+\](?=\.type)"
    r"|messages\[\d+\]\.tool_calls\[\d+\])(?!\w).*",
    re.DOTALL,
)


@dataclass
class Unknown:
    """What becomes of fields that are not known: their names, or an error if `is_strict`."""

    is_strict: bool = False
    names: list[str] = field(default_factory=list)


class Body(BaseModel):
    """A JSON object. Nulls count as missing. The context of its validation is an `Unknown`."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    unserved: ClassVar[Unserved] = {}
    known: ClassVar[set[str]] = set()
    every_unserved: ClassVar[set[str]] = set()  # of all bodies

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, dict):
            raise ValueError("must be an object")
        unknown = info.context or Unknown()
        kept, is_first = {}, True
        for name, value in given.items():
            if value is None or (name in cls.unserved and any(_same(value, one) for one in cls.unserved[name])):
                continue
            if name in cls.known:
                kept[name] = value
            elif name in _NEUTRAL and name not in cls.unserved:
                continue
            elif name not in cls.unserved and not unknown.is_strict:
                if len(unknown.names) < MOST_UNKNOWN:
                    unknown.names.append(name[:50])
            elif is_first:  # pydantic would report each of very many
                is_first = False
                kept[name.encode(errors="backslashreplace").decode()] = value
        return kept

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.known = {field.alias or name for name, field in cls.model_fields.items()}
        Body.every_unserved.update(cls.unserved)


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def check_text(value: Any) -> Any:
    """JSON can hold half a surrogate pair, which tokenizers reject."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which is no character") from None
    except RecursionError:
        raise ValueError("is nested too deep") from None
    return value


Text = Annotated[str, AfterValidator(check_text)]


def only_with(field: str, other: str, wanted: Any) -> Any:
    """A validator: `field` is allowed only if the field `other`, declared before it, has this value."""

    def check(cls: type[Body], value: Any, info: ValidationInfo) -> Any:
        if value not in (None, [], 0) and info.data.get(other) != wanted:
            raise ValueError(f"is for {other} {json.dumps(wanted)} only")
        return value

    return field_validator(field, mode="before")(classmethod(check))


_Some = TypeVar("_Some", bound=Body)


def validate(model: type[_Some], body: Any, is_strict: bool = False) -> _Some:
    """The body as `model`. Raises `ApiError`."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    unknown = Unknown(is_strict)
    try:
        made = model.model_validate(body, context=unknown)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False)) from None
    for name in sorted({*unknown.names} - _warned):
        if len(_warned) < _MOST_WARNED:
            _warned.add(name)
            log.warning("requests have the field %r, which is not known and ignored", name)
    return made


def _refusal(errors: list[Any]) -> ApiError:
    """For the first error, but preferably for an unknown field: it may be the misspelled name of a missing one."""
    first = next((e for e in errors if e["type"] == "extra_forbidden" and len(e["loc"]) == 1), errors[0])
    param = _path(first["loc"])
    if first["type"] != "extra_forbidden":
        param = "response_format.type" if param == "response_format" else _WHOLE.sub(r"\1", param)
        # One error for each type that the field may have.
        several = [e for e in errors if e["loc"][0] == param] if param in ("prompt", "input", "stop") else [first]
        messages = dict.fromkeys(re.sub("^(Value error, |Input )", "", e["msg"]) for e in several)
        if not param:  # two fields contradict each other: the message names the one to report first
            text = next(iter(messages))
            return ApiError(400, text, param=text.partition(" ")[0])
        return ApiError(400, f"{param}: {' or '.join(messages)}", param=param)
    name = str(first["loc"][-1])
    if name in Body.every_unserved:
        return ApiError(400, f"{param} is not supported", param=param, code="unsupported_parameter")
    return ApiError(400, f"unknown field {param!r}", param=param, code="unknown_parameter")


def _path(loc: tuple[int | str, ...]) -> str:
    """Such as messages[0].content; tags of unions begin with |."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part:.100}" for part in loc if str(part)[:1] != "|")
    return "".join(parts).removeprefix(".")
