"""How one field of a message travels, and how several make a class: packed to what msgpack knows, checked on arrival.

A check gives a value that lies within its kind, or raises ValueError, which says what it must be.  Knows no messages.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from math import inf
from operator import attrgetter
from typing import Any, TypeVar

_Member = TypeVar("_Member", bound=Enum)


@dataclass(frozen=True, slots=True)
class Kind:
    """How a field travels: `pack` to what msgpack knows (None: as it is), `check` back, or ValueError."""

    check: Callable[[Any], Any]
    pack: Callable[[Any], Any] | None = None


def integer(low: int, high: int) -> Kind:
    """low <= value < high."""

    def check(value: object) -> object:
        if type(value) is int and low <= value < high:  # `type`, for bool is an int by inheritance
            return value
        raise ValueError(f"must be an integer in [{low}, {high})")

    return Kind(check)


def real(low: float, high: float, *, above: bool = False) -> Kind:
    """Finite, low <= value <= high; `above`: low < value. A NaN fails every comparison."""

    def check(value: object) -> object:
        if type(value) is float and low <= value <= high and value != inf and not (above and value == low):
            return value
        raise ValueError(f"must be a finite float {'above' if above else 'from'} {low} to {high}")

    return Kind(check, float)


def sized(kind: type[str] | type[bytes], most: int) -> Kind:
    def check(value: object) -> object:
        if type(value) is bytes and kind is bytes and len(value) <= most:
            return value
        # A code point has at most four bytes, so a short string need not be encoded to learn that it fits.
        if type(value) is str and kind is str and (len(value) * 4 <= most or len(value.encode()) <= most):
            return value
        raise ValueError(f"must be {kind.__name__} of at most {most} bytes")

    return Kind(check)


def named(known: Iterable[str]) -> Kind:
    names = frozenset(known)

    def check(value: object) -> object:
        if type(value) is str and value in names:
            return value
        raise ValueError(f"must be one of {', '.join(sorted(names))}")

    return Kind(check)


def codes(kind: type[_Member]) -> dict[int, _Member]:
    """The order of an enum in `messages` is the wire: append to it, never reorder."""
    return dict(enumerate(kind))


def member(kind: type[_Member]) -> Kind:
    members = codes(kind)

    def check(value: object) -> object:
        if type(value) is int and value in members:
            return members[value]
        raise ValueError(f"must be below {len(members)}")

    return Kind(check, {member: code for code, member in members.items()}.__getitem__)


def optional(kind: Kind) -> Kind:
    return Kind(lambda value: None if value is None else kind.check(value), kind.pack)


def array(kind: Kind, most: int) -> Kind:
    pack = kind.pack

    def check(value: object) -> object:
        if type(value) is tuple and len(value) <= most:
            return tuple(map(kind.check, value))
        raise ValueError(f"must be an array of at most {most} elements")

    return Kind(check, (lambda values: [pack(value) for value in values]) if pack else list)


def token_list(most: int) -> Kind:
    """Token ids as int32 LE bytes: one length check, no loop over types, no long arrays to be unpacked."""

    def check(value: object) -> tuple[int, ...]:
        if type(value) is not bytes or len(value) % 4 or len(value) > 4 * most:
            raise ValueError(f"must be the int32 LE bytes of at most {most} tokens")
        tokens = struct.unpack(f"<{len(value) // 4}i", value)
        if tokens and min(tokens) < 0:
            raise ValueError("holds a negative token")
        return tokens

    def pack(tokens: Sequence[int]) -> bytes:
        if len(tokens) > most:
            raise ValueError(f"{len(tokens)} tokens, at most {most} can be sent")
        return struct.pack(f"<{len(tokens)}i", *tokens)

    return Kind(check, pack)


def flag(value: object) -> bool:
    if type(value) is bool:
        return value
    raise ValueError("must be true or false")


class Shape:
    """One class on the wire: its fields in order, each with its kind. Precomputed, for speed."""

    def __init__(self, cls: type, /, **kinds: Kind) -> None:
        assert list(kinds) == [field.name for field in fields(cls)], f"{cls.__name__}: table and class differ"
        self.cls, self.names = cls, tuple(kinds)
        self.checks = tuple(kind.check for kind in kinds.values())
        self._packs = [(index, kind.pack) for index, kind in enumerate(kinds.values()) if kind.pack]
        # attrgetter gives the value alone, not a tuple of one, where it has one name only.
        self._values: Callable[[Any], Any] = attrgetter(*kinds)
        self._single = len(kinds) == 1

    def pack(self, value: Any) -> list[Any]:
        values = [self._values(value)] if self._single else list(self._values(value))
        for index, pack in self._packs:
            if values[index] is not None:
                values[index] = pack(values[index])
        return values

    def check(self, values: Sequence[Any]) -> Any:
        if len(values) != len(self.checks):
            raise ValueError(f"{self.cls.__name__} has {len(self.checks)} fields, not {len(values)}")
        checked: list[Any] = []  # its length tells which field was wrong
        try:
            for check, value in zip(self.checks, values, strict=True):
                checked.append(check(value))
        except ValueError as error:
            raise ValueError(f"{self.cls.__name__}.{self.names[len(checked)]} {error}") from None
        return self.cls(*checked)


def nested(shape: Shape) -> Kind:
    def check(value: object) -> object:
        if type(value) is tuple:
            return shape.check(value)
        raise ValueError("must be an array")

    return Kind(check, shape.pack)
