"""Feed the recorded events into fresh state machines: do they give the recorded commands? A bug report as a test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pearl.errors import ProtocolError, TraceError
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.drafter import Drafter
from pearl.protocol.speeds import Speeds
from pearl.trace.plain import from_plain, plain
from pearl.trace.reading import Slice, Trace


@dataclass(frozen=True)
class Difference:
    """The first decision that differs. `number` counts from 0; commands are as in the trace."""

    worker: str
    number: int
    event: dict[str, Any]
    recorded: list[Any]
    replayed: list[Any]


@dataclass(frozen=True)
class Replayed:
    decisions: int
    difference: Difference | None


def replay(trace: Trace) -> Replayed:
    """Repeat the decisions of the target and of each draft, up to the first difference.

    Raises `TraceError` where the target's first decision is missing.
    """
    runs = [("target", _decisions(trace.target))] + [("draft", _decisions(draft)) for draft in trace.drafts]
    total = 0
    for worker, decisions in runs:
        pieces = decisions[0].args.get("piece", 1) if decisions else 1
        is_target = worker == "target"
        machine = _coordinator(trace, decisions, pieces) if is_target else _drafter(trace, pieces)
        for number, (one, given) in enumerate(zip(decisions, _handled(machine, decisions), strict=True)):
            recorded = one.args.get("commands", [{"type": one.args.get("error")}])
            if given != recorded:
                return Replayed(total + number, Difference(worker, number, one.args["event"], recorded, given))
        total += len(decisions)
    return Replayed(total, None)


def _decisions(slices: list[Slice]) -> list[Slice]:
    return [one for one in slices if one.name == "decide"]


def _handled(machine: Coordinator | Drafter, decisions: list[Slice]) -> Iterator[list[Any]]:
    for one in decisions:
        try:
            yield [plain(command) for command in machine.handle(from_plain(one.args["event"]))]
        except ProtocolError as error:
            yield [{"type": type(error).__name__}]


def _coordinator(trace: Trace, decisions: list[Slice], piece: int) -> Coordinator:
    if not decisions or "profile" not in decisions[0].args:
        raise TraceError(f"{trace.path} does not begin with the target's first decision: it cannot be replayed")
    return Coordinator(Speeds.of(from_plain(decisions[0].args["profile"])), _slots(trace), piece)


def _slots(trace: Trace) -> int:
    """How many requests run side by side; a simulation has one."""
    return int(trace.metadata["config"].get("slots", 1))


def _drafter(trace: Trace, piece: int) -> Drafter:
    """With the context from the draft's message to the target; any value will do if the draft had no request."""
    joined = (s.args["event"] for s in trace.target if s.name == "decide" and s.args["event"]["type"] == "DraftJoined")
    return Drafter(int(next(joined, {"context": 1})["context"]), _slots(trace), piece)
