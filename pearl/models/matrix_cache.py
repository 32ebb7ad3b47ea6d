"""A model's matrices as laid out for this processor, and the results of its probe, cached for later starts.

Rounding a model's matrices takes longer than importing torch, and the probe takes half a second; a cached file is
mapped.  Its name is a digest of all that the results depend on: the checkpoint's files, the processor, torch and our
own code.  What cannot be cached or read is made anew.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pearl.cache import converted, find, fits, silent, stamp
from pearl.errors import ConfigError, ModelError
from pearl.models.matrices import Laid, Make, Packed, Rounded

log = logging.getLogger(__name__)

_BYTES, _ABOUT = "matrices", "about.json"
_TENSORS = {"data", "layout", "steps", "scales"}
_CODE = (
    "attention",
    "layers",
    "llama",
    "matrices",
    "matrix_cache",
    "probe",
    "slot_attention",
)  # our modules that decide what is made
_ALIGNED = 4096  # bytes: each matrix begins with a page
_LEAST = 10_000_000  # bytes of matrices: fewer are made in a moment
# What decides which kernels compute: the first processor's lines in /proc/cpuinfo but these, and of the environment.
_VARYING = ("processor", "cpu mhz", "core id", "apicid", "initial apicid", "bogomips", "physical id", "microcode")
_LIBRARIES = ("ATEN_", "DNNL_", "GOMP_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "TORCH_")


class PackingError(Exception):
    """This torch cannot save or load matrices in oneDNN's layout."""


class MatrixCache:
    """Gives a runner its matrices, in the order in which it needs them, and then its probe's result.

    Made now, and saved with the last of them; or as they were saved, and then nothing is made.
    """

    def __init__(self, name: str | None = None) -> None:
        """`name`: of the directory in the cache; None: nothing is saved."""
        self._name = name
        saved = None if name is None else _read(name)
        self._read: Iterator[Laid] | None = iter(saved[0]) if saved else None
        self._made: list[Laid] = []
        self._probed: Any = saved[1] if saved else None

    def laid(self, make: Make) -> Laid:
        """The next matrix."""
        if self._read is not None:
            return next(self._read)
        made = make()
        if self._name is not None:
            self._made.append(made)
        return made

    def probed(self, probe: Callable[[], Any]) -> Any:
        """What `probe` returns (numbers); to be called after the last `laid`."""
        if self._read is not None:
            return self._probed
        found = probe()
        if self._name is not None:
            _save(self._name, self._made, found)
            self._made = []
        return found


def matrix_cache(directory: Path, *how: str) -> MatrixCache:
    """The cache for the checkpoint in `directory`, computed on this CPU as `how` describes."""
    try:
        files = [path for path in sorted(directory.iterdir()) if path.suffix in (".safetensors", ".json")]
        code = stamp([Path(__file__).with_name(f"{name}.py") for name in _CODE], contents=True)
        also = [code, torch.__version__, torch.get_num_threads(), how, _processor()]
        return MatrixCache(f"matrices-{stamp(files, also=also)}")
    except OSError as error:
        log.debug("the matrices of %s are not cached: %s", directory, error)
        return MatrixCache()


def _processor() -> list[object]:
    first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    lines = [line for line in first if not line.lower().startswith(_VARYING)]
    chosen = sorted((name, value) for name, value in os.environ.items() if name.startswith(_LIBRARIES))
    return [torch.backends.cpu.get_cpu_capability(), lines, chosen]


def _read(name: str) -> tuple[list[Laid], Any] | None:
    """(matrices, the probe's result) as they were saved; None: they were not. Removes what is damaged."""
    where = find(name, checksums=True)
    if where is None:
        return None
    try:
        about = json.loads((where / _ABOUT).read_text())
        file = where / _BYTES  # mapped privately: writes go to a copy
        data = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
        return [_restore(_mapped(data, each)) for each in about["matrices"]], about["probed"]
    except Exception as error:  # whatever a file of another torch may raise
        log.debug("%s cannot be read (%s): making it anew", where, error)
        shutil.rmtree(where, ignore_errors=True)
        return None


def _save(name: str, matrices: list[Laid], probed: Any) -> None:
    try:
        saved = [_contents(each) for each in matrices]
        size = sum(part.nbytes for each in saved for part in each.values() if isinstance(part, torch.Tensor))
        if size < _LEAST or not fits(size):
            return
        for parts, made in zip(saved, matrices, strict=True):
            _check(_restore(parts), made)

        def build(building: Path, progress: object) -> None:
            building.mkdir()
            with (building / _BYTES).open("wb") as file:
                written = [_write(file, parts) for parts in saved]
            (building / _ABOUT).write_text(json.dumps({"matrices": written, "probed": probed}))

        converted(name, build, silent, checksums=True)
    except (PackingError, ModelError, ConfigError, OSError, RuntimeError) as error:  # the next start is just slower
        log.debug("%s is not cached: %s", name, error)


def _write(file: BinaryIO, parts: dict[str, Any]) -> dict[str, Any]:
    """Append the tensors of `parts`; return `parts` as JSON, with [start, dtype, shape] for a tensor."""
    written = dict(parts)
    for name, part in parts.items():
        if isinstance(part, torch.Tensor):
            start = file.seek(-(-file.tell() // _ALIGNED) * _ALIGNED)
            written[name] = [start, _plain(part.dtype), list(part.shape)]
            file.write(part.flatten().view(torch.uint8).numpy().data)
    return written


def _mapped(data: torch.Tensor, written: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `_write`, as views of the file's bytes."""
    parts = dict(written)
    for name in parts.keys() & _TENSORS:
        start, kind, shape = written[name]
        dtype = getattr(torch, kind)
        parts[name] = data[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
    return parts


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _contents(made: Laid) -> dict[str, Any]:
    """What is saved of a matrix. Raises `PackingError`."""
    if isinstance(made, Rounded):
        return vars(made)
    packed = made.matrix
    try:
        size, start = torch.ops.mkldnn._nbytes(packed), torch.ops.mkldnn.data_ptr(packed)
        layout: torch.Tensor = torch.ops.mkldnn._get_mkldnn_serialized_md(packed)
    except (AttributeError, RuntimeError) as error:
        raise PackingError(str(error)) from error
    data = torch.frombuffer((ctypes.c_ubyte * size).from_address(start), dtype=torch.uint8)  # a view
    return {"data": data, "layout": layout, "shape": list(packed.shape), "dtype": _plain(packed.dtype)}


def _restore(saved: dict[str, Any]) -> Laid:
    """The matrix in the memory of what was saved. Raises `PackingError`."""
    if "steps" in saved:
        return Rounded(**saved)
    return Packed(_unpacked(**saved), memory=saved["data"])


def _unpacked(data: torch.Tensor, layout: torch.Tensor, shape: list[int], dtype: str) -> torch.Tensor:
    """A matrix in oneDNN's layout over `data`, by torch's interface for compiled models, whose constants these are.

    It does not own `data`, which must outlive it. Raises `PackingError`.
    """
    try:
        library, made = _library(), ctypes.c_void_p()
        failed = library.aoti_torch_create_tensor_from_blob_v2(
            ctypes.c_void_p(data.data_ptr()),
            ctypes.c_int64(2),
            (ctypes.c_int64 * 2)(*shape),
            (ctypes.c_int64 * 2)(shape[1], 1),
            ctypes.c_int64(0),
            ctypes.c_int32(getattr(library, f"aoti_torch_dtype_{dtype}")()),
            ctypes.c_int32(library.aoti_torch_device_type_cpu()),
            ctypes.c_int32(0),
            ctypes.byref(made),
            ctypes.c_int32(library.aoti_torch_layout__mkldnn()),
            ctypes.c_void_p(layout.data_ptr()),
            ctypes.c_int64(layout.numel()),
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
    """torch's library, which is loaded already."""
    return ctypes.CDLL(torch._C.__file__)


def _check(restored: Laid, made: Laid) -> None:
    """Raise `PackingError` where a restored matrix gives another product than the one that was made."""
    if isinstance(made, Packed):
        x = torch.linspace(-1, 1, 2 * made.matrix.shape[1]).view(2, -1).to(made.matrix.dtype)
        if not torch.equal(restored(x), made(x)):
            raise PackingError("it does not give the same")
