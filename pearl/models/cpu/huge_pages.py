"""Memory for weights in huge pages, which the processor finds faster than pages of 4 KiB.

A forward reads all weights. In pages of 4 KiB these are tens of thousands of pages, and the
processor has to look up the address of nearly every one again.  In huge pages (2 MiB) they are a
few hundred.  If the setting of Linux is `madvise`, only memory that asks for huge pages has them.
The matrices of a small model are smaller than a huge page, so several are cut from one chunk.
"""

import mmap
from collections.abc import Sequence
from math import prod

import torch

_CHUNK = 1 << 25  # bytes; pages that are never written to take no memory
_ALIGNMENT = 64  # bytes of a cache line


class _Chunk:
    """A private mapping, from which tensors are cut. It is freed with its last tensor."""

    def __init__(self, size: int) -> None:
        self.left = size
        self._memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._size = size
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux has it
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    def cut(self, count: int) -> torch.Tensor:
        """Return the next `count` bytes, which are zeros."""
        start = self._size - self.left
        self.left -= count
        return torch.frombuffer(self._memory, dtype=torch.uint8, offset=start, count=count)


_chunk: _Chunk | None = None  # the one that small tensors are cut from


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor as `torch.empty` does, in huge pages if there are any."""
    global _chunk
    num_bytes = prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(tuple(shape), dtype=dtype)
    room = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    if room > _CHUNK:
        chunk = _Chunk(room)
    else:
        if _chunk is None or _chunk.left < room:
            _chunk = _Chunk(_CHUNK)
        chunk = _chunk
    return chunk.cut(room)[:num_bytes].view(dtype).view(tuple(shape))


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a tensor, in huge pages if there are any."""
    return empty(tensor.shape, tensor.dtype).copy_(tensor)
