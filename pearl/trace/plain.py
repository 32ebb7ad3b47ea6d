"""Events, commands and messages as lists and dicts, for a file, and back. Distributions are left out.

Encoding is written by hand, as microseconds count in a worker's loop; decoding uses msgspec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct

from pearl.decoding.distribution import AnnouncedRow, PackedRow
from pearl.errors import TraceError
from pearl.protocol import events, messages, options, request, speeds

_SIMPLE = {int, float, str, bool, type(None)}


def plain(value: object) -> Any:
    """A dataclass or a message becomes a dict with its class under "type"."""
    kind: Any = type(value)
    if kind in _SIMPLE:
        return value
    if kind is tuple or kind is list:
        items: Any = value
        return list(items) if not items or type(items[0]) is int else [plain(item) for item in items]
    return _encoder(kind)(value)


@cache
def _encoder(kind: type) -> Callable[[Any], Any]:
    if kind in (PackedRow, AnnouncedRow) or kind.__module__ == "torch":  # big, and no decision depends on it
        return lambda distribution: None
    if issubclass(kind, Enum):
        return lambda member: member.value
    if kind is bytes:
        return bytes.hex
    if kind is dict:
        return lambda value: {str(plain(k)): v if type(v) in _SIMPLE else plain(v) for k, v in value.items()}
    names, name = [n for n in _fields(kind) if (kind, n) != (events.Judge, "rows")], kind.__name__

    def encode(value: Any) -> dict[str, Any]:
        found = {"type": name}
        for field in names:
            item = getattr(value, field)
            found[field] = item if type(item) in _SIMPLE else plain(item)
        return found

    return encode


def _fields(kind: type) -> tuple[str, ...]:
    if issubclass(kind, Struct):
        return kind.__struct_fields__
    assert is_dataclass(kind), kind
    return tuple(field.name for field in fields(kind))


def from_plain(value: Any) -> Any:
    """The inverse of `plain`, without distributions. Raises `TraceError` for an unknown type or other fields."""
    try:
        return msgspec.convert(_convertible(value), _KINDS[value["type"]], strict=False)
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"the trace holds an event unknown to this version: {value!r:.200} ({error})") from None


def _convertible(value: Any) -> Any:
    """The form that msgspec expects: a message is an array."""
    if isinstance(value, list):
        return [_convertible(item) for item in value]
    if not isinstance(value, dict):
        return value
    given = {name: _convertible(item) for name, item in value.items() if name != "type"}
    kind = _KINDS.get(value.get("type", ""))
    if kind is None or not issubclass(kind, Struct):
        return given
    if unknown := given.keys() ^ set(kind.__struct_fields__):
        raise ValueError(f"{kind.__name__} has other fields: {', '.join(sorted(unknown))}")
    tag = kind.__struct_config__.tag
    return [*([] if tag is None else [tag]), *(given[name] for name in kind.__struct_fields__)]


_KINDS: dict[str, type] = {
    name: kind
    for module in (events, messages, options, request, speeds)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Struct))
}
