"""What all bodies of requests share: which fields are known, and errors that name the field. Raises `ApiError`.

A field is honoured, refused by name if it would change the text and is not supported, or ignored: unknown fields with
a warning in the log, so that clients of other servers need no change.
"""

from __future__ import annotations

import json
import logging
import re
from difflib import get_close_matches
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

Unserved = dict[
    str, tuple[Any, ...]
]  # fields that are not supported -> values that are accepted: without an effect
# Fields that change nothing here, and need no warning.
_NEUTRAL = {
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "metadata",
    "store",
    "service_tier",
    "annotations",
}
_NEUTRAL |= {
    "prediction",
    "verbosity",
    "prompt_cache_retention",
    "include_obfuscation",
    "refusal",
    "cache_control",
}
_NEUTRAL.add("include")
MOST_UNKNOWN = 8  # fields of a request that its warning names
_warned: set[str] = set()  # unknown fields that the log has named
_MOST_WARNED = 100  # clients choose these names
# Errors below one of these paths name this path.
_WHOLE = re.compile(
    r"^(prompt|input|stop|stop_token_ids|logit_bias|tool_choice|tools\[\d+\](?=\.type)|tools\[\d+\]\.function"
    r"|response_format\.json_schema|messages\[\d+\]\.content\[\d+\](?=\.type)"
    r"|messages\[\d+\]\.tool_calls\[\d+\])(?!\w).*",
    re.DOTALL,
)


class Body(BaseModel):
    """A JSON object. Nulls count as missing. The context of its validation takes the names of unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    unserved: ClassVar[Unserved] = {}
    known: ClassVar[set[str]] = set()

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, dict):
            raise ValueError("must be an object")
        kept, unknown = {}, set() if info.context is None else info.context
        for name, value in given.items():
            taken = (
                one
                for one in cls.unserved.get(name, ())
                if isinstance(one, bool) == isinstance(value, bool)
            )
            if value is None or value in taken:
                continue
            if name in cls.known or name in cls.unserved:  # pydantic refuses the latter
                kept[name] = value
            elif name not in _NEUTRAL and len(unknown) < MOST_UNKNOWN:
                unknown.add(name[:50])
        return kept

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.known = {field.alias or name for name, field in cls.model_fields.items()}


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


def validate(model: type[_Some], body: Any) -> _Some:
    """The body as `model`. Raises `ApiError`."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    unknown = set[str]()
    try:
        made = model.model_validate(body, context=unknown)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False)) from None
    for name in sorted(unknown - _warned):
        if len(_warned) < _MOST_WARNED:
            _warned.add(name)
            nearest = get_close_matches(name, model.known, n=1)
            meant = f": did you mean {nearest[0]}?" if nearest else ""
            log.warning("requests have the field %r, which is not known and ignored%s", name, meant)
    return made


def _refusal(errors: list[Any]) -> ApiError:
    """For the first error."""
    first = errors[0]
    param = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param} is not supported", param=param, code="unsupported_parameter")
    if first["type"] == "missing":
        first["msg"] = (
            "is missing" if _WHOLE.sub(r"\1", param) == param else f"{first['loc'][-1]} is missing"
        )
    param = "response_format.type" if param == "response_format" else _WHOLE.sub(r"\1", param)
    # One error for each type that the field may have.
    several = (
        [e for e in errors if e["loc"][0] == param]
        if param in ("prompt", "input", "stop")
        else [first]
    )
    messages = dict.fromkeys(_in_words(e["msg"]) for e in several)
    if not param:  # two fields contradict each other: the message names the one to report first
        text = next(iter(messages))
        return ApiError(400, text, param=text.partition(" ")[0])
    return ApiError(400, f"{param}: {' or '.join(messages)}", param=param)


def _in_words(message: str) -> str:
    """Pydantic's message without its own terms."""
    message = re.sub(
        "^(Value error, |(Input|String|List|Value|Dictionary) (?=should ))", "", message
    )
    return re.sub(" after validation, not [0-9]+$", "", message)


def _path(loc: tuple[int | str, ...]) -> str:
    """Such as messages[0].content; tags of unions begin with |."""
    parts = (
        f"[{part}]" if isinstance(part, int) else f".{part:.100}"
        for part in loc
        if str(part)[:1] != "|"
    )
    return "".join(parts).removeprefix(".")
