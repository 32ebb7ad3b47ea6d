"""Matrices as oneDNN lays them out for this processor, as bytes and back: torch itself neither saves nor loads them.

What is used here is torch's interface for compiled models, whose constants are such matrices.  `restored` raises
`PackingError` where a torch has it not.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch


class PackingError(Exception):
    """This torch cannot do it."""


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The matrix [out, in] for `multiply`."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def multiply(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor | None = None
) -> torch.Tensor:
    """x times the matrix, plus what there is of the others."""
    product = torch.ops.mkldnn._linear_pointwise
    found: torch.Tensor = (
        product(x, packed, bias, "none", [], "") if y is None else product.binary(x, y, packed, bias, "add")
    )
    return found


def contents(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Its bytes, seen and not copied, and what oneDNN says of their order: for `restored`. Raises `PackingError`."""
    try:
        size, start = torch.ops.mkldnn._nbytes(packed), torch.ops.mkldnn.data_ptr(packed)
        order: torch.Tensor = torch.ops.mkldnn._get_mkldnn_serialized_md(packed)
    except (AttributeError, RuntimeError) as error:
        raise PackingError(str(error)) from error
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(start), dtype=torch.uint8), order


def restored(data: torch.Tensor, order: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The matrix whose `contents` these are. It does not hold `data`, which must outlive it. Raises `PackingError`."""
    try:
        library, name = _library(), str(dtype).removeprefix("torch.")
        size, stride = (ctypes.c_int64 * 2)(*shape), (ctypes.c_int64 * 2)(shape[1], 1)
        made = ctypes.c_void_p()
        failed = library.aoti_torch_create_tensor_from_blob_v2(
            ctypes.c_void_p(data.data_ptr()),
            ctypes.c_int64(2),
            size,
            stride,
            ctypes.c_int64(0),
            ctypes.c_int32(getattr(library, f"aoti_torch_dtype_{name}")()),
            ctypes.c_int32(library.aoti_torch_device_type_cpu()),
            ctypes.c_int32(0),
            ctypes.byref(made),
            ctypes.c_int32(library.aoti_torch_layout__mkldnn()),
            ctypes.c_void_p(order.data_ptr()),
            ctypes.c_int64(order.numel()),
        )
        if failed or not made.value:
            raise PackingError("it makes no such matrix")
        capsule: Any = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        packed: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(made, None, None))
    except (AttributeError, OSError, TypeError, RuntimeError) as error:
        raise PackingError(str(error)) from error
    return packed


@cache
def _library() -> ctypes.CDLL:
    """The library of torch that is loaded already."""
    return ctypes.CDLL(torch._C.__file__)
