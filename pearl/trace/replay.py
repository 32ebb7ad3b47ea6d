"""The recorded events, fed into fresh state machines: do they give the recorded commands? A bug report as a test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pearl.errors import ProtocolError, TraceError
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.drafter import Drafter
from pearl.protocol.window import Speeds
from pearl.trace.plain import from_plain, plain
from pearl.trace.reading import Slice, Trace


@dataclass(frozen=True)
class Difference:
    """The first decision that came out otherwise. `number` counts from 0; commands are as the trace holds them."""

    worker: str
    number: int
    event: dict[str, Any]
    recorded: list[Any]
    replayed: list[Any]


@dataclass(frozen=True)
class Replayed:
    decisions: int
    difference: Difference | None


def replay(trace: Trace, worker: str) -> Replayed:
    """`worker`: target or draft. Raises `TraceError` where the trace does not hold its decisions from the beginning."""
    decisions = [s for s in (trace.target if worker == "target" else trace.draft) if s.name == "decide"]
    if not decisions:
        raise TraceError(f"{trace.path} holds no decisions of the {worker}")
    machine = _coordinator(decisions[0]) if worker == "target" else Drafter(_context(trace))
    for number, (one, given) in enumerate(zip(decisions, _handled(machine, decisions), strict=True)):
        recorded = one.args.get("commands", [{"type": one.args.get("error")}])
        if given != recorded:
            return Replayed(number, Difference(worker, number, one.args["event"], recorded, given))
    return Replayed(len(decisions), None)


def _handled(machine: Coordinator | Drafter, decisions: list[Slice]) -> Iterator[list[Any]]:
    for one in decisions:
        try:
            yield [plain(command) for command in machine.handle(from_plain(one.args["event"]))]
        except ProtocolError as error:
            yield [{"type": type(error).__name__}]


def _coordinator(first: Slice) -> Coordinator:
    if "speeds" not in first.args:
        raise TraceError("the trace does not begin with the target's first decision: it cannot be replayed")
    speeds = {k: v for k, v in first.args["speeds"].items() if k != "type"}
    speeds["_t_target"] = {int(n): t for n, t in speeds["_t_target"].items()}
    return Coordinator(Speeds(**speeds))


def _context(trace: Trace) -> int:
    """Of the draft, as it told the target."""
    joined = (s.args["event"] for s in trace.target if s.name == "decide" and s.args["event"]["type"] == "DraftJoined")
    first = next(joined, None)
    if first is None:
        raise TraceError(f"{trace.path} holds no draft that joined: it cannot be replayed")
    return int(first["context"])
