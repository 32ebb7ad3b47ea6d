"""Merges the parts of a trace, one from each worker, into one Chrome Trace Event file.

The format is described in
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. The file has the
events that ui.perfetto.dev reads: complete events "X", which nest within a track; "b" and "e" of
requests, which may overlap; flows "s" and "f", which connect slices; and metadata "M". It also has
the `distributedInfo` that Holistic Trace Analysis requires.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

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
_MAX_HELD = 1000  # maximum number of records that are kept until a wait ends
WAIT = "wait: "  # prefix of the names of waits
# Names of arrows
VERDICT = "verdict"
REJECTION = "verdict: rejection"

Event = dict[str, Any]


def merge(trace: Path, run: str | None = None) -> None:
    """Make the file `trace` from the parts in its directory, and remove them.

    Only one run is merged; parts of other runs, and other files, are kept. If the draft ran on
    another host and its part has not been copied here yet, the target's part is also kept.

    Args:
        run: the run to merge, see `WorkerHeader`; None for the latest.

    Raises `TraceError` if there are no parts, or the file cannot be written.
    """
    parts = []
    with damaged(trace, TraceError):
        why = f"no target has left a part {trace.name}.target-*.part"
        for path in part_paths(trace):
            try:
                parts.append(Part(path))
            except TraceError as error:
                why = str(error)
        targets = []
        for part in parts:
            if part.header.role == "target" and run in (None, part.header.run):
                targets.append(part)
        if not targets:
            raise TraceError(f"there is nothing to make {trace} of: {why}")
        target = max(targets, key=_opened)
        drafts = []
        for part in sorted(parts, key=_opened):
            if part.header.run == target.header.run and part.header.role != "target":
                _align(part, target)
                drafts.append(part)
        is_complete = not lacks_draft(target.header.config, len(drafts))
        _write(trace, _MergedRun([target, *drafts]))
    if is_complete:
        for part in (target, *drafts):
            part.path.unlink(missing_ok=True)


def _opened(part: Part) -> int:
    return part.header.opened


def lacks_draft(config: Any, drafts: int) -> bool:
    """Return whether the draft has written a part on another host that has not been copied here.

    Args:
        config: the engine's configuration, from the target's part.
        drafts: number of the draft's parts that are here.
    """
    return not drafts and config["draft"] != "none" and config["control"] != ON_ONE_HOST


def _align(part: Part, target: Part) -> None:
    """Align the clock of a part with the target's clock.

    On one machine the clocks are the same. Otherwise, as in NTP, the ping with the shortest round
    trip is taken, and its answer is assumed to have been stamped halfway: offset = (sent +
    returned) / 2 - received. The uncertainty is half of the round trip.
    """
    if part.header.boot == target.header.boot:
        return
    pings = [record for record in target.records() if record.kind == "clock"]
    if not pings:
        raise TraceError(
            f"{part.path}: from another machine, and without clock pings its clock cannot be "
            "aligned"
        )
    ping = min(pings, key=lambda ping: ping.end - ping.args["sent"])
    sent = ping.args["sent"]
    part.offset = (sent + ping.end) // 2 - ping.args["received"]
    part.uncertainty = (ping.end - sent) // 2


def _write(trace: Path, run: _MergedRun) -> None:
    temporary = trace.with_name(f"{trace.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            head = json.dumps(run.document(), ensure_ascii=False)
            file.write(head[:-1] + ',\n"traceEvents": [')
            separator = "\n"
            for event in run.events():
                file.write(separator + json.dumps(event, ensure_ascii=False))
                separator = ",\n"
            file.write("\n]}\n")
        temporary.replace(trace)
    except OSError as error:
        raise TraceError(f"cannot write the trace {trace}: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


class _MergedRun:
    """The parts of one run, the target's first.

    The parts are read twice: first to find the links between records, then to yield the events one
    by one. Only a few numbers are kept for each token and message, so a part may be larger than
    memory. Times are nanoseconds of the target's clock.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._base = min(part.header.opened + part.offset for part in parts)
        self._outcomes = Outcomes()
        self._sent: dict[tuple[Any, ...], int] = {}  # message -> when it was sent
        self._rejections: set[tuple[Any, ...]] = set()  # verdicts that correct a draft token
        self._ids = count(1)  # of flows and async events
        for part in parts:
            for record in part.records():
                self._link(record, is_target=part is parts[0])

    def _link(self, record: TraceRecord, is_target: bool) -> None:
        args = record.args
        if record.name in ("send", "post"):
            if args["message"][1] is not None:  # only messages of a request have a unique identity
                self._sent[tuple(args["message"])] = record.start
        elif is_target:
            if record.name == "decide" and "corrected" in committed(args):
                for verdict in messages(args, "Send", "Verdict"):
                    identity = "Verdict", verdict["request"], verdict["epoch"], verdict["start"]
                    self._rejections.add(identity)
            self._outcomes.learn(record)

    def events(self) -> Iterator[Event]:
        """Yield the events of all parts, by reading the parts a second time."""
        for process, part in enumerate(self._parts, start=1):
            yield from _descriptions(part, process)
            records = split_waits(part.records(), self._sent)
            if process > 1:
                records = self._with_outcomes(records)
            for record in records:
                yield from self._slice(record, process)
                if record.name == "read":
                    yield from self._verdicts(record, process)
                if record.name == "decide":
                    name = incident(record.args)
                    if name is not None:
                        time = self._us(record.end)
                        yield _event("i", name, process, LOOP, time) | {"s": "g"}

    def _with_outcomes(self, records: Iterable[TraceRecord]) -> Iterator[TraceRecord]:
        """Yield the draft's records, with the outcomes of drafted tokens added to the forwards.

        Which tokens a forward drafted is known only from the decisions that follow the forward (see
        `incident` for what a decision is). So each forward is yielded after these decisions.
        """
        forward = None
        for record in records:
            if record.name in ("draft", "prefill", "prepare"):
                if forward is not None:
                    yield forward
                forward = record
                continue
            if record.name == "decide":
                event = record.args["event"]
                self._outcomes.read(event)
                if forward is not None and event["type"] == "Drafted":
                    self._add_outcomes(forward, record.args)
            yield record
        if forward is not None:
            yield forward

    def _add_outcomes(self, forward: TraceRecord, decision: dict[str, Any]) -> None:
        """Add to `forward` the outcome of each drafted token in the messages of `decision`."""
        for message in messages(decision, "Send", "DraftTokens"):
            outcomes = self._outcomes.of(message)
            if outcomes:  # empty if the token was withheld
                drafted = "fates"
                if message["after"] is not None:
                    drafted = "branches"
                forward.args.setdefault(drafted, []).extend(outcomes)

    def _verdicts(self, record: TraceRecord, process: int) -> Iterator[Event]:
        """Yield an arrow for each verdict in `record`, from where it was sent to where it was read.

        Both ends of an arrow lie in a slice, because arrows connect slices.
        """
        read = (record.start + record.end) // 2
        for message in map(tuple, record.args["messages"]):
            if message[0] == "Verdict" and message in self._sent:
                name = REJECTION if message in self._rejections else VERDICT
                arrow = {"cat": "flow", "id": next(self._ids)}
                # The middle of a read may lie before the sending: the read began earlier, or the clocks differ a bit.
                sent = self._us(min(self._sent[message], read))
                yield _event("s", name, 1, LOOP, sent) | arrow
                end = _event("f", name, process, record.track, self._us(read))
                yield end | arrow | {"bp": "e"}

    def _slice(self, record: TraceRecord, process: int) -> Iterator[Event]:
        """Yield the event of a record; for a request, yield two: its begin and its end.

        Requests may overlap, so they are on no track.
        """
        if record.kind == "clock":
            return
        name = record.name
        if record.kind == "wait":
            name = WAIT + name
        elif name == "draft" and "fates" in record.args:
            name = DRAFTED[record.args["fates"][0]]
        event = _event("X", name, process, record.track, self._us(record.start))
        event |= {"cat": record.kind, "args": record.args}
        if record.kind == "whole":
            event["id"] = next(self._ids)
            yield event | {"ph": "b"}
            yield event | {"ph": "e", "ts": self._us(record.end)}
        else:
            yield event | {"dur": (record.end - record.start) / 1000}

    def _us(self, ns: int) -> float:
        return (ns - self._base) / 1000

    def document(self) -> dict[str, Any]:
        """Return the trace file's document, without its list of events."""
        workers = []
        for process, part in enumerate(self._parts, start=1):
            worker = {"process": process} | asdict(part.header)
            for name in ("config", "versions", "run", "opened"):
                worker.pop(name)
            worker["clock_offset_ns"] = part.offset
            worker["clock_uncertainty_ns"] = part.uncertainty
            # A worker that was killed lacks up to the last quarter of a second.
            worker["ended"] = part.has_ended
            workers.append(worker)
        header = self._parts[0].header
        return {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "distributedInfo": {
                "rank": 0,
                "world_size": 1,
                "backend": header.config["tensors"],
            },
            "metadata": {
                "pearl_trace": VERSION,
                "clock": "monotonic",
                "base_ns": self._base,
                "config": header.config,
                "versions": header.versions,
                "workers": workers,
            },
        }


def _event(phase: str, name: str, process: int, track: int, time: float = 0.0) -> Event:
    return {"ph": phase, "name": name, "pid": process, "tid": track, "ts": time}


def _descriptions(part: Part, process: int) -> Iterator[Event]:
    """Yield the events that name and order a process and its tracks."""
    header = part.header
    process_args = {
        "process_name": {"name": f"{header.role} (process {header.pid})"},
        "process_labels": {"labels": f"{header.host}, {header.machine}"},
        "process_sort_index": {"sort_index": process},
    }
    for name, args in process_args.items():
        yield _event("M", name, process, 0) | {"args": args}
    for track, name in TRACKS.items():
        yield _event("M", "thread_name", process, track) | {"args": {"name": name}}
        yield _event("M", "thread_sort_index", process, track) | {"args": {"sort_index": track}}


def incident(decision: dict[str, Any]) -> str | None:
    """Return a note if a decision reacts to a failure or a recovery; None if it does not.

    A decision is an event that a worker's state machine has handled, and the resulting commands.
    """
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


def committed(decision: dict[str, Any]) -> list[str]:
    """Return the sources of the tokens that a decision of the target commits."""
    sources = []
    for message in messages(decision, "Deliver", "Committed"):
        sources += message["provenance"]
    return sources


def split_waits(
    records: Iterable[TraceRecord], sent: Mapping[tuple[Any, ...], int]
) -> Iterator[TraceRecord]:
    """Split each wait at the time when the message that the loop waited for was sent.

    After this time, the loop waits for transport only. Between two pieces of work the loop may wait
    several times, because a message such as the first tokens of a window ends a wait, but lets no
    work begin. The message that lets the work begin is the last one. So all waits between two
    pieces of work are split at the time when the last message was sent. If a front sent the last
    message, this time is not recorded, and the waits are not split.
    """
    wait_records: list[TraceRecord] = []
    for record in records:
        is_work = record.kind == "busy" and record.track == LOOP and record.name != "decide"
        if is_work or len(wait_records) >= _MAX_HELD:
            yield from _split(wait_records, sent)
            wait_records = []
        if wait_records or record.kind == "wait":
            wait_records.append(record)
        else:
            yield record
    yield from _split(wait_records, sent)


def _split(
    wait_records: list[TraceRecord], sent: Mapping[tuple[Any, ...], int]
) -> Iterator[TraceRecord]:
    time = None  # when the last message of a request was sent
    for record in wait_records:
        message = tuple(record.args.get("by", ()))
        if record.kind == "wait" and message and message[1] is not None:
            time = sent.get(message)
    for record in wait_records:
        if record.kind != "wait" or time is None:
            yield record
            continue
        middle = min(max(time, record.start), record.end)
        if record.start < middle or middle == record.end:
            yield replace(record, end=middle)
        if middle < record.end:
            yield replace(record, start=middle, name=TRANSPORT)
