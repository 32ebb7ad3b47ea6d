"""How the products of `decode` are cut into programs: candidates, and the fastest of them on this GPU."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
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
    """What a cut is chosen for: a product's name, (outputs, inputs), kind of weights, and rows of the table."""

    name: str
    shape: tuple[int, int]
    kind: tuple[tuple[str, Any], ...]
    rows: int


@dataclass(frozen=True)
class Cut:
    """How one product is cut.

    Attributes:
        columns: outputs of a tile; of gate-up as many of each. inputs: of a warp at once.
        parts: programs that share a tile, each with its part of the inputs.
        warps: of a program, which share its inputs: a power of two. stages: see Triton.
    """

    columns: int
    inputs: int
    parts: int = 1
    warps: int = 4
    stages: int = 4

    def options(self, device: torch.device) -> dict[str, int]:
        """The launch's own options; the interpreter takes none."""
        return {"num_warps": self.warps, "num_stages": self.stages} if device.type == "cuda" else {}


_CANDIDATES = (  # each the fastest for some product of the shapes of Llama 1B and 7B, on an H100
    Cut(32, 64, 1, 4, 4),
    Cut(32, 128, 1, 4, 3),
    Cut(32, 128, 1, 2, 3),
    Cut(16, 128, 1, 4, 4),
    Cut(64, 64, 1, 2, 4),
)
_EIGHT_BITS = (
    Cut(32, 128, 1, 4, 3),
    Cut(32, 128, 1, 2, 4),
    Cut(16, 128, 1, 4, 4),
)
_FOUR_BITS = (
    Cut(32, 128, 1, 4, 1),
    Cut(16, 128, 1, 8, 1),
    Cut(32, 128, 1, 8, 1),
    Cut(16, 128, 1, 4, 1),
)
FAILURES = (OutOfResources, PTXASError)  # of a kernel that this GPU cannot run
ADDING = ("out", "down")  # products that are added to the hidden state
_LEAST = 16  # inputs at once
_REPLAYS = 10
_COMPILERS = 16  # most at once: each takes a few hundred megabytes
_PATIENCE = 300.0  # seconds to wait for another process that times kernels


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Holds this machine's lock for timing kernels: target and draft start together, often on one GPU."""
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
    """The cuts that fit a product, at least one; empty where its sizes are too odd for any.

    fewer: the cut that was chosen for smaller tables: then only cuts that add sums in the same order.
    """
    (outputs, inputs), kind, adds = product.shape, dict(product.kind), product.name in ADDING
    some: Sequence[Cut] = {4: _FOUR_BITS, 8: _EIGHT_BITS, 16: _CANDIDATES}[kind["BITS"]]
    if kind["BITS"] == 4:
        some = [replace(cut, inputs=4 * packed_together(inputs, kind["GROUP"])) for cut in some]
    if fewer is not None:
        some = [replace(fewer, columns=columns) for columns in sorted({fewer.columns, 16, 32})]
        some += [replace(fewer, stages=2)] * (fewer.stages > 2)
    fitting = [
        cut
        for cut in some
        if inputs % cut.inputs == 0
        and inputs >= cut.inputs * cut.parts
        and (outputs % cut.columns == 0 or not adds)
        and (cut.parts == 1 or product.name != "head")
    ]
    most = min(128, inputs & -inputs)
    columns = min(16, outputs & -outputs) if adds else 16
    if not fitting and fewer is None and min(most, columns) >= _LEAST and kind["BITS"] != 4:
        fitting = [Cut(columns, most)]
    return fitting


@contextmanager
def compiling() -> Iterator[None]:
    """Kernels that are asked for by `warmup` are compiled beside one another. Those that fail raise when launched."""
    with (
        ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1)) as pool,
        AsyncCompileMode(pool, ignore_errors=True),
    ):
        yield


class Cuts:
    """The cuts of products on a device, as timed now or when a model of their shapes was loaded before."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._path = device, cache_directory() / "kernels.json"

    def _known(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            return dict(json.loads(self._path.read_text()))
        return {}

    def _key(self, product: Product) -> str:
        name, (outputs, inputs), kind, rows = product
        weights = ", ".join(f"{setting.lower()} {value:g}" for setting, value in kind)
        about = f"{name} {outputs}x{inputs}, {weights}, {rows} rows"
        return f"{torch.cuda.get_device_name(self._device)}, torch {torch.__version__}, {about}"

    def fitting(self, product: Product, fewer: Cut | None) -> list[Cut]:
        """The cuts to choose from; one if nothing is left to choose. fewer: see `candidates`."""
        found = candidates(product, fewer)
        if not found:
            raise ValueError(
                f"no cut fits a product of {product.shape[0]} outputs and {product.shape[1]} inputs"
            )
        if self._device.type != "cuda":
            return found[:1]
        with suppress(KeyError, TypeError):
            if (cut := Cut(**self._known()[self._key(product)])) in found:
                return [cut]
        return found

    def fastest(
        self, product: Product, fitting: Sequence[Cut], launch: Callable[[Cut], object]
    ) -> Cut:
        """Time them, and keep the fastest in a file."""
        if len(fitting) == 1:
            return fitting[0]
        log.info(
            "timing kernels for a product of %d outputs and %d inputs, once on this GPU",
            *product.shape,
        )
        taken = [recorded_milliseconds(lambda: launch(cut)) for cut in fitting]  # noqa: B023
        best = fitting[taken.index(min(taken))]
        if min(taken) == math.inf:
            return best  # its launch says why it cannot run
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_suffix(f".{os.getpid()}")
            partial.write_text(
                json.dumps(self._known() | {self._key(product): asdict(best)}, indent=1)
            )
            os.replace(partial, self._path)
        return best


def recorded_milliseconds(launch: Callable[[], object]) -> float:
    """Of launches, recorded; infinite where the GPU has no room for a kernel, or its compiler fails."""
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
    """Of a recording, in the median."""
    replay()
    times = []
    for _ in range(_REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)
