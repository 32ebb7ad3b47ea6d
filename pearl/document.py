"""Parsers for untrusted JSON and YAML, which raise only ValueError, with a message for the user."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from pearl.errors import PearlError

_MOST_YAML = 1 << 16  # characters, which PyYAML reads in 0.1 s; a configuration has 2,000
# The errors that code may raise if it reads values of an unexpected type or shape.
_SHAPE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


def parse_json(text: str) -> Any:
    """Parse JSON.

    Raises `json.JSONDecodeError` if `text` is not JSON, and another ValueError if it is nested too
    deep or has a number with too many digits.
    """
    collects = gc.isenabled()
    # Without this, garbage collection walks a million new lists again and again, and 2 MiB take
    # 0.3 s instead of 0.06 s.
    gc.disable()
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deep") from None
    except json.JSONDecodeError:
        raise
    except ValueError:
        raise ValueError("a number has too many digits") from None
    finally:
        if collects:
            gc.enable()


def parse_yaml(text: str) -> Any:
    """Parse one YAML document of plain data.

    Raises ValueError if this fails. Aliases are refused, because a few of them can fill all memory.
    """
    if len(text) > _MOST_YAML:
        raise ValueError(f"it has {len(text):,} characters, at most {_MOST_YAML:,} are read")
    try:
        has_aliases = any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text))
        if not has_aliases:
            return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        problem = str(error.problem)
        if error.problem_mark is not None:
            mark = error.problem_mark
            problem += f" (line {mark.line + 1}, column {mark.column + 1})"
        raise ValueError(problem) from None
    except (yaml.YAMLError, *_SHAPE_ERRORS) as error:
        raise ValueError(_one_line(error)[:300] or type(error).__name__) from None
    raise ValueError("aliases are not read: write them out")


@contextmanager
def damaged(file: object, kind: type[PearlError]) -> Iterator[None]:
    """Raise an error of the class `kind` if the block fails because of unexpected values in `file`.

    The block then fails with an error such as KeyError or TypeError. The message of the new error
    says that `file` is damaged.
    """
    try:
        yield
    except _SHAPE_ERRORS as error:
        cause = type(error).__name__
        message = _one_line(error)[:200]
        if message:
            cause += f": {message}"
        raise kind(f"{file} is damaged: {cause}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
