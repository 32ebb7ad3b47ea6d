"""Memory of weights: in huge pages where Linux has them, and cut so that no tensor touches another."""

import ctypes
import gc
import mmap
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pearl.models.cpu import huge_pages, native
from pearl.models.cpu.native import Native
from pearl.models.forward.quantised import rounded

SMAPS = Path("/proc/self/smaps")
has_huge_pages = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not SMAPS.exists(), reason="Linux alone has huge pages"
)
needs_products = pytest.mark.skipif(native.library() is None, reason="our products are not built")
_FIRST_FIELDS = 5 * 8  # bytes before the address of the steps in the struct `Weights` of `native.h`


def flags_at(address: int) -> list[str]:
    """Return the flags of the mapping that an address of this process lies in."""
    is_inside = False
    for line in SMAPS.read_text().splitlines():
        words = line.split()
        bounds = words[0].split("-")
        if len(bounds) == 2:
            is_inside = int(bounds[0], 16) <= address < int(bounds[1], 16)
        elif is_inside and words[0] == "VmFlags:":
            return words[1:]
    raise AssertionError(f"{address:x} is in no mapping")


@has_huge_pages
@needs_products
@pytest.mark.parametrize("kind", ["plain", "int4", "int8"])
def test_weights_ask_for_huge_pages(kind: str) -> None:
    weights = torch.randn(64, 64)
    matrix = Native(weights) if kind == "plain" else Native(rounded(weights, kind))
    assert matrix.address is not None
    steps = ctypes.c_void_p.from_address(matrix.address + _FIRST_FIELDS).value
    assert steps is not None
    assert "hg" in flags_at(steps)
    assert "hg" not in flags_at(torch.empty(64).data_ptr())


def test_tensors_do_not_touch_each_other() -> None:
    shapes = [(3, 5), (1,), (0, 4), (1 << 25, 2), (7, 11, 13), (1 << 24,), (1 << 24,), (9,)]
    dtypes = [torch.uint8, torch.float32, torch.bfloat16, torch.int16]
    tensors = []
    for number, shape in enumerate(shapes * 2):
        dtype = dtypes[number % len(dtypes)]
        tensor = huge_pages.empty(shape, dtype)
        assert tensor.shape == torch.Size(shape)
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        tensors.append(tensor)
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.numel()]
    for (_, end), (start, _) in pairwise(sorted(spans)):
        assert end <= start
        assert start % 64 == 0  # a cache line


def test_copies_are_contiguous_and_equal() -> None:
    turned = torch.arange(12.0).view(3, 4).T
    copy = huge_pages.copied(turned)
    assert copy.is_contiguous()
    assert torch.equal(copy, turned)


@has_huge_pages
def test_memory_is_freed_with_its_last_tensor() -> None:
    tensor = huge_pages.empty((1 << 26,), torch.uint8)
    address = tensor.data_ptr()
    row = tensor[:4].fill_(1)
    ended = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert ended() is None
    assert "hg" in flags_at(address)  # `row` keeps the memory
    assert row.tolist() == [1] * 4
    del row
    gc.collect()
    with pytest.raises(AssertionError, match="no mapping"):
        flags_at(address)
