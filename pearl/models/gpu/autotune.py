"""Autotuner: tile sizes of the decode GEMMs, timed once per GPU and shape, and kept in a file."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from triton import AsyncCompileMode
from triton.runtime.errors import OutOfResources, PTXASError

from pearl.cache import cache_directory
from pearl.models.forward.linear_layers import packed_together

log = logging.getLogger(__name__)


class Product(NamedTuple):
    """The key of a cut: a product's name, shape (outputs, inputs), kind of weights, and table rows."""

    name: str
    shape: tuple[int, int]
    kind: tuple[tuple[str, Any], ...]
    rows: int


@dataclass(frozen=True)
class Cut:
    """Tile sizes of one product.

    Attributes:
        columns: outputs of a tile; gate-up has as many of each.
        inputs: inputs that a warp multiplies at once.
        warps: warps of a program, which share its inputs: a power of two.
        stages: see Triton.
    """

    columns: int
    inputs: int
    warps: int = 4
    stages: int = 4

    def constants(self) -> dict[str, int]:
        """Return the constants of a product's kernel, and the options of its launch."""
        return {
            "BN": self.columns,
            "BK": self.inputs,
            "S": self.warps,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


# By bits of the weights: each cut is the fastest for some product of Llama 1B and 7B on an H100.
_CANDIDATES = {
    16: [
        Cut(32, 64, 4, 4),
        Cut(32, 128, 4, 3),
        Cut(32, 128, 2, 3),
        Cut(16, 128, 4, 4),
        Cut(64, 64, 2, 4),
    ],
    8: [
        Cut(32, 128, 4, 3),
        Cut(32, 128, 2, 4),
        Cut(16, 128, 4, 4),
    ],
    4: [
        Cut(32, 128, 4, 1),
        Cut(16, 128, 8, 1),
        Cut(32, 128, 8, 1),
        Cut(16, 128, 4, 1),
    ],
}
FAILURES = (OutOfResources, PTXASError)  # of a kernel that this GPU cannot run
ADDING = ("out", "down")  # products that are added to the hidden state
_LEAST = 16  # inputs at once
_REPLAYS = 10
_COMPILERS = 16  # most at once: each takes a few hundred megabytes
_PATIENCE = 300.0  # seconds to wait for another process that times kernels


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold this machine's lock for timing kernels: target and draft start together, often on one GPU."""
    directory = cache_directory()
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(directory / "kernels.lock").acquire(timeout=_PATIENCE)
    except (OSError, Timeout):
        yield
        return
    with lock:
        yield


def candidates(product: Product, fewer: Cut | None = None) -> list[Cut]:
    """Return the cuts that fit a product; none if its sizes are too odd for any.

    Args:
        fewer: the cut that was chosen for smaller tables. If there is one, only cuts that add sums in
            the same order are returned.
    """
    outputs, inputs = product.shape
    kind = dict(product.kind)
    bits = kind["BITS"]
    is_added = product.name in ADDING
    cuts = _CANDIDATES[bits]
    if bits == 4:
        packed = 4 * packed_together(inputs, kind["GROUP"])
        cuts = [replace(cut, inputs=packed) for cut in cuts]
    if fewer is not None:
        cuts = [replace(fewer, columns=columns) for columns in sorted({fewer.columns, 16, 32})]
        if fewer.stages > 2:
            cuts.append(replace(fewer, stages=2))
    fitting = []
    for cut in cuts:
        has_columns = outputs % cut.columns == 0 or not is_added
        if has_columns and inputs % cut.inputs == 0:
            fitting.append(cut)
    if fitting or fewer is not None or bits == 4:
        return fitting
    at_once = min(128, inputs & -inputs)
    columns = 16
    if is_added:
        columns = min(columns, outputs & -outputs)
    if min(at_once, columns) >= _LEAST:
        return [Cut(columns, at_once)]
    return []


@contextmanager
def compiling() -> Iterator[None]:
    """Compile the kernels that `warmup` asks for in parallel. Those that fail raise when launched."""
    with (
        ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1)) as pool,
        AsyncCompileMode(pool, ignore_errors=True),
    ):
        yield


class Cuts:
    """The cuts of products on a device, timed now or when a model of their shapes was loaded earlier."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._path = cache_directory() / "kernels.json"

    def _read(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            return dict(json.loads(self._path.read_text()))
        return {}

    def _key(self, product: Product) -> str:
        outputs, inputs = product.shape
        weights = ", ".join(f"{setting.lower()} {value:g}" for setting, value in product.kind)
        about = f"{product.name} {outputs}x{inputs}, {weights}, {product.rows} rows"
        return f"{torch.cuda.get_device_name(self._device)}, torch {torch.__version__}, {about}"

    def fitting(
        self,
        product: Product,
        fewer: Cut | None,
    ) -> list[Cut]:
        """Return the cuts to choose from; a single one if it was chosen earlier.

        Raises:
            ValueError: no cut fits.

        Args:
            fewer: see `candidates`.
        """
        cuts = candidates(product, fewer)
        if not cuts:
            outputs, inputs = product.shape
            raise ValueError(f"no cut fits a product of {outputs} outputs and {inputs} inputs")
        if self._device.type != "cuda":
            return cuts[:1]
        with suppress(KeyError, TypeError):
            cut = Cut(**self._read()[self._key(product)])
            if cut in cuts:
                return [cut]
        return cuts

    def fastest(
        self,
        product: Product,
        fitting: Sequence[Cut],
        launch: Callable[[Cut], object],
    ) -> Cut:
        """Time the cuts, keep the fastest in the file, and return it."""
        if len(fitting) == 1:
            return fitting[0]
        log.info(
            "timing kernels for a product of %d outputs and %d inputs, once on this GPU",
            *product.shape,
        )
        times = [recorded_milliseconds(partial(launch, cut)) for cut in fitting]
        fastest = fitting[times.index(min(times))]
        if min(times) == math.inf:
            return fastest  # its launch says why it cannot run
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            cuts = self._read()
            cuts[self._key(product)] = asdict(fastest)
            draft = self._path.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(cuts, indent=1))
            os.replace(draft, self._path)
        return fastest


def recorded_milliseconds(launch: Callable[[], object]) -> float:
    """Record launches and time a replay; infinite if a kernel does not fit or does not compile."""
    try:
        launch()  # libraries and kernels are loaded here, not while this is recorded
    except FAILURES:
        return math.inf
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return milliseconds(graph.replay)


def milliseconds(replay: Callable[[], object]) -> float:
    """Return the median time of a replay."""
    replay()
    times = []
    for _ in range(_REPLAYS):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)
