"""Where a model runs, as users name it: cuda:0, cpu:0-3. Must not know torch: workers translate the name."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_GPUS = ("nvidia[0-9]*", "dxg", "kfd")  # devices of NVIDIA's driver, of WSL, of AMD's driver
_MOST_NUMBERS = 4096  # of cores or GPUs in a name


@dataclass(frozen=True)
class Device:
    """A device as named by the user.

    Attributes:
        gpus: GPU numbers; several for a model that is spread over them.
        cores: CPU cores to pin to; None: not pinned.
    """

    kind: Literal["auto", "cpu", "cuda"]
    gpus: tuple[int, ...] = ()
    cores: tuple[int, ...] | None = None

    @staticmethod
    def parse(name: str) -> Device:
        """Raises ValueError for anything but auto, cpu, cpu:0, cpu:0-3, cpu:0,2, cuda, cuda:1, cuda:0-1."""
        kind, colon, rest = name.partition(":")
        try:
            numbers = _numbers(rest) if colon else None
        except ValueError:
            numbers, kind = None, ""
        if kind == "cuda":
            return Device("cuda", gpus=numbers or (0,))
        if kind == "cpu":
            return Device("cpu", cores=numbers and _usable(numbers))
        if name == "auto":
            return Device("auto")
        shown = name if len(name) < 80 else f"{name[:80]}..."
        raise ValueError(
            f"bad device {shown!r}: use auto, cpu, cpu:0, cpu:0-3, cpu:0,2, cuda, cuda:1 or cuda:0-1"
        )

    @property
    def name(self) -> str:
        """As users name it."""
        numbers = sorted(self.gpus or self.cores or ())
        is_range = len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1
        listed = f"{numbers[0]}-{numbers[-1]}" if is_range else ",".join(map(str, numbers))
        return f"{self.kind}:{listed}" if numbers else self.kind

    def __or__(self, other: Device) -> Device:
        """Both together: GPUs if one has any, otherwise cores; all cores where one of them is not pinned."""
        if gpus := tuple(sorted({*self.gpus, *other.gpus})):
            return Device("cuda", gpus=gpus)
        return Device(
            "cpu",
            cores=tuple(sorted({*self.cores, *other.cores}))
            if self.cores and other.cores
            else None,
        )

    @property
    def in_words(self) -> str:
        """Their number."""
        kind, numbers = ("GPU", self.gpus) if self.gpus else ("core", self.cores)
        return (
            f"{len(numbers)} {kind}{'' if len(numbers) == 1 else 's'}" if numbers else "all cores"
        )


def _numbers(text: str) -> tuple[int, ...]:
    """`0-2,5` -> (0, 1, 2, 5). Raises ValueError."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        start, end = int(first), int(last if dash else first) + 1
        if end - start + len(numbers) > _MOST_NUMBERS:
            raise ValueError(text)
        numbers += range(start, end)
    if not numbers:
        raise ValueError(text)
    return tuple(dict.fromkeys(numbers))


def usable_cores() -> set[int]:
    """The cores of this process, whichever of them the calling thread is pinned to."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread is ending
            found |= os.sched_getaffinity(int(thread))
    return found


def _usable(cores: tuple[int, ...]) -> tuple[int, ...]:
    usable = usable_cores()
    missing = sorted(set(cores) - usable)
    if missing:
        named = f"{', '.join(map(str, missing[:8]))}{', ...' if missing[8:] else ''}"
        raise ValueError(
            f"CPU cores [{named}] are not there: this process may use {sorted(usable)}"
        )
    return cores


def has_gpu() -> bool:
    """Whether this machine shows a GPU's driver; torch may see none of its GPUs for all that."""
    return any(any(Path("/dev").glob(name)) for name in _GPUS)
