"""From the workers' parts to one Chrome Trace Event file.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, as ui.perfetto.dev reads it
(complete events "X" that nest within a track, flows "s" and "f" bound to slices, counters "C", metadata "M"), with the
`distributedInfo` that Holistic Trace Analysis asks for.

Facts that take both workers' parts are computed here: the fate of each drafted token, and which share of a wait was
spent on the message's way rather than on its sender's work.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pearl.document import damaged
from pearl.errors import TraceError
from pearl.trace.recorder import LOOP, TRACKS, TRANSPORT, Part, Record, part_paths

VERSION = 3  # of the metadata under "pearl_trace"
_ACCEPTED, _REJECTED, _DISCARDED = "accepted", "rejected", "discarded"
_MOST_HELD = 1000  # records of one wait
_COUNTERS = ("pending", "epoch", "window", "acceptance")

Event = dict[str, Any]
Token = tuple[int, int, int]  # request, epoch, position


def merge(trace: Path, recorded: Path | None = None) -> None:
    """Makes the file `trace` of the parts that lie beside it, and removes them.

    `recorded`: what the parts are named after where that is not `trace`. Of several runs' parts the latest run's are
    taken; those of others, which were cut off, and what is no part at all are left alone. Raises `TraceError` where
    there are none, or the file cannot be written.
    """
    with damaged(recorded or trace, TraceError):
        _merge(trace, recorded)


def _merge(trace: Path, recorded: Path | None) -> None:
    parts: list[Part] = []
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
    write(trace, parts)
    for part in parts:
        part.path.unlink(missing_ok=True)


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
        raise TraceError(f"cannot write the trace {trace}: {error.strerror}; its parts are left") from None
    finally:
        temporary.unlink(missing_ok=True)


class _Merged:
    """Reads the parts twice: first for the links between them, then event by event. It keeps a few numbers for each
    token and message, so the file may be longer than memory."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = sorted(parts, key=lambda part: (part.header["role"] != "target", part.header["opened"]))
        self._target = self._parts[0]
        self._offsets = {part.path: self._offset(part) for part in self._parts}
        self._base = min(int(part.header["opened"]) + self._offsets[part.path][0] for part in parts)
        self._sent: dict[tuple[Any, ...], int] = {}  # message -> time when it was sent
        self._judged: dict[Token, tuple[str, int]] = {}  # -> (fate, time)
        self._flows = 0
        for part in self._parts:
            self._look(part)

    def _offset(self, part: Part) -> tuple[int, int]:
        """(nanoseconds to add, uncertainty) to bring a part to the target's clock: 0, 0 for the same machine.

        Else from the quickest of the target's clock pings, as NTP does: an answer was stamped halfway, give or take
        half of the way there and back.
        """
        if part.header["boot"] == self._target.header["boot"]:
            return 0, 0
        trips = [
            (record.end - record.args["sent"], (record.end + record.args["sent"]) // 2 - record.args["received"])
            for record in self._target.records()
            if record.kind == "clock"
        ]
        if not trips:
            raise TraceError(f"{part.path}: from another machine, and no clock pings tell how far its clock is off")
        there_and_back, offset = min(trips)
        return offset, there_and_back // 2

    def _records(self, part: Part) -> Iterator[Record]:
        offset = self._offsets[part.path][0]
        for record in part.records():
            yield record._replace(start=record.start + offset, end=record.end + offset) if offset else record

    def _look(self, part: Part) -> None:
        """The first reading: when each message was sent, and how each token was judged."""
        epochs: dict[tuple[int, int], int] = {}  # request, position -> epoch of the token that is pending there
        request = -1
        for record in self._records(part):
            args = record.args
            if record.name in ("send", "post"):
                if args["message"][1] is not None:  # one that belongs to a request: no other of its kind is like it
                    self._sent[tuple(args["message"])] = record.start
            elif part is not self._target or "error" in args:
                continue
            elif record.name == "decide":
                request = next((m["request"] for m in _sent(args) if m["type"] == "Begin"), request)
                event = args["event"]
                if event["type"] == "DraftTokens":
                    for position in range(event["start"], event["start"] + len(event["tokens"])):
                        key = event["request"], position
                        epochs[key] = max(event["epoch"], epochs.get(key, -1))  # an older one is stale
            elif record.name == "judge":
                for i in range(args["accepted"] + (args["correction"] is not None)):
                    position = args["start"] + i
                    fate = _ACCEPTED if i < args["accepted"] else _REJECTED
                    self._judged[request, epochs.get((request, position), -1), position] = fate, _middle(record)

    def events(self) -> Iterator[Event]:
        """The second reading."""
        for number, part in enumerate(self._parts):
            process = number + 1
            yield _about("process_name", process, 0, name=f"{part.header['role']} (process {part.header['pid']})")
            yield _about("process_labels", process, 0, labels=f"{part.header['host']}, {part.header['machine']}")
            yield _about("process_sort_index", process, 0, sort_index=number)
            for track, name in TRACKS.items():
                yield _about("thread_name", process, track, name=name)
                yield _about("thread_sort_index", process, track, sort_index=track)
            yield from self._target_events() if part is self._target else self._draft_events(part, process)

    def _target_events(self) -> Iterator[Event]:
        counters: dict[str, Any] = {}
        for record, sent in self._waits_told(self._records(self._target)):
            yield from self._slices(record, 1, sent)
            if record.name == "decide" and (trouble := told(record.args["event"])):
                yield {"ph": "i", "s": "g", "name": trouble, "pid": 1, "tid": LOOP, "ts": self._us(record.end)}
            for name in _COUNTERS if record.name == "decide" else ():
                value = record.args.get(name)
                if value is not None and counters.get(name) != value:
                    counters[name] = value
                    yield {
                        "ph": "C",
                        "name": name,
                        "pid": 1,
                        "tid": 0,
                        "ts": self._us(record.end),
                        "args": {name: value},
                    }

    def _draft_events(self, part: Part, process: int) -> Iterator[Event]:
        forward: Record | None = None  # held back until it is known what became of its token
        for record, sent in self._waits_told(self._records(part)):
            if record.name in ("draft", "prefill"):
                if forward is not None:
                    yield from self._slices(forward, process)
                forward = record
                continue
            if forward is not None and record.name == "decide" and record.args["event"]["type"] == "Drafted":
                (token, *_) = [*_drafted(record.args), None]
                if token is not None:
                    fate, judged = self._judged.get(token, (_DISCARDED, 0))
                    at = {"epoch": token[1], "position": token[2], "fate": fate}
                    forward = forward._replace(args=forward.args | at)
                    if judged:
                        yield from self._flow("token", (process, forward.track, _middle(forward)), (1, LOOP, judged))
                yield from self._slices(forward, process)
                forward = None
            yield from self._slices(record, process, sent)
            for message in record.args.get("messages", ()) if record.name == "read" else ():
                if message[0] == "Verdict" and tuple(message) in self._sent:
                    there = process, record.track, _middle(record)
                    yield from self._flow("verdict", (1, LOOP, self._sent[tuple(message)]), there)
        if forward is not None:
            yield from self._slices(forward, process)

    def _slices(self, record: Record, process: int, sent: int | None = None) -> Iterator[Event]:
        """One slice; two where the end of a wait, from `sent` on, was no longer for the sender but for its message."""
        middle = record.end if sent is None or record.kind != "wait" else min(max(sent, record.start), record.end)
        if record.kind != "clock" and (record.start < middle or middle == record.end):
            yield self._slice(record._replace(end=middle), process)
        if middle < record.end:
            yield self._slice(record._replace(start=middle, name=TRANSPORT), process)

    def _waits_told(self, records: Iterable[Record]) -> Iterator[tuple[Record, int | None]]:
        """Each record and, for a wait, when the message was sent that let the loop work again.

        A wait is often broken by messages that do not end it (the first tokens of a window): the last one counts.
        """
        held: list[Record] = []

        def release() -> Iterator[tuple[Record, int | None]]:
            last = next((self._sent[key] for r in reversed(held) if (key := _ended_by(r)) in self._sent), None)
            yield from ((record, last if record.kind == "wait" else None) for record in held)
            held.clear()

        for record in records:
            if (record.kind == "busy" and record.track == LOOP and record.name != "decide") or len(held) >= _MOST_HELD:
                yield from release()
            if held or record.kind == "wait":
                held.append(record)
            else:
                yield record, None
        yield from release()

    def _slice(self, record: Record, process: int) -> Event:
        wait = record.kind == "wait"
        event = {
            "ph": "X",
            "name": f"wait: {record.name}" if wait else record.name,
            "cat": record.kind,
            "pid": process,
            "tid": record.track,
            "ts": self._us(record.start),
            "dur": (record.end - record.start) / 1000,
        }
        args = {k: v for k, v in record.args.items() if not wait}
        return event | {"args": args} if args else event

    def _flow(self, name: str, start: tuple[int, int, int], end: tuple[int, int, int]) -> Iterator[Event]:
        """An arrow between two slices, each given as process, track and a time within it."""
        self._flows += 1
        start = (*start[:2], min(start[2], end[2]))  # it may be read before its sender has come back from sending
        for phase, (process, track, at) in (("s", start), ("f", end)):
            event = {"ph": phase, "name": name, "cat": "flow", "id": self._flows, "pid": process, "tid": track}
            yield event | {"ts": self._us(at)} | ({"bp": "e"} if phase == "f" else {})

    def _us(self, ns: int) -> float:
        return (ns - self._base) / 1000

    def document(self) -> dict[str, Any]:
        """The document without its events."""
        workers = []
        for number, part in enumerate(self._parts):
            offset, uncertainty = self._offsets[part.path]
            header = {k: v for k, v in part.header.items() if k not in ("config", "versions", "run", "opened")}
            workers.append(
                {
                    "process": number + 1,
                    **header,
                    "clock_offset_ns": offset,
                    "clock_uncertainty_ns": uncertainty,
                    "ended": bool(part.end),  # else it was killed: the last quarter of a second may be missing
                    "recorder_seconds": part.end.get("spent", 0) / 1e9,
                    "records": part.end.get("records", 0),
                }
            )
        config = self._target.header["config"]
        return {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "distributedInfo": {"rank": 0, "world_size": 1, "backend": config["tensors"]},
            "metadata": {
                "pearl_trace": VERSION,
                "clock": "monotonic",
                "base_ns": self._base,
                "config": config,
                "versions": self._target.header["versions"],
                "workers": workers,
            },
        }


def told(event: dict[str, Any]) -> str | None:
    """Return a note for an event about a failure or a recovery; None for other events."""
    match event["type"]:
        case "DraftGone":
            alone = event.get("request") is not None
            return f"{'the draft cannot go on with this request' if alone else 'draft lost'}: {event['reason']}"
        case "DraftJoined":
            return "a draft joins"
        case "Stalled":
            return "a message was lost: the draft is given the whole prefix"
        case "Failed":
            return f"the request fails: {event['reason']}"
    return None


def _sent(decision: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The messages that a decision sends to the other worker."""
    return (command["message"] for command in decision.get("commands", ()) if command["type"] == "Send")


def _drafted(decision: dict[str, Any]) -> Iterator[Token]:
    for message in _sent(decision):
        if message["type"] == "DraftTokens":
            yield message["request"], message["epoch"], message["start"]


def _ended_by(record: Record) -> tuple[Any, ...]:
    """The message that a wait ended with, if any."""
    return tuple(record.args.get("by", ())) if record.kind == "wait" else ()


def _middle(record: Record) -> int:
    return (record.start + record.end) // 2


def _about(what: str, process: int, track: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "ts": 0, "args": args}
