"""The draft worker's loop: it drafts, and looks for a verdict between any two forwards.

It never waits while it may draft.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from pearl import errors
from pearl.errors import (
    ForwardError,
    ModelError,
    ProtocolError,
    RemoteProtocolError,
    TraceError,
    TransportError,
)
from pearl.execution.batched import compute_together
from pearl.execution.draft import DraftExecutor
from pearl.execution.early_drafts import DraftThread
from pearl.execution.target import Event
from pearl.models.out_of_memory import memory_errors
from pearl.protocol.drafter import Drafter, DrafterState
from pearl.protocol.events import Draft, Drafted, Send, Wait
from pearl.protocol.messages import (
    PROTOCOL_VERSION,
    Begin,
    DraftTokens,
    Error,
    Finish,
    Heartbeat,
    Hello,
    HiddenStates,
    Message,
    Ping,
    Pong,
    Role,
    Trace,
    Verdict,
    Welcome,
)
from pearl.protocol.scheduler import Batch
from pearl.silence import SLACK
from pearl.trace.tracer import TracedMailbox, Tracer
from pearl.transport.base import Endpoint, Fault, Peer, Received
from pearl.worker.draft_rows import RowPacker, packed

log = logging.getLogger(__name__)

# Most tokens of a forward that is not announced. A longer forward is announced, because it may take
# longer than the time for which peers tolerate silence.
MAX_UNANNOUNCED = 8
_IDLE_SECONDS = 0.2  # longest sleep of the loop, so that closing is noticed


class DraftWorker:
    """Drafts for one target until `stopping()` is true.

    Args:
        welcomed: called with the target's introduction before anything is drafted; returns the executor for this
            target, and the packer of the executor's distributions.
        ready: called once, when the draft can draft.
        slots: how many requests are drafted for at the same time.
        heartbeat_seconds: seconds between two signs of life.
        beat: called by the loop with 0 at each sign of life, and before long work with the seconds
            that the work may take.
        computes: called once in the thread that computes, before its first forward.
        piece: how many prompt tokens are computed together; see `Capabilities.prompt_piece`.
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
        self.tracer = tracer
        self._welcomed = welcomed
        self._ready = ready
        self._stopping = stopping
        self._computes = computes
        self._heartbeat_seconds = heartbeat_seconds
        self._launcher_beat = beat
        self._drafter = Drafter(hello.context, slots, piece)
        self._executor: DraftExecutor | None = None
        self._packer: RowPacker | None = None
        self._commands: deque[object] = deque()
        self._batch: Batch[Draft] = Batch()
        self._num_forwards = 0
        self._prefill_pace = 0.0  # seconds per token of the last long forward
        self._beat = 0.0  # when the last heartbeat was sent
        self._waited = 0.0  # seconds of all waits so far
        # Request -> `_waited` when the request began.
        self._waited_before: dict[int, float] = {}

    def run(self) -> None:
        """Run the loop. Raises `ModelError` if the target refuses this draft."""
        with ExitStack() as self._open:
            mailbox = TracedMailbox(self.tracer, self._endpoint, outgoing=packed)
            self._mail = self._open.enter_context(mailbox)
            self._greet()
            while not self._stopping():
                if self._commands:
                    self._carry_out(self._commands.popleft())
                elif self._batch.commands:
                    self._draft()
                else:
                    self._wait()
                self._heartbeat()

    def _wait(self) -> None:
        """Wait for a message.

        If there is a request to draft for, the time counts as waiting for a verdict.
        """
        began = time.monotonic()
        awaits_verdict = self._drafter.state is not DrafterState.IDLE
        received = self._mail.receive(_IDLE_SECONDS)
        if awaits_verdict:
            self._waited += time.monotonic() - began
        self._take_all(received)

    # ---- messages ----

    def _greet(self) -> None:
        self._mail.send(self._hello)

    def _send(self, message: Message) -> None:
        self._mail.send(message)

    def _take_all(self, received: Sequence[Received]) -> None:
        for peer, message in received:
            self.on_message(peer, message)

    def on_message(self, peer: Peer, message: Message | Fault) -> None:
        match message:
            case Begin() | Verdict() | Finish():
                self._handle(message)
            case HiddenStates() if self._executor is not None:
                self._commands.append(message)  # after the `Open` of its request
            case Trace():
                self._record(message)
            case Ping(sent):
                self._mail.post(Pong(sent, time.monotonic_ns()))
            case Welcome() if self._executor is None:
                self._meet(message)
            case Welcome() | Pong():
                pass  # a repeated Welcome
            case Error(_, kind, text):
                raise getattr(errors, kind)(text)
            case ProtocolError() | TransportError():
                raise message
            case _:
                raise RemoteProtocolError(
                    f"draft does not expect {type(message).__name__} from the target"
                )

    def _meet(self, welcome: Welcome) -> None:
        if welcome.version != PROTOCOL_VERSION:
            raise ModelError(
                f"the target speaks version {welcome.version}, this draft {PROTOCOL_VERSION}"
            )
        # A target that knows t_draft has had a draft before, and waits for this one during a text: measure briefly.
        seconds = self._prepare(*self._welcomed(welcome), is_brief=welcome.t_draft > 0)
        self._mail.send(Heartbeat(0, "calibrated", 1, seconds))
        self._ready()

    def _prepare(self, executor: DraftExecutor, packer: RowPacker, *, is_brief: bool) -> float:
        """Measure the model, start the thread that computes, and return the seconds per token.

        Args:
            is_brief: whether to measure only a few forwards.
        """
        self._executor = executor
        self._packer = packer
        self._open.callback(packer.close)
        seconds, self._prefill_pace = executor.proposer.measure(is_brief)
        self._thread = DraftThread(executor, lambda: self._mail.is_empty, self._computes)
        self._open.callback(self._thread.close)
        return seconds

    def _record(self, trace: Trace) -> None:
        """Begin or end a recording."""
        try:
            if trace.on:
                self.tracer.start(trace.number)
            else:
                self.tracer.stop(trace.number)
        except TraceError as error:
            log.error("no trace: %s", error)
        self._mail.send(trace)

    def _heartbeat(self) -> None:
        """Send a sign of life to target and launcher, if the last one is old enough.

        The work loop sends it, so that a hung loop falls silent. Sending fails if the connection was cut.
        """
        now = time.monotonic()
        if now - self._beat > self._heartbeat_seconds:
            self._beat = now
            if self._executor is not None:
                self._send(Heartbeat(self._num_forwards, self._drafter.state.value, 0))
            else:
                self._mail.post(Ping(time.monotonic_ns()))
            self._launcher_beat(0.0)

    # ---- commands ----

    def _handle(self, event: object) -> None:
        if isinstance(event, Begin):
            self._waited_before.setdefault(event.request, self._waited)
        elif isinstance(event, Finish):
            self._waited_before.pop(event.request, None)
        self._commands.extend(self.tracer.decide(self._drafter, event))

    def _carry_out(self, command: object) -> None:
        match command:
            case _ if self._batch.precedes(command):
                self._commands.appendleft(command)
                self._draft()
            case Send(DraftTokens() as message):
                self._send_tokens(message)
            case Send(message):
                self._send(message)
            case Wait():
                pass
            case Draft():
                self._batch.commands.append(command)
            case _:
                self._execute(command)

    def _send_tokens(self, message: DraftTokens) -> None:
        """Send drafted tokens with their distributions, while the next forward runs."""
        assert self._packer is not None
        start = self.tracer.clock()
        waited = self._waited - self._waited_before.get(message.request, self._waited)
        message, announced = self._packer.prepare(message.changed(waited=waited))
        self.tracer.note("busy", "pack", start)
        self._send(message)
        self._packer.send(announced)

    def _draft(self) -> None:
        """Compute one forward for all requests that wait for one."""
        drafts = self._batch.take()
        tokens = sum(len(command.tokens) for command in drafts)
        is_long = max(len(command.tokens) for command in drafts) > MAX_UNANNOUNCED
        if is_long:
            # Tell target and launcher how long it will take, so that silence is no sign of a hang.
            expected = tokens * self._prefill_pace
            self._send(Heartbeat(self._num_forwards, "prefill", tokens, expected))
            self._launcher_beat(SLACK * expected)
        began = time.monotonic()
        events = compute_together(drafts, self._compute, _failed)
        self._num_forwards += 1
        if is_long:
            self._prefill_pace = (time.monotonic() - began) / tokens
        # A verdict that came during the forward may make these tokens obsolete.
        self._take_all(self._mail.receive(0))
        for event in events:
            self._handle(event)

    @memory_errors
    def _execute(self, command: object) -> Event | None:
        return self.tracer.compute(self._thread.execute, command)

    @memory_errors
    def _compute(self, commands: Sequence[Draft]) -> list[Drafted]:
        return self.tracer.compute(self._thread.draft, commands)


def _failed(command: Draft, error: ForwardError) -> Drafted:
    return Drafted(failure=str(error), request=command.request)
