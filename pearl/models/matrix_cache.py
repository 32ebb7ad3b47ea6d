"""Disk cache of a model's packed or quantised weight matrices, and of its probe's result, for faster starts.

Quantising the matrices takes longer than importing torch, and the probe (`DecoderLayers.probe`) half a second; a cached
file is just mapped into memory.  The file's name is a digest of all that its contents depend on: the checkpoint's
files, the processor, torch and our own code.  The cache is optional: on any failure, the matrices are made as usual.
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
)  # our modules that the contents depend on
_ALIGNED = 4096  # bytes: each tensor begins at a page boundary
_LEAST = 10_000_000  # bytes: smaller models are not worth caching
# Which kernels run depends on the processor (its first entry in /proc/cpuinfo, without the fields of `_VARYING`) and on
# environment variables with the prefixes of `_LIBRARIES`.
_VARYING = ("processor", "cpu mhz", "core id", "apicid", "initial apicid", "bogomips", "physical id", "microcode")
_LIBRARIES = ("ATEN_", "DNNL_", "GOMP_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "TORCH_")


class PackingError(Exception):
    """This torch cannot save or load matrices in oneDNN's layout."""


class MatrixCache:
    """Supplies a runner's matrices, in the order in which it asks for them, and then its probe's result.

    On a hit, all of these are loaded. On a miss, all are computed, and `probed` saves them.
    """

    def __init__(self, name: str | None = None) -> None:
        """`name`: the entry's directory in the cache; None: cache nothing."""
        self._name = name
        saved = None if name is None else _read(name)
        self._read: Iterator[Laid] | None = iter(saved[0]) if saved else None
        self._made: list[Laid] = []
        self._probed: Any = saved[1] if saved else None

    def laid(self, make: Make) -> Laid:
        """The next matrix: loaded, or on a miss the result of `make`."""
        if self._read is not None:
            return next(self._read)
        made = make()
        if self._name is not None:
            self._made.append(made)
        return made

    def probed(self, probe: Callable[[], Any]) -> Any:
        """The result of `probe`, which must be JSON: loaded, or computed and saved. Call after the last `laid`."""
        if self._read is not None:
            return self._probed
        found = probe()
        if self._name is not None:
            _save(self._name, self._made, found)
            self._made = []
        return found


def matrix_cache(directory: Path, *how: str) -> MatrixCache:
    """The cache for the checkpoint in `directory` on this CPU. `how`: settings that its matrices depend on."""
    try:
        files = [path for path in sorted(directory.iterdir()) if path.suffix in (".safetensors", ".json")]
        code = stamp([Path(__file__).with_name(f"{name}.py") for name in _CODE], contents=True)
        also = [code, torch.__version__, torch.get_num_threads(), how, _processor()]
        return MatrixCache(f"matrices-{stamp(files, also=also)}")
    except OSError as error:
        log.debug("cannot cache the matrices of %s: %s", directory, error)
        return MatrixCache()


def _processor() -> list[object]:
    first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    lines = [line for line in first if not line.lower().startswith(_VARYING)]
    chosen = sorted((name, value) for name, value in os.environ.items() if name.startswith(_LIBRARIES))
    return [torch.backends.cpu.get_cpu_capability(), lines, chosen]


def _read(name: str) -> tuple[list[Laid], Any] | None:
    """Load (matrices, the probe's result); None on a miss. Removes an unreadable entry."""
    where = find(name, checksums=True)
    if where is None:
        return None
    try:
        about = json.loads((where / _ABOUT).read_text())
        file = where / _BYTES  # mapped copy-on-write: the file never changes
        data = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
        return [_restore(_mapped(data, each)) for each in about["matrices"]], about["probed"]
    except Exception as error:  # another version of torch may raise anything
        log.debug("%s cannot be read (%s): rebuilding it", where, error)
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
        log.debug("cannot cache %s: %s", name, error)


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
    """The fields to save of a matrix; tensors are views of its memory. Raises `PackingError`."""
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
    """The inverse of `_contents`, without a copy. Raises `PackingError`."""
    if "steps" in saved:
        return Rounded(**saved)
    return Packed(_unpacked(**saved), memory=saved["data"])


def _unpacked(data: torch.Tensor, layout: torch.Tensor, shape: list[int], dtype: str) -> torch.Tensor:
    """A tensor in oneDNN's layout that uses `data` as its memory, so `data` must outlive it. Raises `PackingError`.

    torch has no Python function for this. AOTInductor's C interface, which loads a compiled model's constants, has one.
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
            raise PackingError("torch cannot create a tensor in oneDNN's layout")
        capsule: Any = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        packed: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(made, None, None))
    except (AttributeError, OSError, TypeError, RuntimeError) as error:
        raise PackingError(str(error)) from error
    return packed


@cache
def _library() -> ctypes.CDLL:
    """torch's shared library, already loaded into this process."""
    return ctypes.CDLL(torch._C.__file__)


def _check(restored: Laid, made: Laid) -> None:
    """Raise `PackingError` unless the restored matrix multiplies to the same bits as the original."""
    if isinstance(made, Packed):
        x = torch.linspace(-1, 1, 2 * made.matrix.shape[1]).view(2, -1).to(made.matrix.dtype)
        if not torch.equal(restored(x), made(x)):
            raise PackingError("a restored matrix gives other products")
