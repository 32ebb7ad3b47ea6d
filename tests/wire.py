"""Values that the fields of messages may have, and values that they may not have."""

from collections.abc import Iterator

import msgpack
from msgspec import inspect

from pearl.protocol import messages as m
from pearl.transport.codec import encode


def places(
    kind: inspect.Type, path: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], inspect.Type]]:
    """Yield the place and the declared type of every value that a message can hold.

    A place is a path of indices into the nested arrays of the encoded message.
    """
    yield path, kind
    match kind:
        case inspect.StructType(fields=fields, tag=tag):
            for index, field in enumerate(fields, start=tag is not None):
                yield from places(field.type, (*path, index))
        case inspect.VarTupleType(item_type=item):
            yield from places(item, (*path, 0))
        case inspect.TupleType(item_types=items):
            for index, item in enumerate(items):
                yield from places(item, (*path, index))
        case inspect.UnionType(types=types):
            for each in types:
                yield from (found for found in places(each, path) if found[0] != path)


def bad_values(kind: inspect.Type) -> Iterator[object]:
    """Yield values that a field of this type may not have: beyond its range, and of other types."""
    yield from ({}, [[[[1]]]])
    match kind:
        case inspect.IntType(ge=low, le=high, lt=below):
            yield from (1.5, True, "1", b"1", [])
            yield from ([] if low is None else [low - 1]) + ([] if high is None else [high + 1])
            yield from [] if below is None else [below]
        case inspect.FloatType(ge=low, le=high, gt=above):
            yield from (float("nan"), float("inf"), -float("inf"), True, "1.0", [])
            yield from [] if low is None else [low - 1.0 if abs(low) < 1e300 else -float("inf")]
            yield from [] if high is None or high > 1e300 else [high * 1.01 + 1.0]
            yield from [] if above is None else [above]
        case inspect.StrType(max_length=most):
            yield from (1, b"x", [], b"\xff")
            yield from [] if most is None or most > 1 << 16 else ["x" * (most + 1)]
        case inspect.BytesType(max_length=most):
            yield from (1, "x", [])
            yield from [] if most is None or most > 1 << 16 else [bytes(most + 1)]
        case inspect.EnumType():
            yield from (0, "", "none", None)
        case inspect.BoolType():
            yield from (0, 1, None, "true")
        case inspect.VarTupleType(max_length=most):
            yield from (None, "x", b"x", 1)
            yield from [] if most is None or most > 1 << 16 else [[0] * (most + 1)]
        case inspect.TupleType(item_types=items):
            yield from (None, [0] * (len(items) - 1), [0] * (len(items) + 1))
        case inspect.StructType():
            yield from (1, "x")


def good_values(kind: inspect.Type) -> Iterator[object]:
    """Yield values that a field of this type may have, including those at the ends of its range."""
    match kind:
        case inspect.IntType(ge=low, le=high, lt=below):
            yield from (0 if low is None else low, 1, high if below is None else below - 1)
        case inspect.FloatType(ge=low, le=high):
            yield from (number for number in (low, 0.5, 1.0, high) if number is not None)
        case inspect.StrType():
            yield from ("", "\u0708 end")
        case inspect.BytesType():
            yield from (b"", b"12345678")
        case inspect.EnumType(cls=members):
            yield from (member.value for member in members)
        case inspect.BoolType():
            yield from (False, True)
        case inspect.NoneType():
            yield None
        case inspect.VarTupleType():
            yield []


def placed(message: m.Message, path: tuple[int, ...], value: object) -> list[bytes] | None:
    """Return the frames of `message` with another value at this place.

    Returns None if the message has no such place.
    """
    header = msgpack.unpackb(encode(message)[0])
    inner = header
    for index in path[:-1]:
        inner = inner[index] if index < len(inner) and isinstance(inner[index], list) else []
    if len(inner) <= path[-1]:
        return None
    inner[path[-1]] = value
    return [msgpack.packb(header), *encode(message)[1:]]
