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
from pearl.trace.recorder import BESIDE, LOOP, TRACKS, TRANSPORT, Part, Record, part_paths

VERSION = 9  # of the metadata under "pearl_trace"
_ACCEPTED, _REJECTED, _DISCARDED = "accepted", "rejected", "discarded"
_MOST_HELD = 1000  # records of one wait
_COUNTERS = ("pending", "epoch", "window", "acceptance")
# ui.perfetto.dev ignores colours that a file asks for ("cname"): it makes the hue of a slice from a hash of its name.
# These names come out green, red and orange there.
DRAFTED = {_ACCEPTED: "draft token accepted", _REJECTED: "draft token rejected", _DISCARDED: "draft token unused"}
VERDICT, REJECTION = "verdict", "verdict: rejection"  # arrows

Event = dict[str, Any]
Outcome = tuple[int, int]  # position, token
Line = tuple[int, Outcome | None]  # what tokens were drafted in: the epoch, and of a branch the outcome that it is for


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
        raise TraceError(f"cannot write the trace {trace}: {error.strerror}") from None
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
        self._rejections: set[tuple[Any, ...]] = set()  # verdicts that correct a draft token
        self._tracks: dict[Path, set[int]] = {}  # part -> tracks that hold anything
        self._judged: dict[tuple[int, Line, int], tuple[str, int]] = {}  # request, line, position -> (fate, time)
        # What a target that runs ahead of its draft drew: request -> position -> (token, time).
        self._drawn: dict[int, dict[int, tuple[int, int]]] = {}
        self._believed: dict[int, dict[int, int]] = {}  # request -> position -> what its draft took for the text there
        self._prepared: dict[tuple[int, Outcome], list[int]] = {}  # request, outcome -> what was drafted for it
        self._ends: dict[Path, list[int]] = {}  # part -> of each lane of requests, when its last one ended
        self._lanes: dict[tuple[Path, str, int], int] = {}  # part, request's name, start -> its track
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

    def _records(self, part: Part, placed: bool = True) -> Iterator[Record]:
        """`placed`: requests on the tracks that the first reading has found for them."""
        offset = self._offsets[part.path][0]
        for record in part.records():
            if offset:
                record = record._replace(start=record.start + offset, end=record.end + offset)
            if placed and record.kind == "whole":
                record = record._replace(track=self._lanes[part.path, record.name, record.start])
            yield record

    def _look(self, part: Part) -> None:
        """The first reading: when each message was sent, and how each token was judged."""
        lines: dict[tuple[int, int], Line] = {}  # request, position -> which line's token is pending there
        branches: dict[tuple[int, Line], list[int]] = {}  # request, line -> positions of a branch that waits
        opened: dict[int, Outcome] = {}  # request -> the outcome that opened its epoch
        epochs: dict[Any, int] = {}  # request -> the target's, at the last decision

        def open_epoch(request: int, position: int, token: int) -> None:
            """What was sent for this outcome, and comes for it still, is the main line now."""
            opened[request] = outcome = position, token
            foreseen = epochs.get(request, 0), outcome
            lines.update({(request, at): foreseen for at in branches.get((request, foreseen), ())})

        tracks = self._tracks.setdefault(part.path, {LOOP})
        wholes: list[Record] = []
        for record in self._records(part, placed=False):
            args = record.args
            tracks.add(record.track)
            if record.kind == "whole":
                wholes.append(record)
            if record.name in ("send", "post"):
                if args["message"][1] is not None:  # one that belongs to a request: no other of its kind is like it
                    self._sent[tuple(args["message"])] = record.start
            elif part is not self._target or "error" in args:
                continue
            elif record.name == "decide":
                event, epochs[args["event"].get("request")] = args["event"], args["epoch"]
                if is_rejection(args):
                    self._rejections |= {_verdict(m) for m in _sent(args) if m["type"] == "Verdict"}
                if event["type"] == "Submit" and event["options"]["look_ahead"]:
                    self._drawn[event["request"]] = {}
                if event["type"] == "DraftTokens":
                    line = _line(event)
                    positions = range(event["start"], event["start"] + len(event["tokens"]))
                    if line[1] is not None and opened.get(event["request"]) != line[1]:
                        branches.setdefault((event["request"], line), []).extend(positions)
                        continue
                    for position in positions:
                        key = event["request"], position
                        lines[key] = max(line, lines.get(key, line), key=_epoch)  # an older one is stale
            elif record.name == "sample" and args["request"] in self._drawn:
                for i, token in enumerate(args["tokens"]):
                    self._drawn[args["request"]][args["start"] + i] = token, _middle(record)
            elif record.name == "sample" and args["tokens"]:  # behind a whole window, say: it may have been foreseen
                open_epoch(args["request"], args["start"], args["tokens"][0])
            elif record.name == "judge":
                for i in range(args["accepted"] + (args["correction"] is not None)):
                    position = args["start"] + i
                    fate = _ACCEPTED if i < args["accepted"] else _REJECTED
                    line = lines.get((args["request"], position), (-1, None))
                    self._judged[args["request"], line, position] = fate, _middle(record)
                if args["correction"] is not None:
                    open_epoch(args["request"], args["start"] + args["accepted"], args["correction"])

        for record in sorted(wholes, key=lambda whole: whole.start):
            self._place(part.path, record)

    def _place(self, path: Path, whole: Record) -> None:
        """On the loop's track, or on one of their own for requests that ran beside those there."""
        ends = self._ends.setdefault(path, [])
        lane = next((lane for lane, end in enumerate(ends) if end <= whole.start), len(ends))
        ends[lane : lane + 1] = [whole.end]
        track = LOOP if lane == 0 else BESIDE + lane
        self._lanes[path, whole.name, whole.start] = track
        self._tracks[path].add(track)

    def events(self) -> Iterator[Event]:
        """The second reading."""
        for number, part in enumerate(self._parts):
            process = number + 1
            yield _about("process_name", process, 0, name=f"{part.header['role']} (process {part.header['pid']})")
            yield _about("process_labels", process, 0, labels=f"{part.header['host']}, {part.header['machine']}")
            yield _about("process_sort_index", process, 0, sort_index=number)
            for track in sorted(self._tracks[part.path]):
                name = TRACKS.get(track, f"requests beside, {track - BESIDE}")
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
        forward: Record | None = None  # held back until it is known what became of its tokens
        awaited = 0  # decisions that are still to come on what it has drafted
        for record, sent in self._waits_told(self._records(part)):
            if record.name in ("draft", "prefill", "prepare"):
                if forward is not None:
                    yield from self._slices(forward, process)
                forward, awaited = record, len(record.args.get("requests", (0,)))
                continue
            if record.name == "decide":
                self._told_draft(record.args["event"])
            if forward is not None and record.name == "decide" and record.args["event"]["type"] == "Drafted":
                for message in _drafted(record.args):
                    fates = self._fates(message)
                    fate, judged = fates[0]
                    if message["after"] is not None:
                        prepared = [*forward.args.get("branches", ()), *(one for one, _ in fates)]
                        forward = forward._replace(args=forward.args | {"branches": prepared})
                        continue
                    at = {"epoch": message["epoch"], "position": message["start"], "fate": fate}
                    known = forward.args.get("fates", [forward.args["fate"]] if "fate" in forward.args else [])
                    every = [*known, *(one for one, _ in fates)]
                    at = (forward.args if known else at) | ({"fates": every} if len(every) > 1 else {})
                    forward = forward._replace(args=forward.args | at)
                    if judged >= _middle(forward):
                        yield from self._flow("token", (process, forward.track, _middle(forward)), (1, LOOP, judged))
                awaited -= 1
                if awaited == 0:
                    yield from self._slices(forward, process)
                    forward = None
            yield from self._slices(record, process, sent)
            for message in record.args.get("messages", ()) if record.name == "read" else ():
                if message[0] == "Verdict" and tuple(message) in self._sent:
                    there = process, record.track, _middle(record)
                    name = REJECTION if tuple(message) in self._rejections else VERDICT
                    yield from self._flow(name, (1, LOOP, self._sent[tuple(message)]), there)
        if forward is not None:
            yield from self._slices(forward, process)

    def _fates(self, message: dict[str, Any]) -> list[tuple[str, int]]:
        """What became of each token of a DraftTokens, and when; 0: never, or before it was drafted."""
        request, line, start, tokens = message["request"], _line(message), message["start"], message["tokens"]
        drawn, believed, after = self._drawn.get(request, {}), self._believed.setdefault(request, {}), line[1]
        prefix = believed
        if after is None:
            believed |= dict(enumerate(tokens, start))
        else:
            prepared = self._prepared.setdefault((request, after), [])
            prefix = believed | dict(enumerate([after[1], *prepared], after[0]))
            prepared += tokens
        holds = all(drawn.get(at, (None,))[0] == prefix.get(at) for at in range(message["known"], start))
        found: list[tuple[str, int]] = []
        for position, token in enumerate(tokens, start):
            known = self._judged.get((request, line, position))
            if known is None and position in drawn and holds:
                own, at = drawn[position]
                known = (_ACCEPTED if own == token else _REJECTED), at
                holds = own == token
            found.append(known or (_DISCARDED, 0))
        return found

    def _told_draft(self, event: dict[str, Any]) -> None:
        """What the draft takes for the text once it has been told: as `DraftMachine`."""
        if event["type"] not in ("Begin", "Verdict"):
            return
        request = event["request"]
        believed = self._believed.setdefault(request, {})
        for position, token in enumerate(event["tokens"], event["start"]) if event["type"] == "Verdict" else ():
            if believed.get(position) == token:
                continue
            follows = self._prepared.get((request, (position, token)), [])
            believed |= dict(enumerate([token, *follows], position))
            self._prepared = {key: each for key, each in self._prepared.items() if key[0] != request}
        if event["type"] == "Begin":
            believed.clear()
            self._prepared.clear()

    def _slices(self, record: Record, process: int, sent: int | None = None) -> Iterator[Event]:
        """One slice; two where the end of a wait, from `sent` on, was no longer for the sender but for its message."""
        middle = record.end if sent is None or record.kind != "wait" else min(max(sent, record.start), record.end)
        if record.kind != "clock" and (record.start < middle or middle == record.end):
            yield self._slice(record._replace(end=middle), process)
        if middle < record.end:
            yield self._slice(record._replace(start=middle, name=TRANSPORT), process)

    def _waits_told(self, records: Iterable[Record]) -> Iterator[tuple[Record, int | None]]:
        """Each record and, for a wait, when the message was sent that let the loop work again.

        A wait is often broken by messages that do not end it (the first tokens of a window): the last one counts. If
        that was a consumer's, nothing was on its way before: whatever came for an ended request changed nothing.
        """
        held: list[Record] = []

        def release() -> Iterator[tuple[Record, int | None]]:
            ended = next((key for r in reversed(held) if (key := _ended_by(r)) and key[1] is not None), ())
            last = self._sent.get(ended)
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
        name = f"wait: {record.name}" if wait else record.name
        event = {
            "ph": "X",
            "name": DRAFTED.get(record.args.get("fate", ""), name) if name == "draft" else name,
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


def committed(decision: dict[str, Any]) -> list[tuple[int, list[str]]]:
    """What a decision of the target commits: each request, and where each of its tokens came from."""
    messages = (c["message"] for c in decision.get("commands", ()) if c["type"] == "Deliver")
    return [(m["request"], m["provenance"]) for m in messages if m["type"] == "Committed"]


def is_rejection(decision: dict[str, Any]) -> bool:
    """Whether a decision of the target corrects a draft token."""
    return any("corrected" in provenance for _, provenance in committed(decision))


def _verdict(message: dict[str, Any]) -> tuple[Any, ...]:
    """What `tracer.identity` is of a Verdict."""
    return "Verdict", message["request"], message["epoch"], message["start"]


def _line(message: dict[str, Any]) -> Line:
    """Of a DraftTokens."""
    return message["epoch"], None if message["after"] is None else tuple(message["after"])


def _epoch(line: Line) -> int:
    return line[0]


def _drafted(decision: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (message for message in _sent(decision) if message["type"] == "DraftTokens")


def _ended_by(record: Record) -> tuple[Any, ...]:
    """The message that a wait ended with, if any."""
    return tuple(record.args.get("by", ())) if record.kind == "wait" else ()


def _middle(record: Record) -> int:
    return (record.start + record.end) // 2


def _about(what: str, process: int, track: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "ts": 0, "args": args}
