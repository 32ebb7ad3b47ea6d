"""Feed the recorded events into fresh state machines and compare their commands: a bug report becomes a test."""

from __future__ import annotations

import json

from pearl.errors import ProtocolError, TraceError
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.drafter import Drafter
from pearl.protocol.speeds import Speeds
from pearl.trace.plain import from_plain, plain
from pearl.trace.reading import Slice, Trace


def replay(trace: Trace) -> int:
    """Repeat the decisions of the target and of each draft; return their number.

    Raises `TraceError` for the first that differs from the recorded one, or if the target's first decision is missing.
    """
    total = 0
    for worker, slices in [("target", trace.target), *(("draft", draft) for draft in trace.drafts)]:
        decisions = [one for one in slices if one.name == "decide"]
        machine = _coordinator(trace, decisions) if worker == "target" else _drafter(trace, decisions)
        for number, one in enumerate(decisions):
            recorded = one.args.get("commands", [{"type": one.args.get("error")}])
            try:
                given = [plain(command) for command in machine.handle(from_plain(one.args["event"]))]
            except ProtocolError as error:
                given = [{"type": type(error).__name__}]
            if given != recorded:
                texts = (json.dumps(each) for each in (one.args["event"], recorded, given))
                raise TraceError(
                    f"decision {number} of the {worker} differs (after {total + number} that are the same):\n"
                    "  event     {}\n  recorded  {}\n  replayed  {}".format(*texts)
                )
        total += len(decisions)
    return total


def _coordinator(trace: Trace, decisions: list[Slice]) -> Coordinator:
    if not decisions or "profile" not in decisions[0].args:
        raise TraceError(f"{trace.path} does not begin with the target's first decision: it cannot be replayed")
    speeds = Speeds.of(from_plain(decisions[0].args["profile"]))
    return Coordinator(speeds, _slots(trace), decisions[0].args.get("piece", 1))


def _drafter(trace: Trace, decisions: list[Slice]) -> Drafter:
    """With the context from the draft's message to the target; any value will do if the draft had no request."""
    joined = (s.args["event"] for s in trace.target if s.name == "decide" and s.args["event"]["type"] == "DraftJoined")
    piece = decisions[0].args.get("piece", 1) if decisions else 1
    return Drafter(int(next(joined, {"context": 1})["context"]), _slots(trace), piece)


def _slots(trace: Trace) -> int:
    """How many requests run side by side; a simulation has one."""
    return int(trace.metadata["config"].get("slots", 1))
