"""Autotuner: chooses the tile sizes of the decode GEMMs.

The kernels are timed once for each GPU and each shape; the choices are kept in a file.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from msgspec import toml
from triton import AsyncCompileMode
from triton.runtime.errors import OutOfResources, PTXASError

from pearl.cache import cache_directory
from pearl.models.forward.linear_layers import packed_together

log = logging.getLogger(__name__)


class Product(NamedTuple):
    """A matrix product for which a `Cut` is chosen.

    Attributes:
        name: its place in the forward, such as "qkv".
        shape: (outputs, inputs).
        kind: how the weights are stored; see `KernelMatrix.options`.
        rows: number of rows of the table that is multiplied.
    """

    name: str
    shape: tuple[int, int]
    kind: tuple[tuple[str, Any], ...]
    rows: int


@dataclass(frozen=True)
class Cut:
    """Tile sizes with which the kernel of one product computes.

    Attributes:
        columns: number of outputs in a tile; in the product of gate and up, this many of each.
        inputs: number of inputs that a warp multiplies at once.
        warps: number of warps of a program, a power of two; they share the program's inputs.
        stages: pipeline stages, Triton's `num_stages`.
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


_TABLES = Path(__file__).with_name("cuts.toml")
_CANDIDATES = toml.decode(_TABLES.read_bytes(), type=dict[int, list[Cut]])  # by bits of weights
FAILURES = (OutOfResources, PTXASError)  # what a kernel raises that this GPU cannot run
ADDING = ("out", "down")  # products that are added to the hidden state
_LEAST = 16  # least columns and inputs of a cut
_REPLAYS = 10
_COMPILERS = 16  # most compilers at once: each takes a few hundred megabytes
_PATIENCE = 300.0  # seconds to wait for another process that times kernels


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold this machine's lock for timing kernels.

    Target and draft start at the same time, often on one GPU, and would disturb each other's times.
    Go on without the lock if another process holds it for `_PATIENCE` seconds.
    """
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
    """Return the cuts that fit the sizes of a product; an empty list if no cut fits.

    Args:
        fewer: the cut that was chosen for tables of fewer rows. If it is given, only cuts that add
            sums in the same order are returned.
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
    """Within this context, compile in parallel the kernels for which `warmup` is called.

    A kernel that does not compile raises its error when it is launched.
    """
    with (
        ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1)) as pool,
        AsyncCompileMode(pool, ignore_errors=True),
    ):
        yield


class Cuts:
    """Chooses the cuts of products on a device: by timing, or from the file of earlier choices."""

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
        """Return the cuts to choose from. If a cut was chosen earlier, return only that one.

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
        """Time the cuts of a product, write the fastest to the file of choices, and return it.

        If there is only one cut, it is returned without timing.

        Args:
            launch: launches the product with a cut.
        """
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
            building = self._path.with_suffix(f".{os.getpid()}")
            building.write_text(json.dumps(cuts, indent=1))
            os.replace(building, self._path)
        return fastest


def recorded_milliseconds(launch: Callable[[], object]) -> float:
    """Record the kernels that `launch` starts; return the time of a replay in milliseconds.

    Return infinity if a kernel does not fit this GPU, or does not compile.
    """
    try:
        launch()  # loads libraries and kernels, which must not happen while recording
    except FAILURES:
        return math.inf
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return milliseconds(graph.replay)


def milliseconds(replay: Callable[[], object]) -> float:
    """Return the median time of a replay, in milliseconds."""
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
