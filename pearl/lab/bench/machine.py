"""Where a figure was measured, and how much of the time the machine was somebody else's."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from pearl.trace.recorder import where_and_what


def hardware() -> dict[str, Any]:
    """Host, versions, processor, cores this process may use, threads a core, GPUs."""
    cores = sorted(os.sched_getaffinity(0))
    return where_and_what() | {
        "processor": _processor(),
        "cores": cores,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": platform.platform(),
    }


def in_words(where: dict[str, Any]) -> str:
    """`hardware()` in a line."""
    gpus = f", {len(where['gpus'])} x {where['gpus'][0]}" if where["gpus"] else ""
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items() if name != "pyzmq")
    return f"{where['processor']}, {len(where['cores'])} cores{gpus}; {versions}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


class Stolen:
    """The share of the cores' time that the host took away for other machines since this was made.

    On a virtual machine only, and where Linux tells it; 0 elsewhere.
    """

    def __init__(self) -> None:
        self._seconds, self._began = _stolen_seconds(), time.monotonic()

    @property
    def share(self) -> float:
        passed = time.monotonic() - self._began
        return (_stolen_seconds() - self._seconds) / (os.cpu_count() or 1) / passed if passed else 0.0


def _stolen_seconds() -> float:
    """Of all cores together, since the start of the machine."""
    try:
        return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0
