"""The base of all sections of settings: it refuses bad values and unknown names, by name."""

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
from pearl.printable import is_unicode, shortened

_SHOWN = 200  # characters of a refused value in a message


class Section(BaseModel):
    """A section of settings. However it is made, a bad field raises `ConfigError`, which says what the field may be."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_by_name(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(values, dict):
            refuse_unknown(values, cls.model_fields)
        try:
            return handler(values)
        except ValidationError as error:
            raise ConfigError("; ".join(map(_explained, error.errors()))) from None


def check_utf8(value: str, setting: str) -> str:
    """Return `value`. Raise `ConfigError` if it is not UTF-8, which a path need not be: many libraries fail on it."""
    if not is_unicode(value):
        raise ConfigError(f"{setting}: {value!r} is not UTF-8; name another, or a link to it")
    return value


def refuse_unknown(values: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a setting that is not allowed. It names the most similar one that is, or else all."""
    for key in values:
        if key not in allowed:
            nearest = get_close_matches(key, allowed, n=1)
            hint = f"allowed are {', '.join(sorted(allowed))}"
            if nearest:
                hint = f"did you mean {nearest[0]}?"
            raise ConfigError(f"unknown setting {key!r}: {hint}")


def shown(value: Any) -> str:
    """Return a refused value as text for a message; of a long text, only the beginning."""
    return shortened(repr(value), _SHOWN)


def _explained(error: Any) -> str:
    """Return one of pydantic's errors, such as "slots: Input should be greater than or equal to 1 (got 0)"."""
    place = ".".join(map(str, error["loc"]))
    problem = error["msg"].removeprefix("Value error, ")
    return f"{place}: {problem} (got {shown(error['input'])})"
