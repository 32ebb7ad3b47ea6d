"""Energy counters: GPUs by NVML (needs `nvidia-ml-py`), processors by RAPL. Never estimated.

NVML counts what a whole GPU used since its driver was loaded.  RAPL counts a processor's package, and its memory where
that is a domain of its own; Linux shows it to root only, and to no virtual machine.  Both count every process there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

POWERCAP = Path("/sys/class/powercap")
_Counter = Callable[[], float]  # joules since some moment


class Meter:
    """Reads the energy counters of a measurement's devices.

    Args:
        gpus: numbers of GPUs, as torch has them. cores: whether CPU cores take part too.

    Attributes:
        source: what is counted; empty if the counter of any of these devices cannot be read.
    """

    def __init__(self, gpus: Sequence[int], cores: bool, powercap: Path = POWERCAP) -> None:
        parts: list[tuple[str, list[_Counter]]] = []
        if gpus:
            parts.append((f"{len(gpus)} GPU{'s' * (len(gpus) != 1)} (NVML)", _gpu_counters(gpus)))
        if cores:
            parts.append(("processor (RAPL)", list(_processor_counters(powercap))))
        is_complete = all(counters for _, counters in parts)
        self.source = " and ".join(name for name, _ in parts) if is_complete else ""
        self._counters = [counter for _, counters in parts for counter in counters] if is_complete else []

    def joules(self) -> float | None:
        """Since some moment; None if `source` is empty or has become unreadable."""
        try:
            return sum(counter() for counter in self._counters) if self._counters else None
        except (OSError, ValueError):
            return None


def _gpu_counters(gpus: Sequence[int]) -> list[_Counter]:
    """One counter for each GPU; none if any of them has no counter."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
        uuids = [torch.cuda.get_device_properties(number).uuid for number in gpus]
        handles = [nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
        counters = [_gpu_counter(nvml, handle) for handle in handles]
        for counter in counters:
            counter()
    except (nvml.NVMLError, RuntimeError, AttributeError):  # of a driver or card without it
        return []
    return counters


def _gpu_counter(nvml: Any, handle: Any) -> _Counter:
    return lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3


def _processor_counters(powercap: Path) -> Iterator[_Counter]:
    """One counter for each package, and for each memory domain, which no package counts."""
    for domain in sorted(powercap.glob("intel-rapl:*")):
        try:
            name = (domain / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                counter = _Domain(domain)
                counter()
                yield counter
        except (OSError, ValueError):
            return


class _Domain:
    """A counter of microjoules that wraps around after its largest value."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text()) + 1
        self._last = self._read()
        self._total = 0

    def _read(self) -> int:
        return int(self._file.read_text())

    def __call__(self) -> float:
        now = self._read()
        self._total += (now - self._last) % self._range
        self._last = now
        return self._total / 1e6
