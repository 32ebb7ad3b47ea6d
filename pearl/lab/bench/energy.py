"""Energy, where the machine tells it: a GPU by NVML, a CPU by RAPL. Never estimated.

NVML counts what a whole GPU took since its driver was loaded; it needs `nvidia-ml-py`.  RAPL counts what a processor's
package took, and its memory where that is a domain of its own; Linux shows it to root, and to no virtual machine.  Both
count whatever ran there, ours or not.
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
    """What the devices of a measurement take.

    Args:
        gpus: numbers of GPUs, as torch has them. cores: whether CPU cores take part too.

    Attributes:
        source: what is counted; empty where any of it cannot be read, so that no part is taken for the whole.
    """

    def __init__(self, gpus: Sequence[int], cores: bool, powercap: Path = POWERCAP) -> None:
        counters: list[_Counter] = []
        names = []
        if gpus:
            found = _gpu_counters(gpus)
            names.append(f"{len(found)} GPU{'s' * (len(found) != 1)} (NVML)" if found else "")
            counters += found
        if cores:
            found = list(_processor_counters(powercap))
            names.append("processor (RAPL)" if found else "")
            counters += found
        self.source = " and ".join(names) if names and all(names) else ""
        self._counters = counters if self.source else []

    def joules(self) -> float | None:
        """Since some moment; None where `source` is empty, or has become unreadable."""
        try:
            return sum(counter() for counter in self._counters) if self._counters else None
        except (OSError, ValueError):
            return None


def _gpu_counters(gpus: Sequence[int]) -> list[_Counter]:
    """Of all of these, or of none. Unproven: no GPU was at hand."""
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
    """Of each package, and of each domain of memory, which is in no package's count."""
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
    """A counter of microjoules that begins anew beyond its largest value."""

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
