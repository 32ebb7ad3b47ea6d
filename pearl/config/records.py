"""Types of values that travel between processes: bounded numbers, names and texts, and the class that holds them.

The bounds are those of the wire: what a peer sends is decoded into these types.
"""

import sys
from typing import Annotated, Any, Self

from msgspec import Meta, Struct, structs

MAX_TEXT = 1 << 16  # bytes of UTF-8: an error message, a stop string
LARGEST = sys.float_info.max

Position = Annotated[int, Meta(ge=0, lt=2**31)]  # an index in a text, a token id, a length
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Word = Annotated[int, Meta(ge=0)]  # 64 bits: msgpack has no larger integer
Name = Annotated[str, Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=MAX_TEXT // 4)]
Finite = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]


class Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The base of classes that travel: on the wire, an instance is the array of its fields, in their order."""

    def changed(self, **fields: Any) -> Self:
        """Return a copy with other values for these fields."""
        return structs.replace(self, **fields)
