"""vLLM's part of a trace: its steps, the proposer's work and waits, committed tokens and messages.

The records have the form of those of PEARL's own target, so the same timeline and report are made
of them.
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
    """An event of the trace: what a step of vLLM has committed.

    `lengths`: the number of committed tokens, by row.
    """

    lengths: tuple[int, ...]


@dataclass
class Readiness:
    """What a call of `propose` found, as numbers of requests.

    Attributes:
        rows: requests that the step decoded.
        ready: those with drafted tokens that could be verified at once.
        rejected: those for which the step committed another token than the drafted one.
        foreseen: those of `rejected` for which the draft had prepared a continuation.
    """

    rows: int = 0
    ready: int = 0
    rejected: int = 0
    foreseen: int = 0


class StepRecorder(Tracer):
    """Records this engine's part of a trace, for `pearl trace merge`.

    Args:
        trace: the trace file that is to be made; None if nothing is recorded.
        about: facts about this engine for the trace, under the keys "target", "draft", "control"
            and "tensors".
    """

    def __init__(self, trace: str | None, about: dict[str, Any]) -> None:
        recorder = None
        if trace is not None:
            recorder = outside_recorder(Path(trace).absolute(), "target", about)
        super().__init__(recorder)
        self.cause = DRAFT

    def step(self, windows: Mapping[int, int], start: int, end: int) -> None:
        """Record a step of vLLM that verified tokens.

        `windows`: the number of drafted tokens that the step verified for each request.
        """
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
        """Record the sending of each message as a slice of its own.

        The merge of the trace needs these slices: it matches each wait of the draft with the
        message that ended the wait.
        """
        end = self.clock()
        for message in messages:
            args = {"message": identity(message)}
            self.record(LOOP, "communication", "send", start, end, args)

    def proposed(self, start: int, since: int, readiness: Readiness) -> None:
        """Record a call of `propose` that began at `start` and ends now.

        The call becomes a slice of the timeline, which begins only at `since`. Before `since` the
        call has decided and waited; these have slices of their own.
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
        """Record a request that has ended, from its beginning until now."""
        began, args = self._opened.pop(request)
        self.record(LOOP, "whole", f"request {request}", began, self.clock(), args)
