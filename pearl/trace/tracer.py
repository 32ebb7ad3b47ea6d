"""Wrappers around what a worker's loop calls: its state machine, executor, mailbox, channel and model.

A worker always calls through them; while nothing is recorded that costs it an `if`.  Times are taken around each call;
waiting is recorded as such, with the cause that the state machine named, so nothing is inferred from gaps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
    Judge,
    Judged,
    Open,
    Rollback,
    Sample,
    Sampled,
    Wait,
)
from pearl.protocol.messages import Message, Pong
from pearl.trace.plain import plain
from pearl.trace.recorder import AHEAD, CONSUMER, DRAFT, GPU, HELD_ROW, LOOP, MAIL, START_UP, VERDICT, Recorder
from pearl.transport.base import Endpoint, Peer, Received, TensorChannel
from pearl.transport.mailbox import Mailbox

_TARGET_CAUSES = {Cause.HELD_ROW: HELD_ROW, Cause.WINDOW: DRAFT, Cause.IDLE: CONSUMER}
_DRAFT_CAUSES = {Cause.WINDOW: VERDICT, Cause.IDLE: CONSUMER}
_ROUNDING = 1000  # nanoseconds
_CATCHING_UP = 2  # the most tokens that a draft forward feeds after a verdict

_Event = TypeVar("_Event")


def identity(message: object) -> list[Any]:
    """The identity of a message: its type, request, epoch and start."""
    return [type(message).__name__, *(getattr(message, name, None) for name in ("request", "epoch", "start"))]


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
        self._opened: tuple[int, dict[str, Any]] | None = None  # the request being worked on
        self._first = True

    def start(self, number: int) -> None:
        """Begins recording number `number`, between two requests and with a state machine that is new.

        Raises `TraceError` where something is being recorded already, or the file cannot be made.
        """
        if self.recorder is not None or self._open_part is None:
            raise TraceError("this engine is recording a trace already")
        recorder = self._open_part(number)
        self.cause, self._opened, self._first, self._since = CONSUMER, None, True, recorder.clock()
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
            before = plain(machine.speeds) if self._first and isinstance(machine, Coordinator) else None
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
        speeds: Any = None,
    ) -> None:
        """Records one turn of the machine. `speeds`: of the coordinator before its first one."""
        causes, cause = (_TARGET_CAUSES if isinstance(machine, Coordinator) else _DRAFT_CAUSES), None
        for command in commands:
            if type(command) is Wait:
                cause = causes[command.cause]
        sequence = machine.sequence
        args = {
            "event": event,
            # what is told of an ended request goes on counting stale messages, so it is taken down at once
            "commands": [plain(command) if type(command) is End else command for command in commands],
            "pending": len(sequence.tokens) - sequence.committed,
            "epoch": machine.epoch,
        }
        if isinstance(machine, Coordinator):
            args |= {"window": machine.window, "acceptance": round(machine.speeds.acceptance, 4)}
        if speeds is not None:
            args["speeds"] = speeds
        self._first = False
        assert self.recorder is not None
        self.recorder.record(LOOP, "busy", "decide", start, end, args)
        self._follow_request(machine, start, end)
        if cause is not None:
            self.cause = cause
        self._spent_since(end)

    def _follow_request(self, machine: Coordinator | Drafter, start: int, end: int) -> None:
        request = machine.request if isinstance(machine, Coordinator) else machine.begun
        number = request.request if request else None
        if self._opened is not None and self._opened[1]["request"] != number:
            began, args = self._opened
            assert self.recorder is not None
            self.recorder.record(LOOP, "whole", f"request {args['request']}", began, end, args)
            self._opened, start = None, end  # one that was queued begins where it ends
        if request is not None and self._opened is None:
            args = {"request": number}
            if isinstance(machine, Coordinator) and machine.request is not None:
                args |= {"decoding": machine.request.decoding, "sampling": machine.request.sampling}
                args |= {"prompt_tokens": len(machine.request.prompt)}
            self._opened = (start, args)

    # ---- computing ----

    def computing(self, execute: Callable[[object], _Event]) -> Callable[[object], _Event]:
        def traced(command: object) -> _Event:
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
        """Records one command carried out between `start` and `end`."""
        assert self.recorder is not None
        record = self.recorder.record
        match command:
            case Forward(phase, at, tokens, _):
                record(LOOP, "busy", phase.value, start, end, {"n": len(tokens), "start": at})
            case Judge(at, tokens, _):
                assert isinstance(event, Judged)
                args = {"start": at, "n": len(tokens), "accepted": event.accepted, "correction": event.token}
                record(LOOP, "busy", "judge", start, end, args)
            case Sample(position):
                assert isinstance(event, Sampled)
                record(LOOP, "busy", "sample", start, end, {"start": position, "token": event.token})
            case Draft(at, tokens, budget, _):
                assert isinstance(event, Drafted)
                sample = budget > 0
                # It may have begun before the loop asked for it; or after, where another had to end first.
                done = max(start, end - round(event.draw * 1e9)) if sample else end
                began = max(start, done - round(event.seconds * 1e9))
                if began - start > _ROUNDING:
                    record(LOOP, "busy", "hand over", start, began)
                else:
                    began = start
                name = "draft" if sample and len(tokens) <= _CATCHING_UP else "prefill"
                ran = round(event.seconds, 7)
                record(LOOP, "busy", name, began, done, {"n": len(tokens), "start": at, "seconds": ran})
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

    def mailbox(self, endpoint: Endpoint, **hooks: Callable[..., Message]) -> Mailbox:
        return _TracedMailbox(self, endpoint, **hooks)

    def channel(self, channel: TensorChannel) -> TensorChannel:
        return _TracedChannel(channel, self)

    def waited(self, start: int, end: int, by: object) -> None:
        """Records a wait of the loop, for the cause last named, that a message may have ended."""
        self.record(LOOP, "wait", self.cause, start, end, {"by": identity(by)} if by is not None else {})

    def pong(self, pong: Pong) -> None:
        """A clock answer: where workers are on two hosts, the offset between their clocks is told from these."""
        self.note("clock", "pong", self.clock(), sent=pong.sent, received=pong.received)


class _TracedMailbox(Mailbox):
    def __init__(self, tracer: Tracer, endpoint: Endpoint, **hooks: Callable[..., Message]) -> None:
        self._tracer = tracer
        self._traced = _TracedEndpoint(endpoint, tracer)
        super().__init__(self._traced, **hooks)

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
