"""Record the work of one worker as it happens: times and names, without their meaning.

The file: msgpack arrays, one after the other: a header, records and, where the worker ended by itself, an end. A reader
takes all complete arrays, so a killed worker only loses its last quarter of a second.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from pearl.errors import TraceError
from pearl.trace.plain import plain
from pearl.version import __version__

log = logging.getLogger(__name__)

FORMAT = 5  # of the parts; no other is read
# tracks: the worker's loop, the thread of its mailbox, its device, the draft's thread that computes
LOOP, MAIL, GPU, AHEAD = 1, 2, 3, 4
TRACKS = {LOOP: "loop", MAIL: "mailbox", GPU: "GPU", AHEAD: "forwards"}
BESIDE = 16  # tracks from here on: requests that overlap those on the loop's track
# What a loop waits for. TRANSPORT takes both sides' records: the end of a wait, once the message has been sent.
START_UP, CONSUMER, DRAFT, HELD_ROW = "start-up", "consumer", "draft tokens", "held row"
VERDICT, TRANSPORT = "verdict", "transport"

_MOST_WAITING = 128  # records
_WAITING_NS = 250_000_000
_HEADER, _END = "pearl-trace", "end"
_KNOWN = {"role": str, "opened": int, "run": str, "pid": int, "host": str, "machine": str, "boot": str}
_RECORD = (int, str, str, int, int, dict)
_MOST_ELEMENTS = 1 << 20  # of one array: a prompt's tokens
_MOST_UNREAD = 64 << 20  # bytes of a part that is read while it grows


class Record(NamedTuple):
    """What lasted from `start` to `end`, nanoseconds of the worker's monotonic clock.

    `kind`: busy, communication, wait, or whole (a slice that only holds others).
    """

    track: int
    kind: str
    name: str
    start: int
    end: int
    args: dict[str, Any]

    @property
    def middle(self) -> int:
        return (self.start + self.end) // 2


class Recorder:
    """One worker's file. Any thread may record.

    Args:
        path: must not exist yet. Raises `TraceError` where it cannot be made.
        header: description of this worker.
        clock: nanoseconds; monotonic.

    Attributes:
        spent: nanoseconds that recording has taken so far; callers add their own.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.clock = clock
        self.spent = self.records = 0
        self._lock = threading.Lock()
        self._packer = msgpack.Packer(default=plain)
        self._waiting: deque[object] = deque()
        self._written = clock()
        try:
            self._file = path.open("xb", buffering=0)
        except OSError as error:
            raise TraceError(f"cannot write the trace {path}: {error.strerror}") from None
        self._waiting.append([_HEADER, FORMAT, {**header, "opened": self._written}])
        self._write()

    def record(
        self, track: int, kind: str, name: str, start: int, end: int, args: Mapping[str, Any] | None = None
    ) -> None:
        """`args` may hold events, commands and messages, which never change. They are encoded later, many at once: a
        forward leaves the caches full of the model, and encoding right after it is slow.
        """
        self.records += 1
        self._waiting.append((track, kind, name, start, end, args or {}))
        if len(self._waiting) >= _MOST_WAITING or end - self._written > _WAITING_NS:
            self._write()

    def close(self) -> None:
        """Write the rest and the end, once."""
        if not self._file.closed:
            self._write()
            self._waiting.append([_END, {"closed": self.clock(), "spent": self.spent, "records": self.records}])
            self._write()
            self._file.close()

    def _write(self) -> None:
        """Write the queue to the file. An error ends the recording, not the request."""
        with self._lock:
            self._written = self.clock()
            data = bytearray()
            while self._waiting:
                data += self._packer.pack(self._waiting.popleft())
            if self._file.closed:
                return
            try:
                while data:
                    del data[: self._file.write(data) or 0]
            except OSError as error:
                log.error("the trace ends here: %s: %s", self._file.name, error.strerror)
                with contextlib.suppress(OSError):
                    self._file.truncate(0)  # so that merging leaves it out; frees the disk
                self._file.close()


def part_path(trace: Path, role: str, pid: int) -> Path:
    """The path of a worker's part of the trace."""
    return trace.with_name(f"{trace.name}.{role}-{pid}.part")


def asked_for(directory: Path, number: int) -> Path:
    """The path of recording `number` of a running engine, in the engine's directory."""
    return directory / f"trace-{number}"


def part_paths(trace: Path) -> list[Path]:
    found = trace.parent.glob(f"{glob.escape(trace.name)}.*-*.part")
    return sorted(path for path in found if path.is_file())


def being_written(trace: Path) -> bool:
    """Whether a worker that writes a part of `trace` is still alive on this machine."""
    return any(Path("/proc", path.name.removesuffix(".part").rpartition("-")[2]).exists() for path in part_paths(trace))


def where_and_what() -> dict[str, Any]:
    """Describe this process: its id, host, boot (processes of one boot share a clock) and versions."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {
        "pid": os.getpid(),
        "host": platform.node(),
        "boot": boot.read_text().strip() if boot.exists() else "",
        "versions": {name: version(name) for name in ("torch", "transformers", "pyzmq")}
        | {"pearl": __version__, "python": platform.python_version()},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "processor": _processor(),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _limits(elements: int) -> dict[str, Any]:
    return {"strict_map_key": False, "max_array_len": elements, "max_map_len": elements, "max_ext_len": 0}


def _is_record(item: Any) -> bool:
    return isinstance(item, list) and tuple(map(type, item)) == _RECORD


class Part:
    """One worker's file, read back. Raises `TraceError` for any other file.

    Attributes:
        header: as the worker gave it.
        end: its last array, once read; empty if the worker was killed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end: dict[str, Any] = {}
        first = next(self._items(), None)
        if not (isinstance(first, list) and len(first) == 3 and first[0] == _HEADER):
            raise TraceError(f"{path} is no part of a trace")
        if first[1] != FORMAT:
            raise TraceError(f"{path} is a part of a trace in format {first[1]}; this version reads {FORMAT}")
        self.header: dict[str, Any] = first[2]
        if not (isinstance(self.header, dict) and all(type(self.header.get(n)) is k for n, k in _KNOWN.items())):
            raise TraceError(f"{path} is a damaged part of a trace: its header lacks {', '.join(_KNOWN)}")

    def records(self) -> Iterator[Record]:
        """In order of their ends (those of other threads than the loop: nearly)."""
        items = self._items()
        next(items)
        for item in items:
            if _is_record(item):
                yield Record(*item)
            elif isinstance(item, list) and item[:1] == [_END] and isinstance(item[-1], dict):
                self.end = item[-1]
            else:
                raise TraceError(f"{self.path} is a damaged part of a trace: it holds what is no record")

    def _items(self) -> Iterator[Any]:
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise TraceError(f"cannot read {self.path}: {error.strerror}") from None
        with file:
            # An element takes at least a byte: an array that announces more is not ours.
            most = min(os.fstat(file.fileno()).st_size, _MOST_ELEMENTS)
            unpacker = msgpack.Unpacker(file, **_limits(most))
            while True:
                try:
                    yield unpacker.unpack()
                except msgpack.OutOfData:
                    return
                except (ValueError, TypeError, OverflowError, MemoryError, msgpack.UnpackException):
                    return  # not our msgpack, so not our file


class GrowingPart:
    """One worker's file, read while it is written.

    Attributes:
        role: of the worker; empty until the header has come.
        size: bytes read so far.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.role, self.size = path, "", 0
        self._unpacker = msgpack.Unpacker(max_buffer_size=_MOST_UNREAD, **_limits(_MOST_ELEMENTS))

    def read(self) -> list[Record]:
        """New records since the last call. Raises `TraceError` if the file is gone, or is not ours."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.size)
                new = file.read(_MOST_UNREAD // 2)
            self.size += len(new)
            self._unpacker.feed(new)
            items = list(self._unpacker)
        except OSError as error:
            raise TraceError(f"cannot read {self.path}: {error.strerror}") from None
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException, msgpack.BufferFull) as error:
            raise TraceError(f"{self.path} is a damaged part of a trace: {type(error).__name__}") from None
        for item in items:
            if isinstance(item, list) and item[:2] == [_HEADER, FORMAT] and isinstance(item[-1], dict):
                self.role = str(item[-1].get("role", ""))
        return [Record(*item) for item in items if _is_record(item)]
