"""Types of the values that processes send each other, and `Record`, the base class of structs.

A message from a peer is decoded into these types. Decoding checks the bounds of its
numbers and texts.
"""

import sys
from typing import Annotated, Any, Self

from msgspec import Meta, Struct, structs

MAX_TEXT = 1 << 16  # bytes of UTF-8: an error message, a stop string
LARGEST = sys.float_info.max

Position = Annotated[int, Meta(ge=0, lt=2**31)]  # an index in a text, a token id, a length
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Word = Annotated[int, Meta(ge=0)]  # has at most 64 bits, because msgpack has no larger integers
Name = Annotated[str, Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=MAX_TEXT // 4)]
Finite = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]


class Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base class of the structs that processes send each other.

    On the wire, an instance is an array of its fields in the order of their declaration.
    """

    def changed(self, **fields: Any) -> Self:
        """Return a copy with new values for some fields, such as `options.changed(seed=1)`."""
        return structs.replace(self, **fields)
