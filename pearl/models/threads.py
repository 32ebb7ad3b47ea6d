"""Sets the number of CPU threads that torch splits operations between, and finds their native ids.

OpenMP starts a team of threads for each thread that calls torch. The team spins between two
operations, and its threads wait for each other at the end of each operation. If another process
holds the core of one thread, the whole team waits for milliseconds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch

_GRAIN = 1 << 15  # elements of an operation that torch gives to one thread before it uses another
_local = threading.local()  # `pool`: the calling thread's team, in OpenMP's order


def use_torch_threads(count: int) -> Sequence[int]:
    """Let torch split the calling thread's operations between `count` threads.

    Return the native ids of the other `count` - 1 threads.
    """
    torch.set_num_threads(count)
    if count == 1:  # no other thread takes part
        return ()
    started = _threads() | {thread.native_id for thread in threading.enumerate()}
    # This operation starts missing threads. If there are too many, the last of them end.
    torch.zeros(count * _GRAIN).add_(1)
    running = _threads()
    pool = [thread for thread in getattr(_local, "pool", ()) if thread in running]
    pool += sorted(running - started)
    _local.pool = pool[: count - 1]
    return tuple(_local.pool)


def _threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}
