"""The base of all sections of settings: it refuses bad values and unknown names, by name."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from pearl.errors import ConfigError
from pearl.printable import is_unicode


class Section(BaseModel):
    """Raises `ConfigError`, naming each bad field and what it may be, however it is made."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_by_name(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(values, dict):
            refuse_unknown(values, cls.model_fields)
        try:
            return handler(values)
        except ValidationError as error:
            problems = (
                f"{'.'.join(str(part) for part in e['loc'])}: {_explained(e)}"
                for e in error.errors()
            )
            raise ConfigError("; ".join(problems)) from None


def check_utf8(value: str, setting: str) -> str:
    """Raises `ConfigError` for bytes that are not UTF-8, as in a path: libraries that take them as text fail."""
    if not is_unicode(value):
        raise ConfigError(f"{setting}: {value!r} is not UTF-8; name another, or a link to it")
    return value


def refuse_unknown(values: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a setting that is not allowed."""
    for key in values:
        if key not in allowed:
            if nearest := get_close_matches(key, allowed, n=1):
                raise ConfigError(f"unknown setting {key!r}: did you mean {nearest[0]}?")
            raise ConfigError(f"unknown setting {key!r}: allowed are {', '.join(sorted(allowed))}")


def _explained(error: Any) -> str:
    given = repr(error["input"])
    return f"{error['msg'].removeprefix('Value error, ')} (got {given[:200]}{'...' if given[200:] else ''})"
