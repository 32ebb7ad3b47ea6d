"""Measures table 1 of MJSD: time and energy of a forward by batch size.

Source: Qin et al. 2024, section 4.
"""

import time
from typing import NamedTuple

import torch

from pearl.cache import Watcher
from pearl.config import EngineConfig
from pearl.lab.studies.figures import Table
from pearl.models.runner import Feed, ModelRunner, feed_chain
from pearl.worker.build import make_runner
from pearl.worker.placement import place

BATCHES = (1, 2, 4, 8, 16)
_CONTEXT = 64  # tokens in each cache
SECONDS = 3.0  # for this long the forward of each batch size is repeated
PAPER = {1: 14.1, 2: 16.5, 4: 17.7, 8: 19.7, 16: 24.7}  # joules a forward, OPT-13B on two A10


def measure(config: EngineConfig, watcher: Watcher) -> Table:
    """Load the target, and measure its forwards by batch size (`by_batch`)."""
    several = config.model_copy(update={"slots": max(BATCHES), "max_context": 1024})
    return by_batch(make_runner(several.model("target"), place(several, "target")), watcher)


def by_batch(target: ModelRunner, watcher: Watcher) -> Table:
    """Return a table with a row for each batch size that the target has slots for."""
    batches = [batch for batch in BATCHES if batch <= target.capabilities.slots]
    watcher.begin("energy by batch", len(batches))
    for slot in range(max(batches)):
        target.rollback(0, slot)
        feed_chain(target, [(1 + slot) % target.vocab_size] * _CONTEXT, 0, slot)
    rows = []
    notes = []
    for batch in batches:
        forward = _repeated(target, batch)
        milliseconds = 1e3 * forward.seconds
        joules = ""
        joules_each = ""
        if forward.joules is not None:
            joules = f"{forward.joules:.2f}"
            joules_each = f"{forward.joules / batch:.2f}"
        time_each = f"{milliseconds / batch:.1f}"
        theirs = str(PAPER[batch])
        rows.append([str(batch), f"{milliseconds:.1f}", time_each, joules, joules_each, theirs])
        watcher.advance(1, f"batch {batch}")
    columns = ("batch", "ms a run", "ms an input", "J a run", "J an input", "theirs:\nJ a run")
    if forward.joules is None:
        notes.append(
            "No energy: it takes an NVIDIA GPU for the target, and pip install nvidia-ml-py."
        )
    return Table(
        "Time and energy of the target's forwards by batch (table 1)", columns, rows, notes
    )


class _Cost(NamedTuple):
    """The time and the energy of a forward. `joules` is None if the energy cannot be read."""

    seconds: float
    joules: float | None


def _repeated(target: ModelRunner, batch: int) -> _Cost:
    """Repeat a forward of one token per sequence for `SECONDS`; return the mean cost."""
    count = 0
    began = time.monotonic()
    joules_at_start = _joules(target.device)
    while time.monotonic() < began + SECONDS:
        target.forward([Feed([7], 1, slot) for slot in range(batch)])
        target.synchronize()
        for slot in range(batch):
            target.rollback(_CONTEXT, slot)
        count += 1
    seconds = time.monotonic() - began
    joules_at_end = _joules(target.device)
    if joules_at_start is None or joules_at_end is None:
        return _Cost(seconds / count, None)
    return _Cost(seconds / count, (joules_at_end - joules_at_start) / count)


def _joules(device: torch.device) -> float | None:
    """Return the joules that a GPU has used since its driver was loaded, as NVML reports them.

    Return None if the device is no NVIDIA GPU, if pynvml is missing, or if the GPU has no such
    counter.
    """
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
    except pynvml.NVMLError:  # such as a GPU before Volta
        return None
