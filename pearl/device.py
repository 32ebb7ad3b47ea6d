"""Names of the devices on which models run, such as cuda:0 or cpu:0-3.

This file must not import torch; workers translate the names for torch.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pearl.printable import shortened

# Device files in /dev of NVIDIA's driver, of WSL and of AMD's driver.
GPU_FILES = ("nvidia[0-9]*", "dxg", "kfd")
_MOST_NUMBERS = 4096  # most cores or GPUs in a name
_LONGEST_SHOWN = 80  # characters of a refused name in a message


@dataclass(frozen=True)
class Device:
    """A device as named by the user.

    Attributes:
        gpus: GPU numbers; if there are several, the model is spread over these GPUs.
        cores: CPU cores to pin to; None if the model is not pinned.
    """

    kind: Literal["auto", "cpu", "cuda"]
    gpus: tuple[int, ...] = ()
    cores: tuple[int, ...] | None = None

    @staticmethod
    def parse(name: str) -> Device:
        """Return the device of this name: auto, cpu, cpu:0, cpu:0-3, cpu:0,2, cuda, cuda:1 or cuda:0-1.

        Raises ValueError for any other name.
        """
        if name == "auto":
            return Device("auto")
        kind, colon, listed = name.partition(":")
        try:
            numbers = _numbers(listed) if colon else None
        except ValueError:
            raise _bad_device(name) from None
        if kind == "cuda":
            return Device("cuda", gpus=numbers or (0,))
        if kind == "cpu":
            return Device("cpu", cores=numbers and _usable(numbers))
        raise _bad_device(name)

    @property
    def name(self) -> str:
        """The device as users name it."""
        numbers = sorted(self.gpus or self.cores or ())
        if not numbers:
            return self.kind
        is_range = len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1
        if is_range:
            return f"{self.kind}:{numbers[0]}-{numbers[-1]}"
        return f"{self.kind}:{','.join(map(str, numbers))}"

    def __or__(self, device: Device) -> Device:
        """Return one device that has the GPUs of this device and of `device`.

        If neither has GPUs, the result has the cores of both, or all cores if one is not pinned.
        """
        gpus = set(self.gpus + device.gpus)
        if gpus:
            return Device("cuda", gpus=tuple(sorted(gpus)))
        if not self.cores or not device.cores:
            return Device("cpu")
        return Device("cpu", cores=tuple(sorted(set(self.cores + device.cores))))

    @property
    def in_words(self) -> str:
        """The number of GPUs or cores, such as "2 GPUs"; "all cores" if no numbers are named."""
        unit = "GPU" if self.gpus else "core"
        count = len(self.gpus or self.cores or ())
        if not count:
            return "all cores"
        if count > 1:
            unit += "s"
        return f"{count} {unit}"


def _bad_device(name: str) -> ValueError:
    shown = shortened(name, _LONGEST_SHOWN)
    return ValueError(
        f"bad device {shown!r}: use auto, cpu, cpu:0, cpu:0-3, cpu:0,2, cuda, cuda:1 or cuda:0-1"
    )


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers in a list such as "0-2,5", which is (0, 1, 2, 5).

    Raises ValueError if the text is no such list, or has too many numbers.
    """
    numbers: list[int] = []
    for part in text.split(","):
        start, dash, end = part.partition("-")
        if not dash:
            end = start
        span = range(int(start), int(end) + 1)
        if span.stop - span.start + len(numbers) > _MOST_NUMBERS:  # len(span) may overflow
            raise ValueError(text)
        numbers += span
    if not numbers:
        raise ValueError(text)
    return tuple(dict.fromkeys(numbers))


def usable_cores() -> set[int]:
    """Return the cores that any thread of this process may use.

    The calling thread itself may be pinned to fewer cores.
    """
    cores = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread is ending
            cores |= os.sched_getaffinity(int(thread))
    return cores


def _usable(cores: tuple[int, ...]) -> tuple[int, ...]:
    """Return `cores`. Raises ValueError if this process may not use all of them."""
    usable = usable_cores()
    missing = sorted(set(cores) - usable)
    if missing:
        names = ", ".join(map(str, missing[:8]))
        if missing[8:]:
            names += ", ..."
        raise ValueError(
            f"CPU cores [{names}] are not there: this process may use {sorted(usable)}"
        )
    return cores


def has_gpu() -> bool:
    """Return whether this machine has the driver of a GPU. torch may still see no GPU."""
    return any(any(Path("/dev").glob(name)) for name in GPU_FILES)
