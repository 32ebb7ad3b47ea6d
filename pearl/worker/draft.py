"""The draft worker's loop: draft, and between any two forwards look for a verdict, never waiting while it may draft."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from pearl import errors
from pearl.errors import ForwardError, ModelError, ProtocolError, RemoteProtocolError, TraceError, TransportError
from pearl.execution.ahead import Ahead
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import memory_told
from pearl.protocol.drafter import Drafter, State
from pearl.protocol.events import Draft, Drafted, Open, Rollback, Send, Wait
from pearl.protocol.messages import (
    PROTOCOL_VERSION,
    Begin,
    DraftTokens,
    Error,
    Finish,
    Heartbeat,
    Hello,
    Message,
    Ping,
    Pong,
    Role,
    Trace,
    Verdict,
    Welcome,
)
from pearl.silence import SLACK
from pearl.trace.tracer import Tracer
from pearl.transport.base import Endpoint, Fault
from pearl.worker.rows import RowPacker, packed

log = logging.getLogger(__name__)

MOST_UNANNOUNCED = 8  # tokens: a forward of more is announced, for it may take longer than silence is borne
_IDLE_SECONDS = 0.2  # longest sleep of the loop, so that closing is noticed


class DraftWorker:
    """Drafts for one target until `stopping()`.

    Args:
        welcomed: called with the target's introduction, before anything is drafted; returns the executor that fits it,
            and how its distributions travel.
        slots: how many requests it drafts for side by side.
        beat: called by the loop every `heartbeat_seconds`, and before long work with the seconds that it may take.
        computes: called once in the thread that is to compute.
        piece: see `Capabilities.prompt_piece`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        hello: Hello,
        welcomed: Callable[[Welcome], tuple[DraftExecutor, RowPacker]],
        ready: Callable[[], None],
        stopping: Callable[[], bool],
        heartbeat_seconds: float,
        tracer: Tracer,
        beat: Callable[[float], None] = lambda allowance: None,
        slots: int = 1,
        computes: Callable[[], None] = lambda: None,
        piece: int = 1,
    ) -> None:
        assert hello.role is Role.DRAFT
        self._endpoint = endpoint
        self._hello = hello
        self._welcomed = welcomed
        self._ready = ready
        self._stopping = stopping
        self._heartbeat_seconds = heartbeat_seconds
        self._launcher_beat = beat
        self._prefill_pace = 0.0  # seconds a token of a long forward, as measured last
        self._slots, self._piece = slots, piece
        self._computes = computes
        self._drafter = Drafter(hello.context, slots, piece)
        self._tracer = tracer
        self._decide = tracer.deciding(self._drafter)
        self._executor: DraftExecutor | None = None
        self._packer: RowPacker | None = None
        self._todo: deque[object] = deque()
        self._drafts: list[Draft] = []  # asked for and not begun: one forward is to do for all
        self._steps = 0
        self._beat = 0.0
        self._waited = 0.0  # seconds, in the request begun

    def run(self) -> None:
        """The loop. Raises `ModelError` where the target refuses this draft."""
        with ExitStack() as self._open:
            self._mail = self._open.enter_context(self._tracer.mailbox(self._endpoint, outgoing=self._inlined))
            self._mail.send(self._hello)
            while not self._stopping():
                if self._todo:
                    self._carry_out(self._todo.popleft())
                elif self._drafts:
                    self._draft()
                else:
                    self._wait()
                self._heartbeat()

    def _wait(self) -> None:
        began, waits = time.monotonic(), self._drafter.state is not State.IDLE
        self._receive(_IDLE_SECONDS)
        if waits:
            self._waited += time.monotonic() - began

    def _receive(self, timeout: float) -> None:
        for _, message in self._mail.receive(timeout):
            self._on_message(message)

    def _on_message(self, message: Message | Fault) -> None:
        match message:
            case Begin() | Verdict() | Finish() if not any(isinstance(todo, Trace) for todo in self._todo):
                self._take(message)
            case Trace() | Begin() | Verdict() | Finish():
                self._todo.append(message)  # a recording begins between what came before it and what came after
            case Ping(sent):
                self._mail.post(Pong(sent, time.monotonic_ns()))
            case Pong():
                pass
            case Welcome() if self._executor is None:
                self._meet(message)
            case Welcome():
                pass  # repeated
            case Error(_, kind, text):
                raise getattr(errors, kind)(text)
            case ProtocolError() | TransportError():
                raise message
            case _:
                raise RemoteProtocolError(f"draft does not expect {type(message).__name__} from the target")

    def _take(self, message: Begin | Verdict | Finish) -> None:
        if isinstance(message, Begin) and self._drafter.state is State.IDLE:
            self._waited = 0.0
        self._todo.extend(self._decide(message))

    def _meet(self, welcome: Welcome) -> None:
        if welcome.version != PROTOCOL_VERSION:
            raise ModelError(f"the target speaks version {welcome.version}, this draft {PROTOCOL_VERSION}")
        self._executor, self._packer = self._welcomed(welcome)
        self._open.callback(self._packer.close)
        # A target that knows t_draft has had a draft before, and waits for this one amid its work: measure briefly.
        seconds, self._prefill_pace = self._executor.proposer.measure(welcome.t_draft > 0)
        ahead = Ahead(self._executor, lambda: self._mail.is_empty, self._tracer.beside, self._computes)
        self._open.enter_context(ahead)
        self._execute = self._tracer.computing(ahead.execute)
        self._draft_together = self._tracer.computing(ahead.draft)
        self._mail.send(Heartbeat(0, "calibrated", 1, seconds))
        self._ready()

    def _record(self, trace: Trace) -> None:
        """Begins or ends a recording, between two requests; with a new state machine, so that it can be replayed."""
        assert self._executor is not None
        try:
            if trace.on:
                self._tracer.start(trace.number)
                self._execute(Rollback(0))
                self._drafter = Drafter(self._hello.context, self._slots, self._piece)
                self._decide = self._tracer.deciding(self._drafter)
            else:
                self._tracer.stop(trace.number)
        except TraceError as error:
            log.error("no trace: %s", error)
        self._mail.send(trace)

    def _heartbeat(self) -> None:
        """From the work loop, so that a hung loop falls silent. Where the connection was cut, sending tells."""
        now = time.monotonic()
        if now - self._beat > self._heartbeat_seconds:
            self._beat = now
            met = self._executor is not None
            beat = Heartbeat(self._steps, self._drafter.state.value, 0) if met else Ping(time.monotonic_ns())
            self._mail.post(beat)
            self._launcher_beat(0.0)

    def _announce(self, tokens: int) -> None:
        """Tell target and launcher how long a long prefix will take, so that they do not take silence for a hang."""
        seconds = tokens * self._prefill_pace
        self._mail.send(Heartbeat(self._steps, "prefill", tokens, seconds))
        self._launcher_beat(SLACK * seconds)

    def _inlined(self, message: Message) -> Message:
        return packed(message, self._waited)

    def _draft(self) -> None:
        """One forward for all requests that are to be drafted for."""
        drafts, self._drafts = self._drafts, []
        longest = max(len(command.tokens) for command in drafts)
        if longest > MOST_UNANNOUNCED:
            self._announce(sum(len(command.tokens) for command in drafts))
        began = time.monotonic()
        events = self._drafted(drafts)
        self._steps += 1
        if longest > MOST_UNANNOUNCED:
            self._prefill_pace = (time.monotonic() - began) / sum(len(command.tokens) for command in drafts)
        self._receive(0)  # a verdict that came meanwhile may have overtaken these tokens
        for event in events:
            self._todo.extend(self._decide(event))

    def _drafted(self, drafts: Sequence[Draft]) -> Sequence[object]:
        """What answers them. Where they cannot be computed together each is by itself: only what fails alone fails."""
        if len(drafts) > 1:
            try:
                with memory_told():
                    return self._draft_together(drafts)
            except ForwardError as error:
                log.info("%s; drafting for %d requests one by one", error, len(drafts))
        return [self._drafted_alone(command) for command in drafts]

    def _drafted_alone(self, command: Draft) -> object:
        try:
            with memory_told():
                return self._execute(command)
        except ForwardError as error:
            return Drafted(failure=str(error), request=command.request)

    def _carry_out(self, command: object) -> None:
        assert self._executor is not None
        assert self._packer is not None
        match command:
            case Open() | Trace() if self._drafts:  # perhaps another request takes their slot: they come first
                self._todo.appendleft(command)
                self._draft()
            case Send(DraftTokens() as message):
                start = self._tracer.clock()
                message, announced = self._packer.prepare(message)  # while the next forward runs
                self._tracer.note("busy", "pack", start)
                self._mail.send(message)
                self._packer.send(announced)
            case Send(message):
                self._mail.send(message)
            case Wait():
                pass
            case Trace():
                self._record(command)
            case Begin() | Verdict() | Finish():
                self._take(command)
            case Draft():
                self._drafts.append(command)
            case _:
                self._execute(command)
