"""The hardware and versions of a measurement, its duration, and the CPU time that other processes took meanwhile."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

from pearl.trace.recorder import where_and_what

_MAX_FOREIGN_SHARE = (
    0.05  # of the cores' time; above it small differences between methods are noise
)


def hardware() -> dict[str, Any]:
    """Host, versions, processor, cores this process may use, OMP_NUM_THREADS, GPUs, operating system."""
    import torch

    cores = sorted(os.sched_getaffinity(0))
    return where_and_what() | {
        "cores": cores,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": platform.platform(),
    }


def in_words(where: dict[str, Any]) -> str:
    """`hardware()` as one line."""
    gpus = f", {len(where['gpus'])} x {where['gpus'][0]}" if where["gpus"] else ""
    versions = ", ".join(
        f"{name} {number}" for name, number in where["versions"].items() if name != "pyzmq"
    )
    return f"{where['processor']}, {len(where['cores'])} cores{gpus}; {versions}"


class Conditions:
    """Duration and foreign load of a measurement, from construction to `stop`. Load: Linux only; elsewhere 0.

    Attributes:
        stolen: share of all cores' time that the host took for other virtual machines; 0 on a physical machine.
        others: share taken by processes that are neither this one nor its children, which have ended by then.
    """

    def __init__(self) -> None:
        self._host, self._others, self._began = *_foreign_seconds(), time.monotonic()
        self.seconds = self.stolen = self.others = 0.0

    def stop(self) -> None:
        self.seconds = time.monotonic() - self._began
        host, others = _foreign_seconds()
        passed = max(self.seconds, 1e-9) * (os.cpu_count() or 1)
        self.stolen, self.others = (
            max(0.0, one) / passed for one in (host - self._host, others - self._others)
        )

    @property
    def are_noisy(self) -> bool:
        """Whether small differences are noise."""
        return self.stolen + self.others > _MAX_FOREIGN_SHARE

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the hardware."""
        shares = {"stolen": self.stolen, "others": self.others, "is_noisy": self.are_noisy}
        return {"seconds": self.seconds, **shares, "hardware": hardware()}

    def __str__(self) -> str:
        words = f"of the cores' time the host took {self.stolen:.1%} and other processes {self.others:.1%}"
        words += ": too much for fine differences" if self.are_noisy else ""
        return f"{self.seconds:.0f} s; {words}; {in_words(hardware())}"


def _foreign_seconds() -> tuple[float, float]:
    """Seconds of all cores since boot: (taken by the host, by processes other than this and its ended children)."""
    try:
        user, nice, system, _, _, interrupts, soft, stolen = map(
            int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        )
    except (OSError, ValueError):
        return 0.0, 0.0
    tick = os.sysconf("SC_CLK_TCK")
    return stolen / tick, (user + nice + system + interrupts + soft) / tick - sum(os.times()[:4])
