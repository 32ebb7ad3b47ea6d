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
from pearl.trace.recorder import LOOP, TRACKS, TRANSPORT, Part, Record, part_paths

VERSION = 11  # of the metadata under "pearl_trace"
# Perfetto ignores colours in a file ("cname") and derives a slice's hue from its name: here green, red and orange.
DRAFTED = {
    ACCEPTED: "draft token accepted",
    REJECTED: "draft token rejected",
    DISCARDED: "draft token unused",
}
_MAX_HELD = 1000  # records of one wait
VERDICT, REJECTION = "verdict", "verdict: rejection"  # arrows

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
        last = max(targets, key=lambda part: int(part.header["opened"]))
        parts = [part for part in parts if part.header["run"] == last.header["run"]]
        is_half = lacks_draft(last.header["config"], [part.header["role"] for part in parts])
        write(trace, parts)
    for part in [] if is_half else parts:
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


class _Merged:
    """The parts of one run, the target's first. Reads them twice: first for links between them, then event by event.

    It keeps a few numbers for each token and message, so the file may be larger than memory. Times are nanoseconds of
    the target's clock.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = sorted(
            parts, key=lambda part: (part.header["role"] != "target", part.header["opened"])
        )
        self._clocks = [
            self._clock(part) for part in self._parts
        ]  # of each, nanoseconds to add, and uncertainty
        opened = (int(part.header["opened"]) for part in self._parts)
        self._base = min(at + offset for at, (offset, _) in zip(opened, self._clocks, strict=True))
        self._outcomes = Outcomes()
        self._sent: dict[tuple[Any, ...], int] = {}  # message -> when it was sent
        self._rejections: set[tuple[Any, ...]] = set()  # verdicts that correct a draft token
        self._ids = count(1)  # of flows and async events
        for number in range(len(self._parts)):
            for record in self._records(number):
                self._link(record, is_target=number == 0)

    def _clock(self, part: Part) -> tuple[int, int]:
        """0, 0 on the target's machine. Otherwise, as NTP does, from the target's ping with the shortest round trip:
        the answer was stamped halfway, give or take half of the round trip.
        """
        if part.header["boot"] == self._parts[0].header["boot"]:
            return 0, 0
        pings = [(one.end, one.args) for one in self._parts[0].records() if one.kind == "clock"]
        if not pings:
            raise TraceError(
                f"{part.path}: from another machine, and without clock pings its clock cannot be aligned"
            )
        round_trip, offset = min(
            (end - a["sent"], (end + a["sent"]) // 2 - a["received"]) for end, a in pings
        )
        return offset, round_trip // 2

    def _records(self, number: int) -> Iterator[Record]:
        """The records of a part, by its number."""
        offset = self._clocks[number][0]
        for record in self._parts[number].records():
            record.start += offset
            record.end += offset
            if record.kind != "clock":
                yield record

    def _link(self, record: Record, is_target: bool) -> None:
        args = record.args
        if record.name in ("send", "post"):
            if args["message"][1] is not None:  # the message of a request: its identity is unique
                self._sent[tuple(args["message"])] = record.start
        elif is_target:
            if record.name == "decide" and is_rejection(args):
                verdicts = messages(args, "Send", "Verdict")
                self._rejections |= {
                    ("Verdict", m["request"], m["epoch"], m["start"]) for m in verdicts
                }
            self._outcomes.learn(record)

    def events(self) -> Iterator[Event]:
        """The second reading."""
        for number, part in enumerate(self._parts):
            process, header, tracks = number + 1, part.header, set()
            yield _about(
                "process_name", process, 0, name=f"{header['role']} (process {header['pid']})"
            )
            yield _about(
                "process_labels", process, 0, labels=f"{header['host']}, {header['machine']}"
            )
            yield _about("process_sort_index", process, 0, sort_index=number)
            records = split_waits(self._records(number), self._sent)
            for event in (
                self._draft_events(records, process) if number else self._target_events(records)
            ):
                tracks |= {event["tid"]} if event["ph"] == "X" else set()
                yield event
            for track in sorted(tracks):
                yield _about("thread_name", process, track, name=TRACKS[track])
                yield _about("thread_sort_index", process, track, sort_index=track)

    def _target_events(self, records: Iterable[Record]) -> Iterator[Event]:
        for record in records:
            yield from self._slice(record, 1)
            if record.name == "decide" and (trouble := incident(record.args["event"])):
                yield {
                    "ph": "i",
                    "s": "g",
                    "name": trouble,
                    "pid": 1,
                    "tid": LOOP,
                    "ts": self._us(record.end),
                }

    def _draft_events(self, records: Iterable[Record], process: int) -> Iterator[Event]:
        forward: Record | None = None  # held until the outcomes of its tokens are known
        awaited = 0  # decisions still to come on what it drafted
        for record in records:
            if record.name in ("draft", "prefill", "prepare"):
                if forward is not None:
                    yield from self._slice(forward, process)
                forward, awaited = record, len(record.args.get("requests", (0,)))
                continue
            if record.name == "decide":
                self._outcomes.read(record.args["event"])
            if (
                forward is not None
                and record.name == "decide"
                and record.args["event"]["type"] == "Drafted"
            ):
                forward = self._drafted(forward, record.args)
                awaited -= 1
                if awaited == 0:
                    yield from self._slice(forward, process)
                    forward = None
            yield from self._slice(record, process)
            for message in map(tuple, record.args["messages"]) if record.name == "read" else ():
                if message[0] == "Verdict" and message in self._sent:
                    name = REJECTION if message in self._rejections else VERDICT
                    there = process, record.track, record.middle
                    yield from self._flow(name, (1, LOOP, self._sent[message]), there)
        if forward is not None:
            yield from self._slice(forward, process)

    def _drafted(self, forward: Record, decision: dict[str, Any]) -> Record:
        """A forward with the outcomes of the tokens drafted in it."""
        args = dict(forward.args)
        for message in messages(decision, "Send", "DraftTokens"):
            if outcomes := self._outcomes.of(message):  # else its token was withheld
                drafted = "fates" if message["after"] is None else "branches"
                args[drafted] = [*args.get(drafted, ()), *outcomes]
        return replace(forward, args=args)

    def _slice(self, record: Record, process: int) -> Iterator[Event]:
        """A slice of a track; a request begins and ends beside them."""
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
        is_wait = record.kind == "wait"
        name = f"wait: {record.name}" if is_wait else record.name
        event = {
            "ph": "X",
            "name": DRAFTED[record.args["fates"][0]]
            if name == "draft" and "fates" in record.args
            else name,
            "cat": record.kind,
            "pid": process,
            "tid": record.track,
            "ts": self._us(record.start),
            "dur": (record.end - record.start) / 1000,
        }
        yield event if is_wait or not record.args else event | {"args": record.args}

    def _flow(
        self, name: str, start: tuple[int, int, int], end: tuple[int, int, int]
    ) -> Iterator[Event]:
        """An arrow between two slices, each given as process, track and a time within it."""
        number = next(self._ids)
        start = (
            *start[:2],
            min(start[2], end[2]),
        )  # a message may be read before its sender returns from sending
        for phase, (process, track, at) in (("s", start), ("f", end)):
            event = {
                "ph": phase,
                "name": name,
                "cat": "flow",
                "id": number,
                "pid": process,
                "tid": track,
            }
            yield event | {"ts": self._us(at)} | ({"bp": "e"} if phase == "f" else {})

    def _us(self, ns: int) -> float:
        return (ns - self._base) / 1000

    def document(self) -> dict[str, Any]:
        """The document without its events."""
        workers = [
            {
                "process": number,
                **{
                    k: v
                    for k, v in part.header.items()
                    if k not in ("config", "versions", "run", "opened")
                },
                "clock_offset_ns": offset,
                "clock_uncertainty_ns": uncertainty,
                "ended": part.end
                is not None,  # else it was killed: the last quarter of a second may be missing
            }
            for number, (part, (offset, uncertainty)) in enumerate(
                zip(self._parts, self._clocks, strict=True), start=1
            )
        ]
        config, versions = (self._parts[0].header[name] for name in ("config", "versions"))
        metadata = {"pearl_trace": VERSION, "clock": "monotonic", "base_ns": self._base}
        return {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "distributedInfo": {"rank": 0, "world_size": 1, "backend": config["tensors"]},
            "metadata": {**metadata, "config": config, "versions": versions, "workers": workers},
        }


def incident(event: dict[str, Any]) -> str | None:
    """A note on a failure or a recovery; None for other events."""
    match event["type"]:
        case "DraftGone":
            alone = event.get("request") is not None
            return f"{'the draft cannot go on with this request' if alone else 'draft lost'}: {event['reason']}"
        case "DraftJoined":
            return "a draft joins"
        case "Resync":
            return "a message was lost: the draft gets the whole prefix"
        case "Failed":
            return f"the request fails: {event['reason']}"
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


def _about(what: str, process: int, track: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "ts": 0, "args": args}


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
    messages = (
        tuple(record.args.get("by", ())) for record in reversed(held) if record.kind == "wait"
    )
    time = sent.get(
        next((message for message in messages if message and message[1] is not None), ())
    )
    for record in held:
        if record.kind != "wait" or time is None:
            yield record
            continue
        at = min(max(time, record.start), record.end)
        if record.start < at or at == record.end:
            yield replace(record, end=at)
        if at < record.end:
            yield replace(record, start=at, name=TRANSPORT)
