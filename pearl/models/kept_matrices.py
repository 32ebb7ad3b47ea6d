"""What a runner finds out about a model's weights on this processor, kept for the starts that come after.

To round a model's matrices takes longer than to import torch, and to probe how rows become independent of one another
half a second more.  To lay matrices out for the processor is quick, but takes memory of their size; what was kept is
mapped.  All of it depends on the checkpoint's files, the processor, torch and our own code: these are the name under
which it is kept.  What cannot be kept, or read, is found anew.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from pearl.cache import converted, find, fits, silent, stamp
from pearl.errors import ConfigError, ModelError
from pearl.models.matrices import Laid, Make, Packed, Rounded
from pearl.models.packed import PackingError, contents, restored

log = logging.getLogger(__name__)

_BYTES, _ABOUT = "matrices", "about.json"
_CODE = ("attention", "kept_matrices", "llama", "matrices", "packed")  # our modules that decide what is found
_LEAST = 10_000_000  # bytes of matrices: of fewer, all of it is found in a moment
_ALIGNED = 4096  # bytes: each part begins with a page
# What decides which kernels compute: the first processor's lines in /proc/cpuinfo but these, and of the environment.
_VARYING = ("processor", "cpu mhz", "core id", "apicid", "initial apicid", "bogomips", "physical id", "microcode")
_LIBRARIES = ("ATEN_", "DNNL_", "GOMP_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "TORCH_")


class Findings:
    """Results in the order in which a runner asks for them: made now, or as they were kept.

    Attributes:
        were_kept: whether they were found in the cache; nothing is made then.
    """

    def __init__(self, name: str | None = None) -> None:
        """`name`: of the directory in the cache; None: nothing is kept."""
        self._name = name
        kept = None if name is None else _read(name)
        self.were_kept = kept is not None
        self._made: list[Laid] = []
        self._unread: Iterator[Laid] = iter(kept[0] if kept else ())
        self._probed: Any = kept[1] if kept else None

    def laid(self, make: Make) -> Laid:
        """The next matrix in order."""
        if self.were_kept:
            return next(self._unread)
        made = make()
        if self._name is not None:
            self._made.append(made)
        return made

    def probed(self, probe: Callable[[], Any]) -> Any:
        """What `probe` returns, which is JSON; to be asked for last."""
        if self.were_kept:
            return self._probed
        found = probe()
        if self._name is not None:
            _keep(self._name, self._made, found)
            self._made = []
        return found


def findings_of(directory: Path, *how: str) -> Findings:
    """What is known of the checkpoint in `directory`, to be computed on this CPU as `how` says."""
    try:
        return Findings(_name(directory, how))
    except OSError as error:
        log.debug("what is found out about %s is not kept: %s", directory, error)
        return Findings()


def _name(directory: Path, how: tuple[str, ...]) -> str:
    """By all that the results depend on. Raises `OSError`."""
    files = [path for path in sorted(directory.iterdir()) if path.suffix in (".safetensors", ".json")]
    # By their contents: who changes what they find need not remember to change a number as well.
    code = stamp([Path(__file__).with_name(f"{name}.py") for name in _CODE], contents=True)
    return f"matrices-{stamp(files, also=[code, torch.__version__, torch.get_num_threads(), how, _processor()])}"


def _processor() -> list[object]:
    first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    lines = [line for line in first if not line.lower().startswith(_VARYING)]
    chosen = sorted((name, value) for name, value in os.environ.items() if name.startswith(_LIBRARIES))
    return [torch.backends.cpu.get_cpu_capability(), lines, chosen]


def _read(name: str) -> tuple[list[Laid], Any] | None:
    """What was kept under this name; None: nothing. What is damaged is removed."""
    where = find(name)
    if where is None:
        return None
    try:
        about = json.loads((where / _ABOUT).read_text())
        if about.pop("digest") != _digest(about):
            raise ValueError("its description has changed")
        size = (where / _BYTES).stat().st_size
        # A private mapping: whoever writes to it writes to a copy.
        mapped = torch.from_file(str(where / _BYTES), size=size, dtype=torch.uint8) if size else torch.empty(0)
        read = [[mapped[start : start + size] for start, size in each["places"]] for each in about["matrices"]]
        if _checksum(chain.from_iterable(read)) != about["checksum"]:
            raise ValueError("its matrices have changed")
        return [_from_bytes(each, parts) for each, parts in zip(about["matrices"], read, strict=True)], about["probed"]
    except Exception as error:  # whatever damaged files may raise
        log.debug("%s is damaged (%s): making it anew", where, error)
        shutil.rmtree(where, ignore_errors=True)
        return None


def _keep(name: str, matrices: list[Laid], probed: Any) -> None:
    try:
        made = [_to_bytes(each) for each in matrices]
        size = sum(_whole_pages(part.nbytes) for _, parts in made for part in parts)
        if size < _LEAST or not fits(size):
            return
        for (about, parts), each in zip(made, matrices, strict=True):
            _check(_from_bytes(about, parts), each)

        def build(building: Path, progress: object) -> None:
            building.mkdir()
            checksum = _checksum(part for _, parts in made for part in parts)
            with (building / _BYTES).open("wb") as file:
                said = [about | {"places": [_append(file, part) for part in parts]} for about, parts in made]
            about = {"matrices": said, "checksum": checksum, "probed": probed}
            (building / _ABOUT).write_text(json.dumps({**about, "digest": _digest(about)}))

        converted(name, build, silent)
    except (PackingError, ModelError, ConfigError, OSError) as error:  # the next start takes longer then, and works
        log.debug("%s is not kept: %s", name, error)


def _append(file: Any, part: torch.Tensor) -> tuple[int, int]:
    """Where it stands in the file: first byte and number."""
    start = file.seek(_whole_pages(file.tell()))
    file.write(part.numpy())
    return start, part.nbytes


def _whole_pages(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _to_bytes(matrix: Laid) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """What `_from_bytes` must know, and the bytes of its parts. Raises `PackingError`."""
    if isinstance(matrix, Packed):
        data, order = contents(matrix.matrix)
        return {"shape": list(matrix.matrix.shape), "dtype": _plain(matrix.matrix.dtype)}, [data, order]
    parts = [matrix.steps.contiguous(), matrix.scales.contiguous()]
    about = {"rows": matrix.rows, "parts": [(list(part.shape), _plain(part.dtype)) for part in parts]}
    return about, [part.flatten().view(torch.uint8) for part in parts]


def _from_bytes(about: dict[str, Any], parts: list[torch.Tensor]) -> Laid:
    """The matrix in the memory of its `parts`. Raises `PackingError`."""
    if "rows" not in about:
        data, order = parts
        rows, columns = about["shape"]
        return Packed(restored(data, order, (rows, columns), getattr(torch, about["dtype"])), memory=data)
    steps, scales = (
        part.view(getattr(torch, dtype)).view(shape) for part, (shape, dtype) in zip(parts, about["parts"], strict=True)
    )
    return Rounded(steps, scales, about["rows"])


def _check(found: Laid, made: Laid) -> None:
    """Raises `PackingError` where what was kept would give another product than what was made."""
    if isinstance(made, Packed):
        x = torch.linspace(-1, 1, 2 * made.matrix.shape[1]).view(2, -1).to(made.matrix.dtype)
        if not torch.equal(found(x), made(x)):
            raise PackingError("it does not give the same")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _checksum(parts: Any) -> int:
    total = 0
    for part in parts:
        total = zlib.crc32(part.numpy(), total)
    return total


def _digest(about: dict[str, Any]) -> str:
    return blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16).hexdigest()
