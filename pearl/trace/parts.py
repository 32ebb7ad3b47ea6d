"""The parts of one run on one clock, the tracks of their records, and the cause of each wait."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from pearl.errors import TraceError
from pearl.trace.recorder import BESIDE, LOOP, TRANSPORT, Part, Record

_MAX_HELD = 1000  # records of one wait


class Run:
    """The parts of one run, the target's first. Times are nanoseconds of the target's clock.

    Attributes:
        clocks: of each part, (nanoseconds to add, uncertainty).
        base: when the first part was opened.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = sorted(parts, key=lambda part: (part.header["role"] != "target", part.header["opened"]))
        self.target = self.parts[0].header
        self.clocks = [self._clock(part) for part in self.parts]
        self.base = min(
            int(part.header["opened"]) + offset for part, (offset, _) in zip(self.parts, self.clocks, strict=True)
        )

    def _clock(self, part: Part) -> tuple[int, int]:
        """0, 0 on the target's machine. Otherwise, as NTP does, from the target's ping with the shortest round trip:
        the answer was stamped halfway, give or take half of the round trip.
        """
        if part.header["boot"] == self.target["boot"]:
            return 0, 0
        pings = [(one.end, one.args) for one in self.parts[0].records() if one.kind == "clock"]
        if not pings:
            raise TraceError(f"{part.path}: from another machine, and without clock pings its clock cannot be aligned")
        round_trip, offset = min((end - a["sent"], (end + a["sent"]) // 2 - a["received"]) for end, a in pings)
        return offset, round_trip // 2

    def records(self, number: int) -> Iterator[Record]:
        """The records of a part, by its number."""
        offset = self.clocks[number][0]
        for record in self.parts[number].records():
            record.start += offset
            record.end += offset
            yield record


class Tracks:
    """The tracks of one part. Requests go on the loop's track; those that overlap them, on tracks of their own."""

    def __init__(self) -> None:
        self.used = {LOOP}
        self._requests: list[Record] = []
        self._places: dict[tuple[str, int], int] = {}  # request's name, start -> track

    def add(self, record: Record) -> None:
        self.used.add(record.track)
        if record.kind == "whole":
            self._requests.append(record)

    def place(self) -> None:
        """After the last `add`."""
        ends: list[int] = []  # of each track, when its last request ended
        for request in sorted(self._requests, key=lambda request: request.start):
            lane = next((lane for lane, end in enumerate(ends) if end <= request.start), len(ends))
            ends[lane : lane + 1] = [request.end]
            track = BESIDE + lane if lane else LOOP
            self._places[request.name, request.start] = track
            self.used.add(track)

    def of(self, record: Record) -> int:
        return self._places[record.name, record.start] if record.kind == "whole" else record.track


def split_waits(records: Iterable[Record], sent: Mapping[tuple[Any, ...], int]) -> Iterator[Record]:
    """Split each wait at the time when the message that ended it was sent: from then on it is for transport.

    Messages after which the loop still waits (the first tokens of a window) interrupt a wait; the last one counts. If
    that one came from a consumer the wait is not split: messages of an ended request change nothing.
    """
    held: list[Record] = []
    for record in records:
        works = record.kind == "busy" and record.track == LOOP and record.name != "decide"
        if works or len(held) >= _MAX_HELD:
            yield from _split(held, sent)
            held = []
        if held or record.kind == "wait":
            held.append(record)
        else:
            yield record
    yield from _split(held, sent)


def _split(held: list[Record], sent: Mapping[tuple[Any, ...], int]) -> Iterator[Record]:
    messages = (tuple(record.args.get("by", ())) for record in reversed(held) if record.kind == "wait")
    time = sent.get(next((message for message in messages if message and message[1] is not None), ()))
    for record in held:
        if record.kind != "wait" or time is None:
            yield record
            continue
        at = min(max(time, record.start), record.end)
        if record.start < at or at == record.end:
            yield replace(record, end=at)
        if at < record.end:
            yield replace(record, start=at, name=TRANSPORT)
