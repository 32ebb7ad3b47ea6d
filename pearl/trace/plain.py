"""Events, commands and messages as lists and dicts, for a file, and back. Distributions are left out.

Writing is coded by hand (in the loop of a worker a few microseconds count); reading is by pydantic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pearl.decoding.distribution import Distribution
from pearl.errors import TraceError
from pearl.protocol import events, messages, request, window

_SIMPLE = (int, float, str, type(None))


def plain(value: object) -> Any:
    """A dataclass becomes a dict with its class under "type"."""
    kind: Any = type(value)
    if kind in _SIMPLE or kind is bool:
        return value
    if kind is tuple or kind is list:
        items: Any = value
        return list(items) if not items or type(items[0]) is int else [plain(item) for item in items]
    return _encoder(kind)(value)


@cache
def _encoder(kind: type) -> Callable[[Any], Any]:
    if kind is Distribution:  # tensors or bytes: big, and decisions never look at them
        return lambda distribution: None
    if kind is events.Judge:
        return lambda judge: {
            "type": "Judge",
            "start": judge.start,
            "tokens": list(judge.tokens),
            "nodes": list(judge.nodes),
            "request": judge.request,
        }
    if issubclass(kind, Enum):
        return lambda member: member.value
    if kind is bytes:
        return lambda value: value.hex()
    if kind is dict:
        return lambda value: {str(plain(k)): plain(v) for k, v in value.items()}
    assert is_dataclass(kind), kind
    names, name = [f.name for f in fields(kind)], kind.__name__

    def encode(value: Any) -> dict[str, Any]:
        return {"type": name, **{n: plain(getattr(value, n)) for n in names}}

    return encode


def from_plain(value: Any) -> Any:
    """The inverse of `plain`; distributions are missing. Raises `TraceError`."""
    try:
        kind = _KINDS[value["type"]]
        given = {k: v for k, v in value.items() if k != "type"}
        return _adapter(kind).validate_python(given)
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise TraceError(
            f"the trace holds an event that this version does not know: {value!r:.200} ({error})"
        ) from None


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


_KINDS: dict[str, type] = {
    name: kind
    for module in (events, messages, request, window)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and is_dataclass(kind)
}
