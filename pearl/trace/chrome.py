"""From the workers' parts to one Chrome Trace Event file.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, as ui.perfetto.dev reads it
(complete events "X" that nest within a track; "b" and "e" of requests, which may overlap; flows "s" and "f" bound to
slices; metadata "M"), with the `distributedInfo` that Holistic Trace Analysis asks for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from pearl.document import damaged
from pearl.errors import TraceError
from pearl.spec.control import ON_ONE_HOST
from pearl.trace.outcomes import ACCEPTED, DISCARDED, REJECTED, Outcomes, messages
from pearl.trace.recorder import LOOP, TRACKS, TRANSPORT, Part, TraceRecord, part_paths

VERSION = 11  # of the metadata under "pearl_trace"
# Perfetto ignores colours in a file ("cname") and derives a slice's hue from its name: here green, red and orange.
DRAFTED = {
    ACCEPTED: "draft token accepted",
    REJECTED: "draft token rejected",
    DISCARDED: "draft token unused",
}
_MAX_HELD = 1000  # records of one wait
# Names of arrows
VERDICT = "verdict"
REJECTION = "verdict: rejection"

Event = dict[str, Any]


def merge(trace: Path, recorded: Path | None = None) -> None:
    """Make the file `trace` from the parts beside it, and remove them.

    `recorded`: the path that the parts are named after, if not `trace`. Only the latest run is merged; the parts of
    earlier ones and foreign files stay, and so does the target's until the draft's comes from its host. Raises
    `TraceError` if there are no parts, or the file cannot be written.
    """
    parts: list[Part] = []
    with damaged(recorded or trace, TraceError):
        why = f"no target has left a part {trace.name}.target-*.part"
        for path in part_paths(recorded or trace):
            try:
                parts.append(Part(path))
            except TraceError as error:
                why = str(error)
        targets = [part for part in parts if part.header["role"] == "target"]
        if not targets:
            raise TraceError(f"there is nothing to make {trace} of: {why}")
        target = max(targets, key=lambda part: int(part.header["opened"]))
        parts = [part for part in parts if part.header["run"] == target.header["run"]]
        roles = [part.header["role"] for part in parts]
        is_complete = not lacks_draft(target.header["config"], roles)
        write(trace, parts)
    if is_complete:
        for part in parts:
            part.path.unlink(missing_ok=True)


def lacks_draft(config: Any, roles: list[str]) -> bool:
    """Whether the draft wrote its part on another host, and none has been copied here yet."""
    return "draft" not in roles and config["draft"] != "none" and config["control"] != ON_ONE_HOST


def write(trace: Path, parts: list[Part]) -> None:
    merged = _Merged(parts)
    temporary = trace.with_name(f"{trace.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            head = json.dumps(merged.document(), ensure_ascii=False)
            file.write(head[:-1] + ',\n"traceEvents": [')
            for i, event in enumerate(merged.events()):
                file.write((",\n" if i else "\n") + json.dumps(event, ensure_ascii=False))
            file.write("\n]}\n")
        temporary.replace(trace)
    except OSError as error:
        raise TraceError(f"cannot write the trace {trace}: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


class _Clock(NamedTuple):
    """What to add to a part's times, and how far that may be off, in nanoseconds."""

    offset: int
    uncertainty: int


class _Place(NamedTuple):
    """A time, in nanoseconds, on a track of a process."""

    process: int
    track: int
    time: int


def _order(part: Part) -> tuple[bool, int]:
    """The target's part comes first, then the drafts' as they started."""
    return part.header["role"] != "target", part.header["opened"]


class _Merged:
    """The parts of one run, the target's first. Reads them twice: first for links between them, then event by event.

    It keeps a few numbers for each token and message, so the file may be larger than memory. Times are nanoseconds of
    the target's clock.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = sorted(parts, key=_order)
        self._clocks = [self._clock(part) for part in self._parts]
        starts = []
        for part, clock in zip(self._parts, self._clocks, strict=True):
            starts.append(int(part.header["opened"]) + clock.offset)
        self._base = min(starts)
        self._outcomes = Outcomes()
        self._sent: dict[tuple[Any, ...], int] = {}  # message -> when it was sent
        self._rejections: set[tuple[Any, ...]] = set()  # verdicts that correct a draft token
        self._ids = count(1)  # of flows and async events
        for number in range(len(self._parts)):
            for record in self._records(number):
                self._link(record, is_target=number == 0)

    def _clock(self, part: Part) -> _Clock:
        """Align the clock of a part with the target's; on the target's machine they are the same.

        As NTP does, take the ping with the shortest round trip. Its answer was stamped halfway, give or take half of
        the round trip: offset = (sent + returned) / 2 - received.
        """
        if part.header["boot"] == self._parts[0].header["boot"]:
            return _Clock(0, 0)
        clocks = []
        for record in self._parts[0].records():
            if record.kind == "clock":
                sent = record.args["sent"]
                offset = (record.end + sent) // 2 - record.args["received"]
                clocks.append((record.end - sent, offset))
        if not clocks:
            raise TraceError(
                f"{part.path}: from another machine, and without clock pings its clock cannot be aligned"
            )
        round_trip, offset = min(clocks)
        return _Clock(offset, round_trip // 2)

    def _records(self, number: int) -> Iterator[TraceRecord]:
        """The records of a part, by its number."""
        offset = self._clocks[number].offset
        for record in self._parts[number].records():
            record.start += offset
            record.end += offset
            if record.kind != "clock":
                yield record

    def _link(self, record: TraceRecord, is_target: bool) -> None:
        args = record.args
        if record.name in ("send", "post"):
            if args["message"][1] is not None:  # the message of a request: its identity is unique
                self._sent[tuple(args["message"])] = record.start
        elif is_target:
            if record.name == "decide" and is_rejection(args):
                for verdict in messages(args, "Send", "Verdict"):
                    identity = "Verdict", verdict["request"], verdict["epoch"], verdict["start"]
                    self._rejections.add(identity)
            self._outcomes.learn(record)

    def events(self) -> Iterator[Event]:
        """Yield the events of all parts; this is the second reading."""
        for number, part in enumerate(self._parts):
            process = number + 1
            header = part.header
            name = f"{header['role']} (process {header['pid']})"
            labels = f"{header['host']}, {header['machine']}"
            yield _about("process_name", process, 0, name=name)
            yield _about("process_labels", process, 0, labels=labels)
            yield _about("process_sort_index", process, 0, sort_index=number)
            records = split_waits(self._records(number), self._sent)
            if number == 0:
                events = self._target_events(records)
            else:
                events = self._draft_events(records, process)
            tracks = set()
            for event in events:
                if event["ph"] == "X":
                    tracks.add(event["tid"])
                yield event
            for track in sorted(tracks):
                yield _about("thread_name", process, track, name=TRACKS[track])
                yield _about("thread_sort_index", process, track, sort_index=track)

    def _target_events(self, records: Iterable[TraceRecord]) -> Iterator[Event]:
        for record in records:
            yield from self._slice(record, 1)
            if record.name == "decide":
                name = incident(record.args)
                if name is not None:
                    time = self._us(record.end)
                    yield {"ph": "i", "s": "g", "name": name, "pid": 1, "tid": LOOP, "ts": time}

    def _draft_events(self, records: Iterable[TraceRecord], process: int) -> Iterator[Event]:
        forward: TraceRecord | None = None  # held until the outcomes of its tokens are known
        awaited = 0  # decisions still to come on what it drafted
        for record in records:
            if record.name in ("draft", "prefill", "prepare"):
                if forward is not None:
                    yield from self._slice(forward, process)
                forward = record
                awaited = len(record.args.get("requests", (0,)))
                continue
            if record.name == "decide":
                self._outcomes.read(record.args["event"])
                if forward is not None and record.args["event"]["type"] == "Drafted":
                    forward = self._drafted(forward, record.args)
                    awaited -= 1
                    if awaited == 0:
                        yield from self._slice(forward, process)
                        forward = None
            yield from self._slice(record, process)
            if record.name == "read":
                yield from self._verdicts(record, process)
        if forward is not None:
            yield from self._slice(forward, process)

    def _verdicts(self, record: TraceRecord, process: int) -> Iterator[Event]:
        """Arrows from where the target sent verdicts to where `record` read them."""
        for message in map(tuple, record.args["messages"]):
            if message[0] == "Verdict" and message in self._sent:
                name = REJECTION if message in self._rejections else VERDICT
                start = _Place(1, LOOP, self._sent[message])
                yield from self._flow(name, start, _Place(process, record.track, record.middle))

    def _drafted(self, forward: TraceRecord, decision: dict[str, Any]) -> TraceRecord:
        """A forward with the outcomes of the tokens drafted in it."""
        args = dict(forward.args)
        for message in messages(decision, "Send", "DraftTokens"):
            outcomes = self._outcomes.of(message)
            if outcomes:  # else its token was withheld
                drafted = "fates" if message["after"] is None else "branches"
                args[drafted] = args.get(drafted, []) + outcomes
        return replace(forward, args=args)

    def _slice(self, record: TraceRecord, process: int) -> Iterator[Event]:
        """The event of a record that lies on a track; a request lies on none and gives two events, begin and end."""
        if record.kind == "whole":
            event = {
                "name": record.name,
                "cat": "whole",
                "id": next(self._ids),
                "pid": process,
                "tid": LOOP,
            }
            yield event | {"ph": "b", "ts": self._us(record.start), "args": record.args}
            yield event | {"ph": "e", "ts": self._us(record.end)}
            return
        name = record.name
        if record.kind == "wait":
            name = f"wait: {name}"
        elif name == "draft" and "fates" in record.args:
            name = DRAFTED[record.args["fates"][0]]
        event = {
            "ph": "X",
            "name": name,
            "cat": record.kind,
            "pid": process,
            "tid": record.track,
            "ts": self._us(record.start),
            "dur": (record.end - record.start) / 1000,
        }
        if record.kind != "wait" and record.args:
            event["args"] = record.args
        yield event

    def _flow(self, name: str, start: _Place, end: _Place) -> Iterator[Event]:
        """An arrow from one slice to another; each place lies within its slice."""
        arrow = {"name": name, "cat": "flow", "id": next(self._ids)}
        # A message may be read before its sender returns from sending.
        time = self._us(min(start.time, end.time))
        yield arrow | {"ph": "s", "pid": start.process, "tid": start.track, "ts": time}
        time = self._us(end.time)
        yield arrow | {"ph": "f", "pid": end.process, "tid": end.track, "ts": time, "bp": "e"}

    def _us(self, ns: int) -> float:
        return (ns - self._base) / 1000

    def document(self) -> dict[str, Any]:
        """The document without its events."""
        workers: list[dict[str, Any]] = []
        for part, clock in zip(self._parts, self._clocks, strict=True):
            worker = {"process": len(workers) + 1} | part.header
            for name in ("config", "versions", "run", "opened"):
                worker.pop(name, None)
            worker["clock_offset_ns"] = clock.offset
            worker["clock_uncertainty_ns"] = clock.uncertainty
            # A worker that was killed lacks up to the last quarter of a second.
            worker["ended"] = part.end is not None
            workers.append(worker)
        header = self._parts[0].header
        return {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "distributedInfo": {
                "rank": 0,
                "world_size": 1,
                "backend": header["config"]["tensors"],
            },
            "metadata": {
                "pearl_trace": VERSION,
                "clock": "monotonic",
                "base_ns": self._base,
                "config": header["config"],
                "versions": header["versions"],
                "workers": workers,
            },
        }


def incident(decision: dict[str, Any]) -> str | None:
    """A note on a failure or a recovery; None for other decisions."""
    event = decision["event"]
    match event["type"]:
        case "DraftGone":
            if event.get("request") is None:
                return f"draft lost: {event['reason']}"
            return f"the draft cannot go on with this request: {event['reason']}"
        case "DraftJoined":
            return "a draft joins"
        case "Resync":
            return "a message was lost: the draft gets the whole prefix"
        case "Failed":
            return f"the request fails: {event['reason']}"
    for command in decision["commands"]:
        if command.get("failure"):
            return f"the request fails: {command['failure']['reason']}"
    return None


class CommittedSources(NamedTuple):
    """The source of each token that a decision commits to a request."""

    request: int
    sources: list[str]


def committed(decision: dict[str, Any]) -> list[CommittedSources]:
    """The tokens that a decision of the target commits, by request."""
    return [
        CommittedSources(message["request"], message["provenance"])
        for message in messages(decision, "Deliver", "Committed")
    ]


def is_rejection(decision: dict[str, Any]) -> bool:
    """Whether a decision of the target corrects a draft token."""
    return any("corrected" in text.sources for text in committed(decision))


def _about(name: str, process: int, track: int, /, **args: Any) -> Event:
    return {"ph": "M", "name": name, "pid": process, "tid": track, "ts": 0, "args": args}


def split_waits(
    records: Iterable[TraceRecord], sent: Mapping[tuple[Any, ...], int]
) -> Iterator[TraceRecord]:
    """Split each wait at the time when the message that ended it was sent: from then on it is for transport.

    Messages after which the loop still waits (the first tokens of a window) interrupt a wait; the last one counts. If
    that one came from a consumer the wait is not split: messages of an ended request change nothing.
    """
    held: list[TraceRecord] = []
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


def _split(held: list[TraceRecord], sent: Mapping[tuple[Any, ...], int]) -> Iterator[TraceRecord]:
    time = None  # when the last message of a request was sent
    for record in held:
        message = tuple(record.args.get("by", ()))
        if record.kind == "wait" and message and message[1] is not None:
            time = sent.get(message)
    for record in held:
        if record.kind != "wait" or time is None:
            yield record
            continue
        middle = min(max(time, record.start), record.end)
        if record.start < middle or middle == record.end:
            yield replace(record, end=middle)
        if middle < record.end:
            yield replace(record, start=middle, name=TRANSPORT)
