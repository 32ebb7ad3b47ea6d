"""vLLM's half of a trace: its steps, the proposer's work and waits, what was committed and sent.

The records are those of PEARL's own target, so its timeline and report are made of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from pearl.protocol.events import Phase
from pearl.protocol.messages import Message, Pong
from pearl.trace.recorder import DRAFT, LOOP, Recorder, TraceRecord, outside_recorder


class Stepped(Struct, frozen=True):
    """The event of a decision: what vLLM's step has committed. `lengths`: tokens of each request that it decoded."""

    lengths: tuple[int, ...]


@dataclass
class Readiness:
    """What a call of `propose` found.

    Attributes:
        rows: requests that were decoded.
        ready: those that have drafted tokens without a wait.
        rejected: those whose step committed another token than was drafted.
        foreseen: of these, those for which the draft had prepared.
    """

    rows: int = 0
    ready: int = 0
    rejected: int = 0
    foreseen: int = 0

    def __add__(self, other: Readiness) -> Readiness:
        return Readiness(
            self.rows + other.rows,
            self.ready + other.ready,
            self.rejected + other.rejected,
            self.foreseen + other.foreseen,
        )


class StepRecorder:
    """Records for `pearl trace merge`. Without a recorder it records nothing.

    Args:
        trace: the file that is to be made; None: nothing is recorded.
        about: of this engine: `target`, `draft`, `control`, `tensors`.
    """

    def __init__(self, trace: str | None, about: dict[str, Any]) -> None:
        self._recorder: Recorder | None = None
        if trace is not None:
            self._recorder = outside_recorder(Path(trace).absolute(), "target", about)
        self._began: dict[int, int] = {}  # request -> when it was first seen
        self._prompts: dict[int, int] = {}

    def clock(self) -> int:
        return time.monotonic_ns()

    def step(self, windows: Mapping[int, int], start: int, end: int) -> None:
        """Record a step of vLLM, given the number of drafted tokens that it verified for each request."""
        if self._recorder is None:
            return
        num_drafted = sum(windows.values())
        phase = Phase.POST_VERIFY if num_drafted else Phase.PRE_VERIFY
        args = {"n": len(windows) + num_drafted, "requests": list(windows)}
        self._recorder.record(TraceRecord(LOOP, "busy", phase.value, start, end, args))

    def prompts(self, start: int, end: int) -> None:
        """A step of vLLM that read prompts."""
        if self._recorder is not None:
            self._recorder.record(TraceRecord(LOOP, "busy", Phase.PREFILL.value, start, end, {}))

    def decided(self, event: Stepped, commands: Sequence[object], start: int) -> None:
        if self._recorder is not None:
            args = {"event": event, "commands": list(commands)}
            self._recorder.record(TraceRecord(LOOP, "busy", "decide", start, self.clock(), args))

    def sent(self, messages: Sequence[Message], start: int) -> None:
        """Each message has a slice of its own, by which a wait of the draft finds what ended it."""
        if self._recorder is None:
            return
        end = self.clock()
        for message in messages:
            args = {"message": _identity(message)}
            self._recorder.record(TraceRecord(LOOP, "communication", "send", start, end, args))

    def waited(self, start: int) -> None:
        if self._recorder is not None:
            self._recorder.record(TraceRecord(LOOP, "wait", DRAFT, start, self.clock(), {}))

    def proposed(self, start: int, since: int, readiness: Readiness) -> None:
        """A call of `propose` that began at `start`; its decisions and wait, until `since`, have their own slices."""
        if self._recorder is None:
            return
        end = self.clock()
        args = {
            "seconds": round((end - start) / 1e9, 7),
            "rows": readiness.rows,
            "ready": readiness.ready,
            "rejected": readiness.rejected,
            "foreseen": readiness.foreseen,
        }
        self._recorder.record(TraceRecord(LOOP, "busy", "propose", since, end, args))

    def pong(self, pong: Pong) -> None:
        if self._recorder is not None:
            now = self.clock()
            args = {"sent": pong.sent, "received": pong.received}
            self._recorder.record(TraceRecord(LOOP, "clock", "pong", now, now, args))

    def begin(self, request: int, num_tokens: int) -> None:
        self._began[request] = self.clock()
        self._prompts[request] = num_tokens

    def end(self, request: int) -> None:
        """A request's row is gone."""
        start = self._began.pop(request)
        num_tokens = self._prompts.pop(request)
        if self._recorder is not None:
            args = {
                "request": request,
                "options": {"method": "pearl in vllm"},
                "prompt_tokens": num_tokens,
            }
            self._recorder.record(
                TraceRecord(LOOP, "whole", f"request {request}", start, self.clock(), args)
            )

    def close(self) -> None:
        for request in list(self._began):
            self.end(request)
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None


def _identity(message: Message) -> list[Any]:
    return [
        type(message).__name__,
        getattr(message, "request", None),
        getattr(message, "epoch", None),
        getattr(message, "start", None),
    ]
