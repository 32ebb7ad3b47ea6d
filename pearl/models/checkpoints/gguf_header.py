"""The header of a GGUF file: what it states, and where its tensors are.

As specified in ggml's docs/gguf.md, versions 2 and 3.  gguf-py's reader takes ten seconds for a large vocabulary.
"""

from __future__ import annotations

import math
import struct
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_ALIGNMENT = 32  # bytes, where a file states none


class Tensor(NamedTuple):
    """Where a tensor is: its type, its shape as torch has it, and its bytes in the file."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int


class _Reader:
    def __init__(self, data: mmap) -> None:
        self._data = data
        self.at = 0

    def numbers(self, layout: str) -> tuple[Any, ...]:
        """As `struct` reads this layout."""
        found = struct.unpack_from(f"<{layout}", self._data, self.at)
        self.at += struct.calcsize(f"<{layout}")
        return found

    def text(self) -> str:
        (size,) = self.numbers("Q")
        self.at += size
        return self._data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        """Of a field. Lists of lists are not read."""
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            return self.numbers(_NUMBERS[kind])[0]
        kind, count = self.numbers("IQ")
        return [self.text() for _ in range(count)] if kind == _TEXT else [*self.numbers(f"{count}{_NUMBERS[kind]}")]


def read_header(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields and tensors by name.  Raises `ValueError` for another file, and one that is not whole; `OSError`."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ValueError("it is no GGUF file. Get it again")
        with mmap(opened.fileno(), 0, access=ACCESS_READ) as data:
            reader = _Reader(data)
            try:
                _, version, tensor_count, field_count = reader.numbers("4sIQQ")
                if version not in (2, 3):
                    raise ValueError(f"it is a GGUF file of version {version}, and 2 and 3 are read")
                fields = {reader.text(): reader.value(*reader.numbers("I")) for _ in range(field_count)}
                found = {}
                for _ in range(tensor_count):
                    name, (rank,) = reader.text(), reader.numbers("I")
                    shape, (kind, offset) = reader.numbers(f"{rank}Q")[::-1], reader.numbers("IQ")
                    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
                    found[name] = GGMLQuantizationType(kind).name, shape, offset, math.prod(shape) // block * size
            except (struct.error, KeyError) as error:
                raise ValueError(f"it is cut off or damaged ({error})") from error
            alignment = fields.get("general.alignment", _ALIGNMENT)
            begin = -(-reader.at // alignment) * alignment
            tensors = {name: Tensor(kind, shape, begin + at, size) for name, (kind, shape, at, size) in found.items()}
            if max((each.offset + each.size for each in tensors.values()), default=0) > len(data):
                raise ValueError("it is cut off: tensors are beyond its end")
            return fields, tensors
