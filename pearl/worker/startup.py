"""The parts of a worker's start and their seconds, for one line of the log."""

from __future__ import annotations

import os
import time
from collections.abc import MutableMapping
from pathlib import Path


def allow_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Let torch's GPU memory grow in place, unless the user has set this. Call before torch is imported.

    Our own forward copies the weights to another layout, layer by layer; with memory in blocks of fixed sizes that
    leaves gigabytes of holes, too much for a model that nearly fills its GPU.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in environment:  # its name before torch 2.9, read still
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


class Startup:
    """The parts of this process's start, from its launch on."""

    def __init__(self) -> None:
        self._ends: list[tuple[str, float]] = []

    def passed(self, part: str) -> None:
        """`part` ends now; it began where the one before ended."""
        self._ends.append((part, _age()))

    def __str__(self) -> str:
        """Seconds of each part and of all, and CPU time."""
        begins = [0.0, *(end for _, end in self._ends)]
        parts = [f"{part} {end - begin:.2f}" for begin, (part, end) in zip(begins, self._ends, strict=False)]
        return f"start-up took {begins[-1]:.2f} s ({time.process_time():.2f} s of CPU): {', '.join(parts)}"


def _age() -> float:
    """Seconds since this process was started."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
