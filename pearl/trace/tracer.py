"""Wrappers around what a worker's loop calls: state machine, executor, mailbox, channel and model.

A worker always calls through the wrappers. While nothing is recorded, a call costs one `if`. A wait
is recorded with the cause that the state machine has named; no wait is inferred from gaps.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pearl.errors import TraceError
from pearl.protocol import events
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.drafter import Drafter
from pearl.protocol.messages import Begin, Message, Pong, Submit
from pearl.trace.recorder import (
    CONSUMER,
    DRAFT,
    HELD_ROW,
    LOOP,
    MAIL,
    START_UP,
    VERDICT,
    Recorder,
    TraceRecord,
)
from pearl.transport.base import Endpoint, Peer, Received
from pearl.transport.mailbox import Mailbox

_TARGET_CAUSES = {
    events.Cause.HELD_ROW: HELD_ROW,
    events.Cause.WINDOW: DRAFT,
    events.Cause.IDLE: CONSUMER,
}
_DRAFT_CAUSES = {events.Cause.WINDOW: VERDICT, events.Cause.IDLE: CONSUMER}
_ROUNDING_NS = 1000
_MAX_CATCH_UP = 2  # most tokens that a draft forward is fed after a verdict; more are a prefill

_Command = TypeVar("_Command")
_Event = TypeVar("_Event")


def identity(message: object) -> list[Any]:
    """Return the identity of a message: [type, request, epoch, start].

    If the message belongs to a branch, the type includes the outcome that the branch is for.
    """
    name = type(message).__name__
    outcome = getattr(message, "after", None)
    if outcome is not None:
        name += f" after {outcome}"
    return [
        name,
        getattr(message, "request", None),
        getattr(message, "epoch", None),
        getattr(message, "start", None),
    ]


class Tracer:
    """Records one worker. It must be created on the thread that runs the loop.

    Args:
        recorder: records the whole run; None if nothing is recorded until `start`.
        open_part: creates the recorder of a recording, given the recording's number.
    """

    def __init__(
        self, recorder: Recorder | None = None, open_part: Callable[[int], Recorder] | None = None
    ) -> None:
        self.recorder = recorder
        self.clock = recorder.clock if recorder else time.monotonic_ns
        self.number = 0  # of the recording that `start` began
        self.cause = START_UP
        self._open_part = open_part
        self._loop = threading.get_ident()
        self._since = 0  # when the recording began
        self._deciding = 0  # when the decision or its last judgement began
        #: running request -> since when, its arguments
        self._opened: dict[int, tuple[int, dict[str, Any]]] = {}

    def start(self, number: int) -> None:
        """Begin recording `number`. Requests that are already running are recorded from here on.

        Raises `TraceError` if another recording is running, or if the file cannot be created.
        """
        if self.recorder is not None or self._open_part is None:
            raise TraceError("this engine is recording a trace already")
        recorder = self._open_part(number)
        self.cause = CONSUMER
        self._opened = {}
        self._since = recorder.clock()
        self.number = number
        self.recorder = recorder

    def stop(self, number: int | None = None) -> None:
        """End the recording and complete its file.

        If nothing is being recorded, or `number` is the number of another recording, this does
        nothing.
        """
        if self.recorder is not None and number in (None, self.number):
            self._follow_requests({}, self.clock(), self.clock())
            recorder = self.recorder
            self.recorder = None
            self.number = 0
            recorder.close()

    def note(self, kind: str, name: str, start: int, **args: Any) -> None:
        """Record a slice that began at `start` and ends now, on the track of this thread."""
        self.record(self.track, kind, name, start, self.clock(), args)

    def record(
        self,
        track: int,
        kind: str,
        name: str,
        start: int,
        end: int,
        args: dict[str, Any] | None = None,
    ) -> None:
        """Record a slice from `start` to `end`. Any thread may call this."""
        recorder = self.recorder  # the loop may end the recording meanwhile
        if recorder is not None and end >= self._since:
            start = max(start, self._since)
            recorder.record(TraceRecord(track, kind, name, start, end, args or {}))

    @property
    def track(self) -> int:
        return LOOP if threading.get_ident() == self._loop else MAIL

    # ---- the state machine ----

    def decide(self, machine: Coordinator | Drafter, event: object) -> list[object]:
        """Return `machine.handle(event)`, and record this decision with its event and commands."""
        if self.recorder is None:
            return machine.handle(event)
        self._deciding = self.clock()
        commands = machine.handle(event)
        self._decided(machine, event, commands, self._deciding)
        return commands

    def verified(self, name: str) -> None:
        """Record a judgement or a draw that ends now, within a decision.

        The slice begins at the end of the previous judgement or draw in the decision. The first
        slice begins with the decision.
        """
        end = self.clock()
        self.record(LOOP, "busy", name, self._deciding, end)
        self._deciding = end

    def _decided(
        self, machine: Coordinator | Drafter, event: object, commands: list[object], start: int
    ) -> None:
        end = self.clock()
        args = {"event": event, "commands": commands}
        self.record(LOOP, "busy", "decide", start, end, args)
        self._follow_requests(_running(machine), start, end)
        causes = _TARGET_CAUSES if isinstance(machine, Coordinator) else _DRAFT_CAUSES
        for command in commands:
            if type(command) is events.Wait:
                self.cause = causes[command.cause]

    def _follow_requests(self, running: Mapping[int, Submit | Begin], start: int, end: int) -> None:
        """Record the requests that have ended, and remember when new ones start."""
        for number in sorted(self._opened.keys() - running.keys()):
            began, args = self._opened.pop(number)
            self.record(LOOP, "whole", f"request {number}", began, end, args)
            start = end  # a queued request begins where this one ends
        for number, request in running.items():
            if number not in self._opened:
                args = {"request": number}
                if isinstance(request, Submit):
                    args |= {"options": request.options, "prompt_tokens": len(request.prompt)}
                self._opened[number] = start, args

    # ---- computing ----

    def compute(self, execute: Callable[[_Command], _Event], command: _Command) -> _Event:
        """Return `execute(command)`, and record it."""
        if self.recorder is None:
            return execute(command)
        start = self.clock()
        event = execute(command)
        self.computed(command, event, start, self.clock())
        return event

    def computed(self, command: object, event: object, start: int, end: int) -> None:
        """Record the computation of a command from `start` to `end`.

        `command` may be a list of commands, which are computed in one forward; `event` is then the
        list of their events.
        """
        if not isinstance(command, list):
            command = [command]
            event = [event]
        assert isinstance(event, list)
        first = command[0]
        if isinstance(first, events.Draft) and len(command) == 1:
            self._drafted(first, event[0], start, end)
        elif isinstance(first, events.Draft | events.Forward):
            self._forward(command, event, start, end)
        else:
            self.record(LOOP, "busy", type(first).__name__.lower(), start, end)

    def _forward(
        self,
        commands: Sequence[Any],
        answers: Sequence[object],
        start: int,
        end: int,
    ) -> None:
        """Record a forward.

        The search for guessed tokens that the forward feeds is recorded as a slice before it.
        """
        name, args = _named(commands)
        for answer in answers:
            if isinstance(answer, events.Forwarded) and answer.fed is not None:
                num_guesses = len(answer.fed.guessers)
                args["n"] += num_guesses
                began = end - round(answer.seconds * 1e9)
                if num_guesses and began > start:
                    self.record(LOOP, "busy", "guess", start, began)
                    start = began
        self.record(LOOP, "busy", name, start, end, args)

    def _drafted(self, command: events.Draft, event: events.Drafted, start: int, end: int) -> None:
        """Record a draft forward, which runs on a thread of its own.

        At `start` the loop has requested the forward. If the forward began earlier, it is recorded
        from `start` on. If it began later, because it had to wait for the end of another forward,
        this wait is recorded as "hand over".
        """
        samples = command.budget > 0
        done = max(start, end - round(event.draw * 1e9)) if samples else end
        began = max(start, done - round(event.seconds * 1e9))
        if began - start > _ROUNDING_NS:
            self.record(LOOP, "busy", "hand over", start, began)
        else:
            began = start
        name = "prefill"
        if command.hedge:
            name = "prepare"
        elif samples and len(command.tokens) <= _MAX_CATCH_UP:
            name = "draft"
        args = {
            "n": len(command.tokens),
            "start": command.start,
            "seconds": round(event.seconds, 7),
        }
        if event.fed:
            args["fed"] = event.fed
        self.record(LOOP, "busy", name, began, done, args)
        if samples:
            self.record(LOOP, "busy", "sample", done, end)

    # ---- communication and waiting ----

    def waited(self, start: int, end: int, by: object) -> None:
        """Record a wait of the loop, for the cause that the state machine named last.

        `by`: the message that ended the wait; None if no message did.
        """
        args = {}
        if by is not None:
            args["by"] = identity(by)
        self.record(LOOP, "wait", self.cause, start, end, args)

    def pong(self, pong: Pong) -> None:
        """Record the answer to a clock ping, which tells the offset between two hosts' clocks."""
        self.note("clock", "pong", self.clock(), sent=pong.sent, received=pong.received)

    def communicated(self, name: str, start: int, message: object) -> None:
        """Record the handling of a message, from `start` until now."""
        if self.recorder is not None:
            self.note("communication", name, start, message=identity(message))


def _running(machine: Coordinator | Drafter) -> dict[int, Submit | Begin]:
    """Return, by request, the message that began each running request."""
    if isinstance(machine, Coordinator):
        return {number: text.request.submit for number, text in machine.running.items()}
    begun: dict[int, Submit | Begin] = {}
    for text in machine.machines:
        if text.begun is not None:
            begun[text.begun.request] = text.begun
    return begun


def _named(
    commands: Sequence[events.Forward | events.Draft],
) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a forward that computes these commands.

    The name is "prefill" only if all commands are for prompts.
    """
    phases = set()
    args: dict[str, Any] = {"n": 0, "requests": [], "prompts": []}
    for command in commands:
        args["n"] += len(command.tokens)
        args["requests"].append(command.request)
        if isinstance(command, events.Forward):
            phases.add(command.phase)
            if command.phase is events.Phase.PREFILL:
                args["prompts"].append(command.request)
    for phase in (events.Phase.POST_VERIFY, events.Phase.PRE_VERIFY, events.Phase.PREFILL):
        if phase in phases:
            return phase.value, args
    return "draft", args


class TracedMailbox(Mailbox):
    """A mailbox that records what the loop and the mailbox's own thread send, read and wait for."""

    def __init__(self, tracer: Tracer, endpoint: Endpoint, **hooks: Callable[..., Any]) -> None:
        self._tracer = tracer
        super().__init__(endpoint, **hooks)

    def _read(self) -> list[Received]:
        start = self._tracer.clock()
        received = super()._read()
        if received and self._tracer.recorder is not None:
            messages = [identity(message) for _, message in received]
            self._tracer.note("communication", "read", start, messages=messages)
        return received

    def send(self, message: Message, peer: Peer | None = None) -> None:
        start = self._tracer.clock()
        super().send(message, peer)
        self._tracer.communicated("send", start, message)

    def post(self, message: Message, peer: Peer | None = None) -> None:
        start = self._tracer.clock()
        super().post(message, peer)
        self._tracer.communicated("post", start, message)

    def receive(self, timeout: float) -> list[Received]:
        start = self._tracer.clock()
        received = super().receive(timeout)
        if self._tracer.recorder is None:
            return received
        if timeout > 0:
            message = None
            if received:
                _, message = received[0]
            self._tracer.waited(start, self._tracer.clock(), message)
        else:
            self._tracer.note("communication", "receive", start)
        return received


@dataclass
class TracedVerifier:
    """A verifier that records judgements and draws."""

    verifier: events.Verifier
    tracer: Tracer

    def judge(self, judge: events.Judge) -> events.Judged:
        judged = self.verifier.judge(judge)
        if self.tracer.recorder is not None:
            self.tracer.verified("judge")
        return judged

    def sample(self, sample: events.Sample) -> events.Sampled:
        sampled = self.verifier.sample(sample)
        if self.tracer.recorder is not None:
            self.tracer.verified("sample")
        return sampled
