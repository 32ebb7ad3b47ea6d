"""Wrappers around what a worker's loop calls: its state machine, executor, mailbox, channel and model.

A worker always calls through them; while nothing is recorded that costs it an `if`.  Times are taken around each call;
waiting is recorded as such, with the cause that the state machine named, so nothing is inferred from gaps.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from pearl.errors import ProtocolError, TraceError
from pearl.models.runner import Feed, ModelRunner, WrappedRunner
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.drafter import Drafter
from pearl.protocol.events import (
    Cause,
    Draft,
    Drafted,
    End,
    Forward,
    Guess,
    Guessed,
    Judge,
    Judged,
    Keep,
    Open,
    Phase,
    Rollback,
    Sample,
    Sampled,
    Spread,
    Wait,
)
from pearl.protocol.messages import Begin, Message, Pong, Submit
from pearl.protocol.sequence import TokenSequence
from pearl.trace.plain import plain
from pearl.trace.recorder import AHEAD, CONSUMER, DRAFT, GPU, HELD_ROW, LOOP, MAIL, START_UP, VERDICT, Recorder
from pearl.transport.base import Endpoint, Fault, Peer, Received, TensorChannel
from pearl.transport.mailbox import Mailbox

_TARGET_CAUSES = {Cause.HELD_ROW: HELD_ROW, Cause.WINDOW: DRAFT, Cause.IDLE: CONSUMER}
_DRAFT_CAUSES = {Cause.WINDOW: VERDICT, Cause.IDLE: CONSUMER}
_ROUNDING = 1000  # nanoseconds
_CATCHING_UP = 2  # the most tokens that a draft forward feeds after a verdict

_Command = TypeVar("_Command")
_Event = TypeVar("_Event")


def identity(message: object) -> list[Any]:
    """The identity of a message: its type, request, epoch and start."""
    return [type(message).__name__, *(getattr(message, name, None) for name in ("request", "epoch", "start"))]


class _OneRequest(Protocol):
    @property
    def sequence(self) -> TokenSequence: ...

    @property
    def epoch(self) -> int: ...


class Tracer:
    """For one worker. Make it on the thread that runs the loop.

    Args:
        recorder: None: nothing is recorded until `start`.
        open_part: makes the recorder of a recording by its number.
    """

    def __init__(self, recorder: Recorder | None = None, open_part: Callable[[int], Recorder] | None = None) -> None:
        self.recorder = recorder
        self.clock = recorder.clock if recorder else time.monotonic_ns
        self.number = 0  # of the recording that `start` has begun
        self.cause = START_UP
        self._open_part = open_part
        self._loop = threading.get_ident()
        self._since = 0  # when the recording began
        self._beside = 0  # when the thread beside the loop was last done
        self._opened: dict[int, tuple[int, dict[str, Any]]] = {}  # request that is worked on -> since when, what
        self._first = True

    def start(self, number: int) -> None:
        """Begins recording number `number`, between two requests and with a state machine that is new.

        Raises `TraceError` where something is being recorded already, or the file cannot be made.
        """
        if self.recorder is not None or self._open_part is None:
            raise TraceError("this engine is recording a trace already")
        recorder = self._open_part(number)
        self.cause, self._opened, self._first, self._since = CONSUMER, {}, True, recorder.clock()
        self.recorder, self.number = recorder, number

    def stop(self, number: int | None = None) -> None:
        """Ends the recording, if there is one (and it is `number`); its part is whole then."""
        if self.recorder is not None and number in (None, self.number):
            recorder, self.recorder, self.number = self.recorder, None, 0
            recorder.close()

    def note(self, kind: str, name: str, start: int, **args: Any) -> None:
        """Records what began at `start` and ends now, on the track of this thread."""
        self.record(self.track, kind, name, start, self.clock(), args)

    def record(
        self, track: int, kind: str, name: str, start: int, end: int, args: dict[str, Any] | None = None
    ) -> None:
        """Records what lasted from `start` to `end`, and the time that this takes. Any thread may, at any time."""
        recorder = self.recorder
        if recorder is not None and end >= self._since:
            recorder.record(track, kind, name, max(start, self._since), end, args)
            recorder.spent += max(0, self.clock() - end)

    def _spent_since(self, end: int) -> None:
        if self.recorder is not None:
            self.recorder.spent += max(0, self.clock() - end)  # in virtual time an end may be still to come

    @property
    def track(self) -> int:
        return LOOP if threading.get_ident() == self._loop else MAIL

    # ---- the state machine ----

    def deciding(self, machine: Coordinator | Drafter) -> Callable[[object], list[object]]:
        """`machine.handle`, recorded with its event and its commands: enough to run the machine again."""

        def handle(event: object) -> list[object]:
            if self.recorder is None:
                return machine.handle(event)
            start = self.clock()
            before = plain(machine.speeds.profile) if self._first and isinstance(machine, Coordinator) else None
            try:
                commands = machine.handle(event)
            except ProtocolError as error:
                self.note("busy", "decide", start, event=event, error=type(error).__name__)
                raise
            self._decided(machine, event, commands, start, self.clock(), before)
            return commands

        return handle

    def _decided(
        self,
        machine: Coordinator | Drafter,
        event: object,
        commands: Sequence[object],
        start: int,
        end: int,
        profile: Any = None,
    ) -> None:
        """Records one turn of the machine. `profile`: what the coordinator knew before its first one."""
        causes, cause = (_TARGET_CAUSES if isinstance(machine, Coordinator) else _DRAFT_CAUSES), None
        for command in commands:
            if type(command) is Wait:
                cause = causes[command.cause]
        own = _machine_of(machine, getattr(event, "request", None))
        sequence = own.sequence
        args = {
            "event": event,
            # what is told of an ended request goes on counting stale messages, so it is taken down at once
            "commands": [plain(command) if type(command) is End else command for command in commands],
            "pending": len(sequence.tokens) - sequence.committed,
            "epoch": own.epoch,
        }
        if isinstance(machine, Coordinator):
            args |= {"window": machine.window, "acceptance": round(machine.speeds.acceptance, 4)}
        if profile is not None:
            args["profile"] = profile
        if machine.piece > 1:
            args["piece"] = machine.piece
        self._first = False
        assert self.recorder is not None
        self.recorder.record(LOOP, "busy", "decide", start, end, args)
        self._follow_requests(machine, start, end)
        if cause is not None:
            self.cause = cause
        self._spent_since(end)

    def _follow_requests(self, machine: Coordinator | Drafter, start: int, end: int) -> None:
        """Records those that have ended, and when those that are new began."""
        running = _running(machine)
        assert self.recorder is not None
        for number in [number for number in self._opened if number not in running]:
            began, args = self._opened.pop(number)
            self.recorder.record(LOOP, "whole", f"request {number}", began, end, args)
            start = end  # one that was queued begins where it ends
        for number, request in running.items():
            if number not in self._opened:
                args = {"request": number}
                if isinstance(request, Submit):
                    args["options"] = request.options
                    args |= {"prompt_tokens": len(request.prompt)}
                self._opened[number] = (start, args)

    # ---- computing ----

    def computing(self, execute: Callable[[_Command], _Event]) -> Callable[[_Command], _Event]:
        def traced(command: _Command) -> _Event:
            if self.recorder is None:
                return execute(command)
            start = self.clock()
            event = execute(command)
            self.computed(command, event, start, self.clock())
            return event

        return traced

    def beside(self, event: object) -> None:
        """Records what a thread beside the loop has computed just now; the loop sees only how long it waited for it.

        Of forwards that are chained on a GPU the durations are the GPU's own, and one that was done before anybody
        came for it is shown later than it was, but never before the end of the one before it.
        """
        recorder = self.recorder
        if recorder is None or not isinstance(event, Drafted):
            return
        end = self.clock()
        done = max(self._beside, end - round(event.draw * 1e9))
        began = max(self._beside, done - round(event.seconds * 1e9))
        if began >= self._since:
            recorder.record(AHEAD, "busy", "forward", began, done)
            recorder.record(AHEAD, "busy", "draw", done, end)
            self._beside = end
            self._spent_since(end)

    def computed(self, command: object, event: object, start: int, end: int) -> None:
        """Records one command, or forwards of several requests that were one, carried out between `start` and `end`."""
        assert self.recorder is not None
        record = self.recorder.record
        match command:
            case list():
                args = {"n": sum(len(each.tokens) for each in command), "requests": [each.request for each in command]}
                prompts = [each.request for each in command if getattr(each, "phase", None) is Phase.PREFILL]
                name = _name_of_all(command)
                record(LOOP, "busy", name, start, end, args | ({"prompts": prompts} if prompts else {}))
            case Forward(phase, at, tokens, _, parents):
                tree = {} if parents is None else {"parents": list(parents)}
                args = {"n": len(tokens), "start": at, "request": command.request}
                record(LOOP, "busy", phase.value, start, end, args | tree)
            case Judge(at, tokens, _):
                assert isinstance(event, Judged)
                args = {"start": at, "n": len(tokens), "accepted": event.accepted, "correction": event.token}
                record(LOOP, "busy", "judge", start, end, args | {"request": command.request})
            case Sample(position):
                assert isinstance(event, Sampled)
                args = {"start": position, "tokens": list(event.tokens), "request": command.request}
                record(LOOP, "busy", "sample", start, end, args)
            case Guess(at, tokens):
                assert isinstance(event, Guessed)
                args = {"start": at + len(tokens), "n": len(event.tokens)}
                by = {source.value: n for source, n in Counter(event.sources).items()}
                record(LOOP, "busy", "guess", start, end, args | {"sources": by})
            case Spread(everywhere):
                record(LOOP, "busy", "spread", start, end, {"everywhere": everywhere})
            case Keep(path):
                record(LOOP, "busy", "keep", start, end, {"n": len(path)})
            case Draft(at, tokens, budget, _, hedge):
                assert isinstance(event, Drafted)
                sample = budget > 0
                # It may have begun before the loop asked for it; or after, where another had to end first.
                done = max(start, end - round(event.draw * 1e9)) if sample else end
                began = max(start, done - round(event.seconds * 1e9))
                if began - start > _ROUNDING:
                    record(LOOP, "busy", "hand over", start, began)
                else:
                    began = start
                name = "prepare" if hedge else "draft" if sample and len(tokens) <= _CATCHING_UP else "prefill"
                ran = round(event.seconds, 7)
                fed = {"fed": event.fed} if event.fed else {}
                record(LOOP, "busy", name, began, done, {"n": len(tokens), "start": at, "seconds": ran} | fed)
                if sample:
                    record(LOOP, "busy", "sample", done, end, {"start": at + len(tokens), "tokens": list(event.tokens)})
            case Rollback(length):
                record(LOOP, "busy", "rollback", start, end, {"length": length})
            case Open():
                record(LOOP, "busy", "open", start, end)
        self._spent_since(end)

    def runner(self, runner: ModelRunner) -> ModelRunner:
        """On a GPU its time there is recorded too; elsewhere the forward's own slice says it all."""
        return _TimedOnGpu(runner, self) if runner.device.type == "cuda" else runner

    # ---- communication and waiting ----

    def mailbox(self, endpoint: Endpoint, **hooks: Callable[..., Any]) -> Mailbox:
        return _TracedMailbox(self, endpoint, **hooks)

    def channel(self, channel: TensorChannel) -> TensorChannel:
        return _TracedChannel(channel, self)

    def waited(self, start: int, end: int, by: object) -> None:
        """Records a wait of the loop, for the cause last named, that a message may have ended."""
        self.record(LOOP, "wait", self.cause, start, end, {"by": identity(by)} if by is not None else {})

    def pong(self, pong: Pong) -> None:
        """A clock answer: where workers are on two hosts, the offset between their clocks is told from these."""
        self.note("clock", "pong", self.clock(), sent=pong.sent, received=pong.received)


def _machine_of(machine: Coordinator | Drafter, request: int | None) -> _OneRequest:
    """The machine that works on a request, or else the snapshot of whichever worked last."""
    if isinstance(machine, Coordinator):
        return machine.running.get(request, machine)  # type: ignore[arg-type]
    found = (one for one in machine.machines if one.begun is not None and one.begun.request == request)
    return next(found, machine)


def _running(machine: Coordinator | Drafter) -> dict[int, Submit | Begin]:
    if isinstance(machine, Coordinator):
        return {number: one.submit for number, one in machine.running.items()}
    return {one.begun.request: one.begun for one in machine.machines if one.begun is not None}


def _name_of_all(commands: Sequence[Forward | Draft]) -> str:
    """What a forward of several requests is shown as: a part of a prompt only where it is nothing else."""
    if any(isinstance(command, Draft) for command in commands):
        return "draft"
    phases = {command.phase for command in commands if isinstance(command, Forward)}
    ranked = (Phase.POST_VERIFY, Phase.PRE_VERIFY, Phase.PREFILL)
    return next(phase for phase in ranked if phase in phases).value


class _TracedMailbox(Mailbox):
    def __init__(self, tracer: Tracer, endpoint: Endpoint, **hooks: Callable[..., Any]) -> None:
        self._tracer = tracer
        self._traced = _TracedEndpoint(endpoint, tracer)
        super().__init__(self._traced, **hooks)

    def _checked(self, peer: Peer, message: Message | Fault) -> Message | Fault:
        found = super()._checked(peer, message)
        if self._tracer.recorder is not None and self._tracer.track == LOOP:
            self._traced.read_by_loop = self._tracer.clock()  # rows that came with it were waited for as such
        return found

    def send(self, message: Message, peer: Peer | None = None) -> None:
        if self._tracer.recorder is None:
            return super().send(message, peer)
        start = self._tracer.clock()
        super().send(message, peer)
        self._tracer.note("communication", "send", start, message=identity(message))
        return None

    def post(self, message: Message, peer: Peer | None = None) -> None:
        if self._tracer.recorder is None:
            return super().post(message, peer)
        start = self._tracer.clock()
        super().post(message, peer)
        self._tracer.note("communication", "post", start, message=identity(message))
        return None

    def receive(self, timeout: float) -> list[Received]:
        if self._tracer.recorder is None:
            return super().receive(timeout)
        start = self._tracer.clock()
        got = super().receive(timeout)
        if timeout > 0:
            first = got[0][1] if got else None
            # What the loop had to read itself was there already: it has waited from then on, if at all.
            self._tracer.waited(
                max(start, self._traced.read_by_loop),
                self._tracer.clock(),
                None if isinstance(first, Exception) else first,
            )
        else:
            self._tracer.note("communication", "receive", start)
        return got


class _TracedEndpoint:
    def __init__(self, endpoint: Endpoint, tracer: Tracer) -> None:
        self._endpoint, self._tracer = endpoint, tracer
        self.read_by_loop = 0  # when the loop itself last read something
        self.wait, self.wake, self.close = endpoint.wait, endpoint.wake, endpoint.close

    def send(self, message: Message, peer: Peer | None = None) -> None:
        start = self._tracer.clock()
        self._endpoint.send(message, peer)
        self._tracer.note("communication", "write", start)

    def receive(self, timeout: float) -> list[Received]:
        start = self._tracer.clock()
        got = self._endpoint.receive(timeout)
        if got and self._tracer.recorder is not None:
            messages = [identity(message) for _, message in got if not isinstance(message, Exception)]
            self._tracer.note("communication", "read", start, messages=messages)
            if self._tracer.track == LOOP:
                self.read_by_loop = self._tracer.clock()
        return got


class _TracedChannel:
    def __init__(self, channel: TensorChannel, tracer: Tracer) -> None:
        self._channel, self._tracer = channel, tracer
        self.close = channel.close

    def send(self, row: torch.Tensor) -> None:
        start = self._tracer.clock()
        self._channel.send(row)
        self._tracer.note("communication", "send row", start)

    def receive(self, count: int) -> torch.Tensor:
        start = self._tracer.clock()
        rows = self._channel.receive(count)
        self._tracer.note("communication", "receive rows", start, rows=count)
        return rows


class _TimedOnGpu(WrappedRunner):
    """Brackets each forward with two CUDA events, and reads them where the loop waits for the device anyway.

    It does not wait for forwards that are chained: of those the track of the thread beside the loop tells.
    """

    def __init__(self, runner: ModelRunner, tracer: Tracer, event: Callable[[], Any] | None = None) -> None:
        super().__init__(runner)
        self._tracer = tracer
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))
        self._running: tuple[Any, Any] | None = None

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        if self._tracer.recorder is None:
            return self._runner.forward(feeds)
        began, ended = self._event(), self._event()
        began.record()
        logits = self._runner.forward(feeds)
        ended.record()
        self._running = (began, ended)
        return logits

    def synchronize(self) -> None:
        super().synchronize()
        if self._running is not None:
            (began, ended), self._running = self._running, None
            now = self._tracer.clock()
            start = now - round(began.elapsed_time(ended) * 1e6)  # milliseconds
            self._tracer.record(GPU, "busy", "forward", start, now)
