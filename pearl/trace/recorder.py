"""Writes and reads the parts of a trace.

Each worker writes one part while it runs, and `pearl trace merge` combines the parts. A part has
times and names without interpretation. It has one JSON array per line: a header, records and,
unless the worker was killed, an end. A reader skips an incomplete last line. A killed worker loses
at most its last quarter of a second.
"""

import contextlib
import glob
import logging
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from pearl.decoding.distribution import AnnouncedRow, PackedRow
from pearl.errors import TraceError
from pearl.protocol import events
from pearl.version import __version__

log = logging.getLogger(__name__)

FORMAT = 7  # of the parts; no other is read
# Tracks: the worker's loop, and the thread of its mailbox.
LOOP = 1
MAIL = 2
TRACKS = {LOOP: "loop", MAIL: "mailbox"}
# What a loop waits for. TRANSPORT is set only when parts are merged: it is the rest of a wait, once
# the awaited message was sent.
START_UP = "start-up"
CONSUMER = "consumer"
DRAFT = "draft tokens"
HELD_ROW = "held row"
VERDICT = "verdict"
TRANSPORT = "transport"

_MAX_QUEUED = 128  # records
_MAX_AGE_NS = 250_000_000
_MAX_LINE = 64 << 20  # bytes
_OUTSIDE = "draft service"


class WorkerHeader(Struct):
    """The description of a worker, at the beginning of the part that it writes.

    `opened`: when the part was created, in nanoseconds of the worker's clock.
    """

    role: str
    opened: int
    run: str
    pid: int
    host: str
    machine: str
    boot: str
    config: dict[str, Any]
    versions: dict[str, str]
    processor: str = ""


class PartHeader(Struct, tag="pearl-trace", array_like=True):
    format: Any
    worker: Any


class TraceRecord(Struct, tag="record", array_like=True):
    """Something that lasted from `start` to `end`, in nanoseconds of the worker's monotonic clock.

    `kind`: busy, communication, wait, whole (a request), or clock (the answer to a ping).
    """

    track: int
    kind: str
    name: str
    start: int
    end: int
    args: dict[str, Any]


class PartEnd(Struct, tag="end", array_like=True):
    closed: int


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(PartHeader | TraceRecord | PartEnd)


class Recorder:
    """Writes one worker's part. Any thread may call `record`.

    Raises `TraceError` if the file cannot be created.

    Args:
        path: the part; it must not exist yet.
        header: the description of this worker.
        clock: returns nanoseconds of a monotonic clock.
    """

    def __init__(
        self, path: Path, header: Mapping[str, Any], clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._queue: deque[TraceRecord] = deque()
        self._written = clock()
        try:
            self._file = path.open("xb", buffering=0)
        except OSError as error:
            raise TraceError(f"cannot write the trace {path}: {error.strerror}") from None
        self._write([PartHeader(FORMAT, {**header, "opened": self._written})])

    def record(self, record: TraceRecord) -> None:
        """Queue a record. Its `args` may hold events, commands and messages: these are immutable.

        Records are encoded later, many at once. Encoding is slow right after a forward, because the
        caches are full of the model's weights.
        """
        self._queue.append(record)
        if len(self._queue) >= _MAX_QUEUED or record.end - self._written > _MAX_AGE_NS:
            self._write_queue()

    def close(self) -> None:
        """Write the remaining records and the end. A second call does nothing."""
        if not self._file.closed:
            self._write_queue()
            self._write([PartEnd(self.clock())])
            self._file.close()

    def _write_queue(self) -> None:
        with self._lock:
            self._written = self.clock()
            records = []
            while self._queue:
                record = self._queue.popleft()
                record.args = plain(record.args)
                records.append(record)
            self._write(records)

    def _write(self, lines: list[Any]) -> None:
        """Write lines to the file. If that fails, the recording ends, and the worker goes on."""
        if self._file.closed:
            return
        data = memoryview(_ENCODER.encode_lines(lines))
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError as error:
            log.error("the trace ends here: %s: %s", self._file.name, error.strerror)
            with contextlib.suppress(OSError):
                self._file.truncate(0)  # frees the disk; merging skips an empty part
            self._file.close()


def part_path(trace: Path, role: str, pid: int) -> Path:
    """Return the path of the part that a worker writes."""
    return trace.with_name(f"{trace.name}.{role}-{pid}.part")


def outside_recorder(trace: Path, role: str, config: Mapping[str, Any]) -> Recorder:
    """Return a recorder for a draft service, or for the engine that uses the draft service.

    The two are started separately, so all parts with the same `trace` count as one run. Raises
    `TraceError` if the part cannot be created.
    """
    header = {"role": role, "config": config, "run": _OUTSIDE}
    return Recorder(part_path(trace, role, os.getpid()), header | where_and_what())


def role_of(part: Path) -> str:
    return part.name.rpartition("-")[0].rpartition(".")[2]


def asked_for(directory: Path, number: int) -> Path:
    """Return the path of recording `number`, which a front has requested from a running engine.

    `directory`: the engine's directory.
    """
    return directory / f"trace-{number}"


def part_paths(trace: Path) -> list[Path]:
    """Return the paths of all parts of the trace."""
    paths = trace.parent.glob(f"{glob.escape(trace.name)}.*-*.part")
    return sorted(filter(Path.is_file, paths))


def being_written(parts: Iterable[Path]) -> bool:
    """Return whether a worker that writes one of `parts` is still alive on this machine."""
    for path in parts:
        pid = path.name.removesuffix(".part").rpartition("-")[2]
        if Path("/proc", pid).exists():
            return True
    return False


def where_and_what() -> dict[str, Any]:
    """Describe this process: its id, host, boot, processor and versions.

    Processes with the same boot id share a clock.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    versions = {name: version(name) for name in ("torch", "transformers", "pyzmq")}
    versions |= {"pearl": __version__, "python": platform.python_version()}
    return {
        "pid": os.getpid(),
        "host": platform.node(),
        "boot": boot.read_text().strip() if boot.exists() else "",
        "versions": versions,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "processor": _processor(),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _complete_lines(path: Path, offset: int = 0) -> Iterator[bytes]:
    """Yield the lines of a part from byte `offset` on, without an incomplete last line."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            while (line := file.readline(_MAX_LINE)).endswith(b"\n"):
                yield line
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is a damaged part of a trace: {str(error)[:200]}") from None


class Part:
    """One worker's part of a trace, for reading. Raises `TraceError` if the file is no part.

    Attributes:
        header: the worker's description.
        offset: nanoseconds to add to the part's times, so that they fit the target's clock.
        uncertainty: by how many nanoseconds `offset` may be wrong.
        has_ended: whether the part's end has been read; it stays false if the worker was killed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.uncertainty = 0
        self.has_ended = False
        line = next(_complete_lines(path), b"")
        if not line.startswith(b'["pearl-trace",'):
            raise TraceError(f"{path} is no part of a trace")
        with _reading(path):
            header = msgspec.json.decode(line, type=PartHeader)
            if header.format != FORMAT:
                raise TraceError(
                    f"{path} is a part of a trace in format {header.format}; this version reads "
                    f"{FORMAT}"
                )
            self.header = msgspec.convert(header.worker, WorkerHeader)

    def records(self) -> Iterator[TraceRecord]:
        """Yield the records in the order in which they ended.

        Records that other threads than the loop's have made are only roughly in this order.
        """
        for line in _complete_lines(self.path):
            with _reading(self.path):
                item = _DECODER.decode(line)
            if isinstance(item, TraceRecord):
                item.start += self.offset
                item.end += self.offset
                yield item
            elif isinstance(item, PartEnd):
                self.has_ended = True


def run_of(path: Path) -> str:
    """Return the run that a part belongs to; "" if the file is no part."""
    try:
        return Part(path).header.run
    except TraceError:
        return ""


def records_since(path: Path, offset: int) -> tuple[list[TraceRecord], int]:
    """Read the records of a part that is still being written, from byte `offset` on.

    Returns the records, and the offset where they end. Raises `TraceError` if the file cannot be
    read, or is damaged.
    """
    records = []
    for line in _complete_lines(path, offset):
        offset += len(line)
        with _reading(path):
            item = _DECODER.decode(line)
        if isinstance(item, TraceRecord):
            records.append(item)
    return records, offset


# ---- events, commands and messages as lists and dicts ----

_SIMPLE = {int, float, str, bool, type(None)}
_UNRECORDED: dict[type, str] = {
    events.Forwarded: "fed",
    events.Guess: "payoff",
}  # type -> the field that is left out, because it is no data


def plain(value: object) -> Any:
    """Return a value as lists and dicts, so that it can be encoded as JSON.

    Commands and messages become dicts with the name of their class under "type". Distributions are
    left out, because they are big. The conversion is written by hand for speed, because
    microseconds count in a worker's loop.
    """
    kind: Any = type(value)
    if kind in _SIMPLE:
        return value
    if kind is tuple or kind is list:
        items: Any = value
        if not items or type(items[0]) is int:
            return list(items)
        return [plain(item) for item in items]
    if kind is dict:
        entries: Any = value
        return {name: plain(item) for name, item in entries.items()}
    return _encoder(kind)(value)


@cache
def _encoder(kind: type) -> Callable[[Any], Any]:
    if kind in (PackedRow, AnnouncedRow) or kind.__module__ == "torch":
        return lambda distribution: None
    if not issubclass(kind, Struct):  # an enum, or bytes
        return msgspec.to_builtins
    names = [name for name in kind.__struct_fields__ if name != _UNRECORDED.get(kind)]
    type_name = kind.__name__

    def encode(value: Any) -> dict[str, Any]:
        document = {"type": type_name}
        for name in names:
            item = getattr(value, name)
            document[name] = item if type(item) in _SIMPLE else plain(item)
        return document

    return encode
