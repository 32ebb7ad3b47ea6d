"""vLLM's half of a trace: its steps, the proposer's work and waits, what was committed and sent.

The records are those of PEARL's own target, so its timeline and report are made of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from pearl.protocol.events import Phase
from pearl.protocol.messages import Message
from pearl.trace.recorder import DRAFT, LOOP, outside_recorder
from pearl.trace.tracer import Tracer, identity


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


class StepRecorder(Tracer):
    """Records for `pearl trace merge`.

    Args:
        trace: the file that is to be made; None: nothing is recorded.
        about: of this engine: `target`, `draft`, `control`, `tensors`.
    """

    def __init__(self, trace: str | None, about: dict[str, Any]) -> None:
        recorder = None
        if trace is not None:
            recorder = outside_recorder(Path(trace).absolute(), "target", about)
        super().__init__(recorder)
        self.cause = DRAFT

    def step(self, windows: Mapping[int, int], start: int, end: int) -> None:
        """Record a step of vLLM, given the number of drafted tokens that it verified for each request."""
        num_drafted = sum(windows.values())
        phase = Phase.POST_VERIFY if num_drafted else Phase.PRE_VERIFY
        args = {"n": len(windows) + num_drafted, "requests": list(windows)}
        self.record(LOOP, "busy", phase.value, start, end, args)

    def prompts(self, start: int, end: int) -> None:
        """Record a step of vLLM that read prompts."""
        self.record(LOOP, "busy", Phase.PREFILL.value, start, end)

    def decided(self, event: Stepped, commands: Sequence[object], start: int) -> None:
        args = {"event": event, "commands": list(commands)}
        self.record(LOOP, "busy", "decide", start, self.clock(), args)

    def sent(self, messages: Sequence[Message], start: int) -> None:
        """Record each message as a slice of its own, by which a wait of the draft finds what ended it."""
        end = self.clock()
        for message in messages:
            args = {"message": identity(message)}
            self.record(LOOP, "communication", "send", start, end, args)

    def proposed(self, start: int, since: int, readiness: Readiness) -> None:
        """Record a call of `propose` that began at `start`.

        Its decisions and wait, until `since`, have their own slices.
        """
        end = self.clock()
        args = {"seconds": round((end - start) / 1e9, 7)} | asdict(readiness)
        self.record(LOOP, "busy", "propose", since, end, args)

    def begin(self, request: int, num_tokens: int) -> None:
        args = {
            "request": request,
            "options": {"method": "pearl in vllm"},
            "prompt_tokens": num_tokens,
        }
        self._opened[request] = self.clock(), args

    def end(self, request: int) -> None:
        """Record a request whose row is gone."""
        began, args = self._opened.pop(request)
        self.record(LOOP, "whole", f"request {request}", began, self.clock(), args)
