"""Events, commands and messages as lists and dicts, for a file. Distributions are left out.

Written by hand, as microseconds count in a worker's loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from msgspec import Struct

from pearl.decoding.distribution import AnnouncedRow, PackedRow
from pearl.protocol import events

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
