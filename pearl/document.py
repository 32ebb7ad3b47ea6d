"""Untrusted JSON and YAML: parsed to data, or refused with one ValueError that says what is wrong."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from pearl.errors import PearlError

_MOST_YAML = 1 << 16  # characters, which take PyYAML 0.1 s; a configuration has two thousand
_DEEPEST_YAML = 8
# Errors of code that reads values of an unexpected type or shape.
_WRONG = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


def parse_json(text: str) -> Any:
    """Raises ValueError: `json.JSONDecodeError` if it is not JSON."""
    collects = gc.isenabled()
    gc.disable()  # the collector would walk a million new lists again and again: 0.3 s for 2 MiB, not 0.06 s
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


class _Plain(yaml.SafeLoader):
    """Loads numbers, true, false, null and text. A date is text."""


_Plain.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":merge", ":value"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_yaml(text: str) -> Any:
    """One YAML document without tags, anchors and aliases: a few aliases could fill all memory. Raises ValueError."""
    if len(text) > _MOST_YAML:
        raise ValueError(f"it has {len(text):,} characters, at most {_MOST_YAML:,} are read")
    try:
        _check_plain(text)
        return _Plain(text).get_single_data()
    except (yaml.YAMLError, *_WRONG) as error:
        raise ValueError(" ".join(str(error).split())[:300] or type(error).__name__) from None


def _check_plain(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Plain):
        where = f"line {event.start_mark.line + 1}" if event.start_mark else "somewhere"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ValueError(f"{where}: anchors and aliases are not read: write it out")
        if getattr(event, "tag", None) is not None:
            raise ValueError(f"{where}: tags are not read")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST_YAML:
            raise ValueError(f"{where}: nested more than {_DEEPEST_YAML} deep")


@contextmanager
def damaged(what: object, kind: type[PearlError]) -> Iterator[None]:
    """Turn the errors of reading values of unexpected types or shapes into one error: `what`, a file, is damaged."""
    try:
        yield
    except _WRONG as error:
        why = " ".join(str(error).split())[:200]
        raise kind(f"{what} is damaged: {type(error).__name__}{': ' if why else ''}{why}") from error
