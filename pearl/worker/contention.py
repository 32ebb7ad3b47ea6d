"""Measures how long this process's computing threads were ready to run, but waited for a core.

Linux counts nanoseconds for each thread in `/proc/self/task/ID/schedstat`: first the time on a core, then the time
ready without a core.  Without this file, as in some sandboxes, the waits are unknown and count as 0.
"""

import os
import time
from pathlib import Path
from typing import NamedTuple

_THREADS = Path("/proc/self/task")
# A thread counts as computing if it needs a core for at least this share of the time for which the
# busiest thread needs one. A thread that reads sockets needs far less.
_COMPUTES = 0.5


class ThreadTime(NamedTuple):
    """Seconds that one thread ran on a core, and seconds that it was ready but had no core."""

    ran: float = 0.0
    waited: float = 0.0


class CoreWait:
    """The waits of this process's threads for a core, from construction on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = thread_times()

    def share(self) -> float:
        """Return the longest wait of a computing thread, as a share of the time since construction.

        For example, it is 0.1 if a thread waited 1 s in 10 s, and no other thread waited longer.
        """
        seconds = max(1e-9, time.monotonic() - self._began)
        return min(1.0, longest_wait(self._before, thread_times()) / seconds)


def longest_wait(before: dict[int, ThreadTime], after: dict[int, ThreadTime]) -> float:
    """Return the longest wait of a computing thread between two readings, in seconds."""
    times = []
    for thread, end in after.items():
        start = before.get(thread, ThreadTime())
        times.append(ThreadTime(end.ran - start.ran, end.waited - start.waited))
    largest = max(map(sum, times), default=0.0)
    longest = 0.0
    for thread_time in times:
        if sum(thread_time) >= _COMPUTES * largest:
            longest = max(longest, thread_time.waited)
    return longest


def thread_times() -> dict[int, ThreadTime]:
    """Return the times of each thread of this process; empty if the system does not report them."""
    times = {}
    for thread in os.listdir(_THREADS):
        try:
            ran, waited, _ = (_THREADS / thread / "schedstat").read_text().split()
        except (OSError, ValueError):  # the thread has ended, or there is no such file
            continue
        times[int(thread)] = ThreadTime(int(ran) / 1e9, int(waited) / 1e9)
    return times
