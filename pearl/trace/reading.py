"""Reads a trace file back into slices, the pieces of work and the waits on a worker's timeline.

Damaged, foreign and empty files each have an error of their own.
"""

from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from pearl.document import damaged, parse_json
from pearl.errors import TraceError
from pearl.trace.chrome import DRAFTED, REJECTION, VERSION, WAIT, Event
from pearl.trace.recorder import LOOP, part_paths

VERIFICATIONS = ("pre-verify", "post-verify")
FORWARDS = ("prefill", *VERIFICATIONS, "draft", "prepare")


@dataclass(frozen=True, slots=True)
class Slice:
    """Work or a wait, from `start` to `end` in seconds from the trace's beginning.

    `name`: for a wait, its cause.
    """

    name: str
    kind: str
    start: float
    end: float
    args: dict[str, Any]

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def ran(self) -> float:
        """Seconds that a forward took.

        A draft forward may begin before the draft's loop waits for it. The forward then takes
        longer than its slice.
        """
        return float(self.args.get("seconds", self.seconds))

    @property
    def method(self) -> str:
        """The decoding method of a request; "?" if the request's record is incomplete."""
        return str(self.args.get("options", {}).get("method", "?"))


@dataclass(frozen=True, slots=True)
class Arrow:
    """A verdict: when the target sent it and when the draft read it, in seconds."""

    sent: float
    read: float
    is_rejection: bool


@dataclass
class RunTrace:
    """One run. All lists are in order of time.

    Attributes:
        target: the slices of the target's loop, without slices inside another slice, and without
            requests.
        draft: likewise, the slices of the draft's loop. If a lost draft was restarted, they come
            from several loops.
        requests: one slice for each request.
    """

    path: Path
    metadata: dict[str, Any]
    target: list[Slice] = field(default_factory=list)
    draft: list[Slice] = field(default_factory=list)
    requests: list[Slice] = field(default_factory=list)
    verdicts: list[Arrow] = field(default_factory=list)

    @property
    def method(self) -> str:
        """The decoding methods of the requests, each once, separated by commas."""
        return ", ".join(dict.fromkeys(request.method for request in self.requests))

    @property
    def start(self) -> float:
        return self.requests[0].start

    @property
    def end(self) -> float:
        return max(map(attrgetter("end"), self.requests))


def read(path: Path) -> RunTrace:
    """Read a trace that PEARL has written.

    Raises `TraceError`, which says what is wrong and what to do, if the file is no such trace.
    """
    document = read_document(path)
    with damaged(path, TraceError):
        metadata = document.get("metadata")
        if not isinstance(metadata, dict) or "pearl_trace" not in metadata:
            raise TraceError(
                f"{path} is a trace, but not one of ours: pearl writes them with --trace FILE"
            )
        if metadata["pearl_trace"] != VERSION:
            raise TraceError(
                f"{path} is a trace of format {metadata['pearl_trace']}; this version reads "
                f"{VERSION}"
            )
        for name in ("config", "workers"):
            if name not in metadata:
                raise TraceError(f"{path} is damaged: its metadata lacks {name}")
        trace = RunTrace(path, metadata)
        _sort(document["traceEvents"], trace)
        for worker in metadata["workers"]:
            if worker["role"] == "target" and not worker["ended"]:
                _add_cut_off(trace)
        if not trace.requests:
            raise TraceError(
                f"{path} holds no request: nothing was generated while it was recorded"
            )
        return trace


def read_document(path: Path) -> dict[str, Any]:
    """Read any Chrome Trace Event document. Raises `TraceError` if the file is not one."""
    try:
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise TraceError(f"{path} is empty")
        document = parse_json(text)
    except FileNotFoundError:
        why = "does not exist"
        if part_paths(path):
            why += f" yet, only parts of it: `pearl trace merge {path}` merges them"
        raise TraceError(f"{path} {why}") from None
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise TraceError(f"{path} is no trace: {error}") from None
    if not isinstance(document, dict) or "traceEvents" not in document:
        raise TraceError(f"{path} is JSON, but no trace: it has no traceEvents")
    return document


def _sort(events: list[Event], trace: RunTrace) -> None:
    """Add the slices and arrows of all events to `trace`, in order of time."""
    loops: dict[int, list[Slice]] = {1: []}
    begun = {}  # requests and flows, by id
    for event in events:
        match event["ph"]:
            case "s" | "b":
                begun[event["id"]] = event
            case "f" if event["id"] in begun:
                sent = begun.pop(event["id"])["ts"]
                arrow = Arrow(sent / 1e6, event["ts"] / 1e6, event["name"] == REJECTION)
                trace.verdicts.append(arrow)
            case "e" if event["id"] in begun and event["pid"] == 1:
                begin = begun.pop(event["id"])
                start = begin["ts"] / 1e6
                args = begin.get("args", {})
                request = Slice(begin["name"], "whole", start, event["ts"] / 1e6, args)
                trace.requests.append(request)
            case "X" if event["tid"] == LOOP:
                loops.setdefault(event["pid"], []).append(_slice(event))
    trace.requests.sort(key=attrgetter("start"))
    trace.verdicts.sort(key=attrgetter("sent"))
    trace.target = _outermost(loops.pop(1))
    for loop in loops.values():
        trace.draft += _outermost(loop)
    trace.draft.sort(key=attrgetter("start"))


def _add_cut_off(trace: RunTrace) -> None:
    """Add the requests that were running when the target was killed.

    A request is recorded at its end, so each "open" of a request without a record is one of them.
    """
    openings = [piece.start for piece in trace.target if piece.name == "open"]
    for request in trace.requests:
        opening = next((start for start in openings if start >= request.start), None)
        if opening is not None:
            openings.remove(opening)
    for start in openings:
        end = trace.target[-1].end
        trace.requests.append(Slice("request, cut off", "whole", start, end, {}))
    trace.requests.sort(key=attrgetter("start"))


def _slice(event: Event) -> Slice:
    # Rounded to nanoseconds, a slice that begins where another ends does not lie in it.
    start = round(event["ts"] * 1000) / 1e9
    end = round((event["ts"] + event["dur"]) * 1000) / 1e9
    name = event["name"].removeprefix(WAIT)
    if name in DRAFTED.values():
        name = "draft"
    return Slice(name, event["cat"], start, end, event.get("args", {}))


def _outermost(slices: list[Slice]) -> list[Slice]:
    """Return the slices that lie in no other slice, and all decisions of the state machine.

    Decisions are always returned, because a decision that takes no (virtual) time may seem to lie
    in a forward. A forward that ended before its loop requested it has a slice of length 0. If an
    empty slice starts together with a longer slice, both are returned.
    """
    outermost = []
    latest_end = 0.0
    for piece in sorted(slices, key=attrgetter("start", "end")):
        if piece.start >= latest_end or piece.end > latest_end or piece.name == "decide":
            outermost.append(piece)
            latest_end = max(latest_end, piece.end)
    return outermost
