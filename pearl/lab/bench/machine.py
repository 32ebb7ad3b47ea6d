"""The hardware and versions of a measurement, its duration, and the CPU time that other processes took meanwhile."""

import os
import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

from pearl.trace.recorder import where_and_what

_MAX_FOREIGN_SHARE = 0.05  # share of the cores' time; above it small differences are noise


def hardware() -> dict[str, Any]:
    """Return host, versions, processor, this process's cores, OMP_NUM_THREADS, GPUs and operating system."""
    import torch

    cores = sorted(os.sched_getaffinity(0))
    return where_and_what() | {
        "cores": cores,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": platform.platform(),
    }


def in_words(where: dict[str, Any]) -> str:
    """Return `hardware()` as one line."""
    versions = []
    for name, number in where["versions"].items():
        if name != "pyzmq":
            versions.append(f"{name} {number}")
    gpus = where["gpus"]
    words = f"{where['processor']}, {len(where['cores'])} cores"
    if gpus:
        words += f", {len(gpus)} x {gpus[0]}"
    return f"{words}; {', '.join(versions)}"


class Conditions:
    """The duration of a measurement, and the load by others meanwhile, from construction to `stop`.

    Outside Linux the load is unknown and counts as 0.

    Attributes:
        stolen: share of all cores' time that the host took for other virtual machines; 0 on a
            physical machine.
        others: share of all cores' time that other processes took. This process is not counted, nor
            are its children that have ended when `stop` is called.
    """

    def __init__(self) -> None:
        self._foreign_at_start = _foreign_seconds()
        self._began = time.monotonic()
        self.seconds = 0.0
        self.stolen = 0.0
        self.others = 0.0

    def stop(self) -> None:
        self.seconds = time.monotonic() - self._began
        at_start = self._foreign_at_start
        at_end = _foreign_seconds()
        core_seconds = max(self.seconds, 1e-9) * (os.cpu_count() or 1)
        self.stolen = max(0.0, at_end.host - at_start.host) / core_seconds
        self.others = max(0.0, at_end.processes - at_start.processes) / core_seconds

    @property
    def are_noisy(self) -> bool:
        """Whether others took so much time that small differences are noise."""
        return self.stolen + self.others > _MAX_FOREIGN_SHARE

    def as_dict(self) -> dict[str, Any]:
        """Return the conditions for JSON, with the hardware."""
        return {
            "seconds": self.seconds,
            "stolen": self.stolen,
            "others": self.others,
            "is_noisy": self.are_noisy,
            "hardware": hardware(),
        }

    def __str__(self) -> str:
        words = f"of the cores' time the host took {self.stolen:.1%} and other processes {self.others:.1%}"
        if self.are_noisy:
            words += ": too much for fine differences"
        return f"{self.seconds:.0f} s; {words}; {in_words(hardware())}"


class _Foreign(NamedTuple):
    """The time that others have taken since boot, in seconds of one core.

    Attributes:
        host: time taken by the host of a virtual machine.
        processes: time of all processes, except this one and its children that have ended.
    """

    host: float
    processes: float


def _foreign_seconds() -> _Foreign:
    try:
        first_line, _, _ = Path("/proc/stat").read_text().partition("\n")
        user, nice, system, _, _, interrupts, soft, stolen = map(int, first_line.split()[1:9])
    except (OSError, ValueError):
        return _Foreign(0.0, 0.0)
    ticks = os.sysconf("SC_CLK_TCK")
    busy = (user + nice + system + interrupts + soft) / ticks
    return _Foreign(stolen / ticks, busy - sum(os.times()[:4]))
