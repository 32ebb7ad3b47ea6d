"""Which core each computing thread has.

A forward on several cores is hundreds of short parallel regions, at the end of each of which the threads wait for one
another, spinning.  If the kernel may choose, it lets two of them take turns on one core as soon as any other process
wants a core: each region then lasts until both have had their turn, milliseconds. Measured with one busy process on two
cores: 1,600 ms a forward on both cores, 82 on one alone, and 116 where each thread has a core of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch

_GRAIN = 1 << 15  # elements that a thread takes at least, of an elementwise operation of torch
_own = threading.local()  # `pool`: the threads with which this one computes, in their order in OpenMP's team


def occupy(cores: Sequence[int]) -> None:
    """From here on the calling thread computes on these cores, with a thread on each of them: on the first itself.

    Threads that it starts itself run on the first one, too.
    """
    os.sched_setaffinity(0, cores[:1])
    torch.set_num_threads(len(cores))
    if len(cores) == 1:  # no other thread takes part
        return
    before = _threads() | {each.native_id for each in threading.enumerate()}
    torch.zeros(len(cores) * _GRAIN).add_(1)  # starts those that are missing; of those that are too many the last end
    now = _threads()
    known = [thread for thread in getattr(_own, "pool", ()) if thread in now]
    _own.pool = [*known, *sorted(now - before)][: len(cores) - 1]
    for thread, core in zip(_own.pool, cores[1:], strict=False):
        os.sched_setaffinity(thread, (core,))


def _threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}
