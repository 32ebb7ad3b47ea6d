"""A live trace of both workers for the server's web page.

While there are viewers, the workers record what they do (see `pearl.engine.recording`), and this
file reads the recording while the workers write it.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pearl.engine.recording import Recording
from pearl.errors import PearlError
from pearl.trace.recorder import LOOP, TraceRecord, part_paths, records_since, role_of

MOST_BYTES = 256 << 20  # of one recording, on disk
_EVERY = 0.2  # seconds between two reads
_RETRY = 2.0  # seconds until the next attempt to record
_SHORTEST = 100_000  # nanoseconds; shorter spans are left out
_MOST_HELD = 5000  # events queued for a slow viewer; then the oldest are dropped

Event = dict[str, Any]
Viewer = asyncio.Queue[Event]  # the events that have not been sent to the viewer yet


class Timeline:
    """Sends the events of `recording` to the viewers, and records only while there are viewers."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._viewers: set[Viewer] = set()
        self._working: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def viewed(self) -> Iterator[Viewer]:
        viewer: Viewer = asyncio.Queue(_MOST_HELD)
        self._viewers.add(viewer)
        try:
            if self._working is None or self._working.done():
                self._working = asyncio.create_task(self._work())
            yield viewer
        finally:
            self._viewers.discard(viewer)

    def _send(self, events: list[Event]) -> None:
        for viewer in self._viewers:
            for event in events:
                if viewer.full():
                    viewer.get_nowait()
                viewer.put_nowait(event)

    async def _work(self) -> None:
        """Record until the last viewer has left; try again if a recording fails or ends."""
        while self._viewers:
            try:
                await self._record()
            except (PearlError, OSError) as error:  # for example, another front is recording
                self._send([{"problem": str(error)}])
            if self._viewers:
                await asyncio.sleep(_RETRY)

    async def _record(self) -> None:
        name = await asyncio.to_thread(self._recording.start)
        try:
            self._send([{"recording": True}])
            read: dict[Path, int] = {}  # part -> bytes read
            while self._viewers and sum(read.values()) < MOST_BYTES:
                await asyncio.sleep(_EVERY)
                self._send(await asyncio.to_thread(_new_events, name, read))
        finally:
            await asyncio.to_thread(self._recording.stop)


def _new_events(name: Path, read: dict[Path, int]) -> list[Event]:
    """Return the events that the workers on this host have written since the last read.

    Args:
        name: the path of the recording; each worker writes a file of its own beside this path.
        read: the number of bytes that have been read of each worker's file. This function updates
            these numbers.
    """
    events = []
    for path in part_paths(name):
        records, read[path] = records_since(path, read.get(path, 0))
        for record in records:
            events += _shown(role_of(path), record)
    return sorted(events, key=lambda event: float(event["to"]))


def _shown(role: str, record: TraceRecord) -> list[Event]:
    """Return what the page shows of a trace record: a span of work or waiting, or committed tokens.

    Committed tokens are shown by their sources. Times are milliseconds of the machine's monotonic
    clock.
    """
    events: list[Event] = []
    if record.track != LOOP:
        return events
    span = {"from": record.start / 1e6, "to": record.end / 1e6}
    if record.kind in ("busy", "wait") and record.end - record.start >= _SHORTEST:
        events.append({"of": role, "kind": record.kind, "name": record.name, **span})
    if record.name == "decide" and role == "target":
        sources: list[str] = []
        for command in record.args.get("commands") or ():
            if command.get("type") == "Deliver":
                message = command.get("message") or {}
                sources += message.get("provenance") or ()
        if sources:
            events.append({"tokens": sources, **span})
    return events
