"""What both workers do, as they do it, for the page: a recording that is read while it is written.

It begins with the first who looks on and ends with the last.  A second front on the same engine asks for it, so texts
are served as ever; it begins once those that are being written have ended, and the next wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from pearl.engine import Engine
from pearl.engine.attach import attach
from pearl.errors import PearlError
from pearl.server.shares import Shares
from pearl.trace.recorder import LOOP, GrowingPart, Record, part_paths

log = logging.getLogger(__name__)

MOST_VIEWERS = 16
MOST_BYTES = 256 << 20  # of one recording, on disk
_EVERY = 0.2  # seconds between two looks
_AGAIN = 2.0  # seconds until a recording that could not begin is asked for again
_SHORTEST = 100_000  # nanoseconds: what took less is not shown
_MOST_HELD = 5000  # events for a viewer that does not take them: the oldest are dropped

Event = dict[str, Any]


class Viewer:
    """One who looks on: what it has not been sent yet."""

    def __init__(self) -> None:
        self._held: deque[Event] = deque(maxlen=_MOST_HELD)
        self._more = asyncio.Event()

    def tell(self, events: Iterable[Event]) -> None:
        self._held.extend(events)
        if self._held:
            self._more.set()

    async def events(self) -> list[Event]:
        """What has come, once anything has."""
        await self._more.wait()
        self._more.clear()
        told = [*self._held]
        self._held.clear()
        return told


class Timeline:
    """Of the engine in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._viewers: set[Viewer] = set()
        self._shares = Shares()
        self._working: asyncio.Task[None] | None = None

    def fits(self, client: str) -> bool:
        """Whether `client` may look on once more."""
        return self._shares.fits(client, 1, MOST_VIEWERS)

    @contextlib.asynccontextmanager
    async def viewed(self, client: str) -> AsyncIterator[Viewer]:
        viewer = Viewer()
        self._viewers.add(viewer)
        self._shares.take(client, 1)
        try:
            if self._working is None or self._working.done():
                self._working = asyncio.create_task(self._work())
            yield viewer
        finally:
            self._viewers.discard(viewer)
            self._shares.give_back(client, 1)

    async def close(self) -> None:
        """Ends the recording, if there is one."""
        self._viewers.clear()
        if self._working is not None:
            await asyncio.wait({self._working})

    def _tell(self, *events: Event) -> None:
        for viewer in self._viewers:
            viewer.tell(events)

    async def _work(self) -> None:
        """For as long as anybody looks on."""
        while self._viewers:
            try:
                front = await asyncio.to_thread(attach, self._directory)
            except (PearlError, OSError) as error:
                self._tell({"problem": str(error)})
                return
            try:
                await self._record(front)
            except (PearlError, OSError) as error:  # somebody else records, say
                self._tell({"problem": str(error)})
            finally:
                await asyncio.to_thread(_ended, front)
            if self._viewers:
                await asyncio.sleep(_AGAIN)

    async def _record(self, front: Engine) -> None:
        self._tell({"waiting": True})
        name = await asyncio.to_thread(front.begin_live_trace, lambda: bool(self._viewers))
        self._tell({"recording": True})
        parts: dict[Path, GrowingPart] = {}
        while self._viewers and sum(part.size for part in parts.values()) < MOST_BYTES:
            await asyncio.sleep(_EVERY)
            self._tell(*await asyncio.to_thread(_news, name, parts))


def _ended(front: Engine) -> None:
    """Closes the second front, and with it its recording."""
    try:
        front.end_live_trace()
    except (PearlError, OSError) as error:
        log.warning("the live timeline: %s", error)
    finally:
        front.close()


def _news(name: Path, parts: dict[Path, GrowingPart]) -> list[Event]:
    """What has been written since the last time. Of another host's worker nothing is."""
    told: list[Event] = []
    for path in part_paths(name):
        part = parts.setdefault(path, GrowingPart(path))
        for record in part.read():
            told += _shown(part.role, record)
    return sorted(told, key=lambda event: float(event["to"]))


def _shown(role: str, record: Record) -> list[Event]:
    """A forward, other work or a wait; milliseconds of the machine's monotonic clock. And tokens committed, each by
    where it came from.
    """
    told: list[Event] = []
    if record.track != LOOP:
        return told
    span = {"from": record.start / 1e6, "to": record.end / 1e6}
    if record.kind in ("busy", "wait") and record.end - record.start >= _SHORTEST:
        told.append({"of": role, "kind": record.kind, "name": record.name, **span})
    if record.name == "decide" and role == "target":
        commands = record.args.get("commands") or ()
        messages = [command.get("message") or {} for command in commands if command.get("type") == "Deliver"]
        if tokens := [source for message in messages for source in message.get("provenance") or ()]:
            told.append({"tokens": tokens, **span})
    return told
