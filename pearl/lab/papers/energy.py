"""MJSD's table 1: time and energy of a forward by batch. Source: Qin et al. 2024, section 4."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from pearl.cache import Watcher
from pearl.config import EngineConfig
from pearl.lab.papers.figures import Table
from pearl.models.runner import Feed, ModelRunner, feed_chain
from pearl.worker.build import make_runner
from pearl.worker.placement import place

BATCHES = (1, 2, 4, 8, 16)
_CONTEXT, _SECONDS = 64, 3.0  # tokens in each cache; how long each batch is repeated
_RAPL = "/sys/class/powercap/intel-rapl:?"  # a counter of microjoules for each processor
_SMI = ("nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits")
PAPER = {1: 14.1, 2: 16.5, 4: 17.7, 8: 19.7, 16: 24.7}  # joules a forward, OPT-13B on two A10


def measure(config: EngineConfig, watcher: Watcher) -> Table:
    """Load the target, and measure it: see `by_batch`."""
    several = config.model_copy(update={"slots": max(BATCHES), "max_context": 1024})
    return by_batch(make_runner(several.model("target"), place(several, "target")), watcher)


def by_batch(target: ModelRunner, watcher: Watcher, directory: str = _RAPL) -> Table:
    """A row for each batch that the target has slots for."""
    batches = [batch for batch in BATCHES if batch <= target.capabilities.slots]
    watcher.begin("energy by batch", len(batches))
    for slot in range(max(batches)):
        target.rollback(0, slot)
        feed_chain(target, [(1 + slot) % target.vocab_size] * _CONTEXT, 0, slot)
    rows = []
    for batch in batches:
        count, seconds, joules = _repeated(target, batch, directory)
        figures = [f"{1e3 * seconds / count:.1f}", f"{1e3 * seconds / count / batch:.1f}"]
        figures += ["", ""] if joules is None else [f"{joules / count:.2f}", f"{joules / count / batch:.2f}"]
        rows.append([str(batch), *figures, f"{PAPER[batch]}"])
        watcher.advance(1, f"batch {batch}")
    columns = ("batch", "ms a run", "ms an input", "J a run", "J an input", "theirs:\nJ a run")
    notes = [] if rows and rows[0][3] else ["This machine has no meter that can be read: no energy."]
    return Table("Time and energy of the target's forwards by batch (table 1)", columns, rows, notes)


def _repeated(target: ModelRunner, batch: int, directory: str) -> tuple[int, float, float | None]:
    """(forwards, seconds, joules or None): forwards of one token a sequence, for `_SECONDS`."""
    began, before, count = time.monotonic(), _joules(directory), 0
    while time.monotonic() < began + _SECONDS:
        target.forward([Feed([7], 1, slot) for slot in range(batch)])
        target.synchronize()
        for slot in range(batch):
            target.rollback(_CONTEXT, slot)
        count += 1
    seconds, after = time.monotonic() - began, _joules(directory)
    if target.device.type == "cuda":
        watts = _watts()
        return count, seconds, None if watts is None else watts * seconds
    return count, seconds, None if before is None or after is None else after - before


def _joules(directory: str) -> float | None:
    """The processors' energy so far; None where it cannot be read."""
    root = Path(directory)
    try:
        found = [int((path / "energy_uj").read_text()) for path in root.parent.glob(root.name)]
    except (OSError, ValueError):
        return None
    return sum(found) / 1e6 if found else None


def _watts() -> float | None:
    """The GPUs' mean power in the last second, as `nvidia-smi` has it. Untested on a GPU."""
    try:
        done = subprocess.run(_SMI, capture_output=True, text=True, timeout=5, check=True)
        return sum(map(float, done.stdout.split()))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
