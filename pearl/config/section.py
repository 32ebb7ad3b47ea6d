"""The base class of settings, which refuses bad values and unknown names."""

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
    """Base class of a group of settings.

    However an instance is made, a bad field raises `ConfigError`, whose message says what is
    allowed.
    """

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
    """Return `value`; raise `ConfigError` if it cannot be encoded as UTF-8.

    The name of a file need not be UTF-8, but many libraries fail on such a name.
    """
    if not is_unicode(value):
        raise ConfigError(f"{setting}: {value!r} is not UTF-8; name another, or a link to it")
    return value


def refuse_unknown(values: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if `values` has a setting that is not in `allowed`.

    The message names the most similar allowed setting. If no setting is similar, the message names
    all allowed settings.
    """
    for key in values:
        if key not in allowed:
            nearest = get_close_matches(key, allowed, n=1)
            hint = f"allowed are {', '.join(sorted(allowed))}"
            if nearest:
                hint = f"did you mean {nearest[0]}?"
            raise ConfigError(f"unknown setting {key!r}: {hint}")


def shown(value: Any) -> str:
    """Return a refused value as text for a message; a long text is shortened."""
    return shortened(repr(value), _SHOWN)


def _explained(error: Any) -> str:
    """Return the text of one of pydantic's errors.

    For example, "slots: Input should be greater than or equal to 1 (got 0)".
    """
    place = ".".join(map(str, error["loc"]))
    problem = error["msg"].removeprefix("Value error, ")
    return f"{place}: {problem} (got {shown(error['input'])})"
