"""Whether a packed header holds what it announces, found without unpacking it.

An unpacker makes room for an array as soon as it has read its length: three bytes that announce 2048 elements cost
16 KiB, and a thousand of them, one inside the other, 16 ms.  So lengths are added up first, in one pass over the
headers of the values; their bytes, which are most of a long message, are jumped over.  Knows msgpack, no messages.
"""

from __future__ import annotations

SHORT = 1024  # bytes: no header of so few, with no long array in it, costs more than a valid message does
DEEPEST = 4  # arrays within each other: a message, its rows, their entries, and the two parts of one

# first byte -> what follows it
_NOTHING, _BYTES, _LENGTH, _ARRAY, _REFUSED = range(5)


def _layout() -> list[tuple[int, int]]:
    """First byte -> (what follows, how many bytes, or bytes of its length, or elements)."""
    table = [(_NOTHING, 0)] * 256  # small integers, nil, true, false
    table[0x80:0x90] = [(_REFUSED, 0)] * 16  # maps
    table[0x90:0xA0] = [(_ARRAY, count) for count in range(16)]
    table[0xA0:0xC0] = [(_BYTES, size) for size in range(32)]
    for first, *size in (
        *((0xC4 + i, _LENGTH, 1 << i) for i in range(3)),  # bin
        *((0xD9 + i, _LENGTH, 1 << i) for i in range(3)),  # str
        *((0xCC + i, _BYTES, 1 << i) for i in range(4)),  # unsigned
        *((0xD0 + i, _BYTES, 1 << i) for i in range(4)),  # signed
        (0xCA, _BYTES, 4),
        (0xCB, _BYTES, 8),
    ):
        table[first] = (size[0], size[1])
    for first in (0xC1, 0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9), 0xDE, 0xDF):  # unused, extensions, maps
        table[first] = (_REFUSED, 0)
    return table


_LAYOUT = _layout()


def is_plain(packed: bytes) -> bool:
    """Whether `packed` is so short, and its arrays too, that it may be unpacked at once."""
    return len(packed) <= SHORT and b"\xdc" not in packed and b"\xdd" not in packed


def check_extent(packed: bytes, longest: int, most: int) -> None:
    """Raises ValueError unless `packed` is one value whose arrays hold what they announce.

    Args:
        longest: elements of an array.
        most: values in all. The pass ends at the first beyond, so this bounds its time too.
    """
    at, announced = 0, 1
    left = [1]  # values still to come, in each array that is open
    while left:
        if not left[-1]:
            left.pop()
            continue
        left[-1] -= 1
        if at >= len(packed):
            raise ValueError("it ends in the middle")
        first = packed[at]
        follows, size = _LAYOUT[first]
        at += 1
        if 0xDC <= first <= 0xDD:
            width = 2 if first == 0xDC else 4
            follows, size = _ARRAY, int.from_bytes(packed[at : at + width], "big")
            at += width
        if follows == _LENGTH:
            at += size + int.from_bytes(packed[at : at + size], "big")
        elif follows == _BYTES:
            at += size
        elif follows == _ARRAY:
            announced += size
            if size > longest or announced > most or size > len(packed) - at:
                raise ValueError(f"an array of {size} elements, {announced - 1} with those before it")
            if len(left) > DEEPEST:
                raise ValueError(f"more than {DEEPEST} arrays within each other")
            left.append(size)
        elif follows == _REFUSED:
            raise ValueError(f"a value of a kind that the wire has not (0x{first:02x})")
    if at != len(packed):
        raise ValueError("bytes after its end" if at < len(packed) else "it ends in the middle")
