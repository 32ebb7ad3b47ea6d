"""The threads of torch, by their native ids: its operations on a CPU are split between them.

OpenMP starts them for each thread that calls torch. Between two operations they spin, and at the end of each they wait
for one another: milliseconds, where another process has the core of one of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch

_GRAIN = 1 << 15  # elements that a thread takes at least, of an elementwise operation of torch
_local = threading.local()  # `pool`: the calling thread's team, in OpenMP's order


def use_torch_threads(count: int) -> Sequence[int]:
    """Let torch compute with `count` threads where this one calls it; return the native ids of the others."""
    torch.set_num_threads(count)
    if count == 1:  # no other thread takes part
        return ()
    started = _threads() | {thread.native_id for thread in threading.enumerate()}
    # Starts those that are missing; of those that are too many the last end.
    torch.zeros(count * _GRAIN).add_(1)
    running = _threads()
    pool = [thread for thread in getattr(_local, "pool", ()) if thread in running]
    pool += sorted(running - started)
    _local.pool = pool[: count - 1]
    return tuple(_local.pool)


def _threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}
