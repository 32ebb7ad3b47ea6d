"""The target worker's loop: messages in, commands carried out, messages out.

It sees interfaces only: an endpoint, a runner behind an executor, a coordinator.  What it adds to the coordinator is
the world: which peer is the draft and which are fronts, whether the draft still answers, and how long things take.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

from pearl.decoding.registry import find
from pearl.errors import (
    DraftLost,
    ForwardError,
    ProtocolError,
    RemoteProtocolError,
    RequestError,
    TraceError,
    TransportError,
)
from pearl.metrics import Stopwatch, fold
from pearl.protocol.coordinator import Coordinator, State
from pearl.protocol.events import Deliver, DraftGone, DraftJoined, End, Failed, Forward, Open, Send, Stalled, Wait
from pearl.protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Committed,
    DraftTokens,
    Error,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Ping,
    Pong,
    Preview,
    Resync,
    Role,
    RowKind,
    Rows,
    Submit,
    Trace,
    Welcome,
)
from pearl.trace.tracer import Tracer
from pearl.transport.base import Fault, Listener, Peer, TensorChannel
from pearl.worker.admission import MAX_FRONTS, MAX_RECORDINGS, Admission
from pearl.worker.calibrate import calibrate_target
from pearl.worker.draft import LONG
from pearl.worker.execute import TargetExecutor
from pearl.worker.health import DraftHealth
from pearl.worker.notices import Notices
from pearl.worker.rows import are_probabilities, unpack, with_rows

log = logging.getLogger(__name__)

_PROBE_SECONDS = 0.1  # between pings to a draft that is waited for: a dead process's socket refuses them at once
_IDLE_SECONDS = 0.2  # longest sleep of the loop, so that closing is noticed
_CLOCK_PINGS = 8  # where there is a trace: to tell how far the two clocks are apart
_NOBODYS = DraftTokens(-1, 0, 0, ())  # of no request: in place of what has not been looked at
_FRONT_SECONDS = 2.0  # between signs of life to fronts


@dataclass(frozen=True)
class TargetSettings:
    """`vocab_digest`: of the target's tokens; a draft must bring the same. Times in seconds."""

    vocab_size: int
    context: int
    vocab_digest: bytes
    draft_timeout: float
    expects_draft: bool


class TargetWorker:
    """Serves requests until `stopping()`; `ready` is called once, when requests can be served."""

    def __init__(
        self,
        endpoint: Listener,
        executor: TargetExecutor,
        settings: TargetSettings,
        ready: Callable[[], None],
        stopping: Callable[[], bool],
        tracer: Tracer,
        channel: Callable[[], TensorChannel] | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._executor = executor
        self._settings = settings
        self._ready = ready
        self._stopping = stopping
        self._open_channel = channel
        self._channel: TensorChannel | None = None
        self._coordinator = Coordinator()
        self._tracer = tracer
        self._decide = tracer.deciding(self._coordinator)
        self._execute = tracer.computing(executor.execute)
        self._to_record: deque[tuple[Peer, Trace]] = deque()  # fronts' wishes, until there is no request
        self._recorder: Peer | None = None  # the front whose recording is on
        self._recording: tuple[Peer, Trace] | None = None  # the front that waits for our echo, and for which
        self._todo: deque[object] = deque()
        self._fronts: set[Peer] = set()
        self._waiting_fronts: list[Peer] = []  # said hello before we were ready
        self._requests: dict[int, tuple[Peer, int]] = {}  # our number -> front, its number
        self._admission = Admission(self._requests, settings.vocab_size, settings.context)
        self._numbers = count(1)
        self._notices = Notices(log)
        self._watch = Stopwatch()
        self._waiting: tuple[str, float] | None = None  # cause, since
        self._is_ready = False
        self._draft: Peer | None = None
        self._draft_context = 0
        self._health = DraftHealth(settings.draft_timeout)
        self._draft_probed = self._fronts_told = self._looked = 0.0
        self._work = 0  # forwards so far
        self._prefill_pace = 0.0  # seconds a token of the last long forward
        self._failures: dict[int, ForwardError] = {}  # our number -> what ends that request

    def run(self) -> None:
        """The loop. Between any two forwards it looks at its messages."""
        with self._tracer.mailbox(self._endpoint, incoming=self._examined) as self._mail:
            if not self._settings.expects_draft:
                self._become_ready()
            while not self._stopping():
                if self._todo:
                    self._carry_out(self._todo.popleft())
                else:
                    self._record_between_requests()
                    self._receive(self._patience())
                    self._look_after_peers()

    # ---- messages ----

    def _patience(self) -> float:
        return _PROBE_SECONDS if self._waiting and self._coordinator.state is not State.IDLE else _IDLE_SECONDS

    def _examined(self, peer: Peer, message: Message) -> Message:
        """In the mailbox's thread: what can be told of a draft's message by itself. Rows become tensors.

        Only the draft's: a few bytes of anybody else's would be made into a vocabulary for each token.

        Raises `RemoteProtocolError` for what is no token of the model, or no distribution over them.
        """
        if not isinstance(message, DraftTokens):
            return message
        if peer != self._draft:
            return _NOBODYS
        vocab, rows = self._settings.vocab_size, message.rows
        if message.tokens and max(message.tokens) >= vocab:
            raise RemoteProtocolError(f"draft sent token {max(message.tokens)}, the target has ids up to {vocab - 1}")
        found = Rows(rows.kind, tuple(self._executor.bring(unpack(row, vocab)) for row in rows.data))
        return with_rows(message, found, message.waited)

    def _receive(self, timeout: float) -> None:
        for peer, message in self._mail.receive(timeout):
            if peer == self._draft:
                self._health.heard()
            try:
                self._on_message(peer, message)
            except (ProtocolError, TransportError, DraftLost) as error:
                self._on_fault(peer, error)
            except RequestError as error:
                request = message.request if isinstance(message, Submit) else -1
                self._mail.post(Error(request, type(error).__name__, str(error)), peer)

    def _on_message(self, peer: Peer, message: Message | Fault) -> None:
        match message:
            case DraftTokens() if peer == self._draft:  # first, for these come between two forwards
                self._health.drafted()
                self._handle(self._with_rows(message))
                self._health.took(message.seconds, self._coordinator.speeds)
            case ProtocolError() | TransportError():
                raise message
            case Hello() if peer == self._draft or peer in self._fronts:
                pass  # a second time
            case Hello(role=Role.DRAFT):
                self._meet_draft(peer, message)
            case Hello():
                self._meet_front(peer, message)
            case Ping(sent):
                self._mail.post(Pong(sent, time.monotonic_ns()), peer)
            case Pong() if peer == self._draft:
                self._tracer.pong(message)
            case Submit() if peer in self._fronts:
                self._submit(peer, message)
            case Cancel(request) if peer in self._fronts:
                self._cancel(peer, request)
            case Trace() if peer in self._fronts:
                if len(self._to_record) >= MAX_RECORDINGS:
                    raise RemoteProtocolError("too many recordings are asked for: try again later")
                self._to_record.append((peer, message))
            case Trace() if peer == self._draft:
                if self._recording is not None and message == self._recording[1]:  # else it has only just joined
                    self._recorded()
            case Resync() if peer == self._draft:
                self._handle(message)
            case Heartbeat() if peer == self._draft:
                self._on_heartbeat(message)
            case Error(request, "NumericalError", text) if peer == self._draft and request >= 0:
                self._go_on_without_draft(request, text)
            case Error(_, kind, text) if peer == self._draft:
                raise DraftLost(f"the draft failed: {kind}: {text}")
            case DraftTokens() | Resync() | Heartbeat() | Trace() | Pong():
                pass  # from a draft that has been replaced
            case _:
                raise RemoteProtocolError(f"target does not expect {type(message).__name__} from this peer")

    def _on_fault(self, peer: Peer, error: Exception) -> None:
        if peer == self._draft:
            self._lose_draft(str(error))
        elif isinstance(error, TransportError):
            self._lose_front(peer)
        else:
            self._notices.warn(peer, "dropped a message: %s", error)
            self._mail.post(Error(-1, type(error).__name__, str(error)), peer)

    # ---- fronts ----

    def _meet_front(self, peer: Peer, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise RemoteProtocolError(f"front speaks version {hello.version}, this target {PROTOCOL_VERSION}")
        if len(self._fronts) >= MAX_FRONTS:
            raise RequestError(f"{MAX_FRONTS} fronts are attached: try again later")
        self._fronts.add(peer)
        if self._is_ready:
            self._welcome(peer)
        else:
            self._waiting_fronts.append(peer)

    def _welcome(self, peer: Peer) -> None:
        machine, speeds = self._coordinator, self._coordinator.speeds
        window = speeds.best_window() if machine.draft_context else 0
        self._mail.post(self._introduction(speeds.t_draft, speeds.measured, window), peer)

    def _introduction(self, t_draft: float, t_target: tuple[tuple[int, float], ...], window: int) -> Welcome:
        s = self._settings
        return Welcome(
            PROTOCOL_VERSION, s.vocab_size, s.context, self._coordinator.draft_context, t_draft, t_target, window
        )

    def _lose_front(self, peer: Peer) -> None:
        """One that is gone takes its requests with it, and its recording."""
        self._fronts.discard(peer)
        if self._recorder == peer:
            self._recorder = None
            self._to_record.append((peer, Trace(self._tracer.number, False)))
        for number, (owner, _) in list(self._requests.items()):
            if owner == peer:
                log.info("front is gone: cancelling its request")
                del self._requests[number]
                self._todo.append(Cancel(number))

    def _submit(self, peer: Peer, submit: Submit) -> None:
        number = next(self._numbers)
        self._admission.admit(number, peer, submit)
        self._requests[number] = (peer, submit.request)
        self._handle(replace(submit, request=number))

    def _cancel(self, peer: Peer, request: int) -> None:
        for number, owner in list(self._requests.items()):
            if owner == (peer, request):
                self._handle(Cancel(number))

    # ---- the draft ----

    def _meet_draft(self, peer: Peer, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION or hello.vocab_digest != self._settings.vocab_digest:
            why = f"version {hello.version}, vocabulary {hello.vocab_digest.hex()}"
            self._mail.post(Error(-1, "ModelError", f"this draft does not fit the target: {why}"), peer)
            return
        if self._draft is not None:
            self._lose_draft("its successor is here")
        self._draft, self._draft_context = peer, hello.context
        self._endpoint.trust(peer)
        speeds = self._coordinator.speeds
        self._mail.post(self._introduction(speeds.t_draft, speeds.measured, 0), peer)
        if self._is_ready:  # its predecessor was lost; this one sends frames, for a process group cannot be rejoined
            if self._tracer.number:
                self._mail.post(Trace(self._tracer.number, True), peer)
        else:
            if self._open_channel:
                self._channel = self._open_channel()
            calibrate_target(self._executor.runner, speeds)
        self._health.joined()

    def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """The one that says how long a token takes it admits the draft; the first of all makes us ready."""
        if heartbeat.work == "prefill":
            self._health.announced(heartbeat.seconds)
        request = self._coordinator.request
        waits = self._coordinator.state in (State.HELD, State.GATHERING)
        if self._health.stalled(heartbeat.work, waits) and request is not None:
            log.warning("draft and target wait for each other: a message was lost; giving the draft the whole prefix")
            self._handle(Stalled(request=request.request))
        if heartbeat.work == "calibrated":
            self._health.calibrated(heartbeat.seconds)
            self._handle(DraftJoined(self._draft_context, heartbeat.seconds))
            if self._is_ready:
                log.warning("a draft has joined")
            else:
                self._become_ready()
            self._compare_clocks()

    def _become_ready(self) -> None:
        self._is_ready = True
        self._ready()
        for peer in self._waiting_fronts:
            self._welcome(peer)
        self._waiting_fronts.clear()

    def _with_rows(self, message: DraftTokens) -> DraftTokens:
        """Announced rows are received at once, stale ones included, so that the channel stays in step."""
        request = self._coordinator.request
        current = request is not None and request.request == message.request
        if current:
            self._watch.draft_waited = max(self._watch.draft_waited, message.waited)
        if current and self._executor.needs_rows and message.rows.kind is RowKind.NONE:
            assert request is not None
            needs = f"the {request.decoding.rule} rule takes {find(request.decoding.rule).needs.value}"
            raise RemoteProtocolError(f"draft sent tokens alone, and with each {needs}")
        if message.rows.kind is not RowKind.CHANNEL:
            return message
        if self._channel is None:
            raise RemoteProtocolError("draft announced rows on a channel that is not open")
        rows = self._channel.receive(len(message.tokens))
        if not are_probabilities(rows):
            raise RemoteProtocolError("draft sent what is no distribution")
        return replace(message, rows=Rows(RowKind.CHANNEL, tuple(rows)))

    def _lose_draft(self, why: str) -> None:
        """Goes on alone. A draft that still listens ends by what it is told, and its launcher starts a sound one.

        Where this worker is ending too, its draft is not lost: both have been told to end.
        """
        if self._stopping():
            self._draft = None
            return
        log.warning("draft lost: %s; the target goes on alone", why)
        if self._draft is not None:
            self._mail.post(Error(-1, "DraftLost", why), self._draft)
        self._draft = None
        self._watch.draft_lost = True
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._handle(DraftGone(why))
        self._recorded()

    def _go_on_without_draft(self, request: int, why: str) -> None:
        """For this request only: what its model chokes on says nothing of the next one."""
        current = self._coordinator.request
        if current is not None and current.request == request:
            front = self._requests[request][0] if request in self._requests else b""
            self._notices.warn(front, "the draft cannot go on with this request: %s; the target goes on alone", why)
            self._watch.draft_lost = True
        self._handle(DraftGone(why, request))

    # ---- recording ----

    def _record_between_requests(self) -> None:
        """Does what a front has asked for: a recording holds whole requests."""
        if self._to_record and self._recording is None and not self._requests:
            front, trace = self._to_record.popleft()
            try:
                self._record(front, trace)
            except TraceError as error:
                self._mail.post(Error(-1, type(error).__name__, str(error)), front)

    def _record(self, front: Peer, trace: Trace) -> None:
        """Begins or ends a recording; with a new state machine, so that it can be replayed. Raises `TraceError`."""
        if trace.on:
            self._tracer.start(trace.number)
            self._executor.runner.rollback(0)
            self._coordinator = Coordinator(self._coordinator.speeds)
            self._decide = self._tracer.deciding(self._coordinator)
            if self._draft is not None:
                self._handle(DraftJoined(self._draft_context))
            self._recorder = front
        else:
            self._tracer.stop(trace.number)
            self._recorder = self._recorder if self._tracer.number else None
        self._recording = (front, trace)
        if self._draft is not None:
            self._mail.post(trace, self._draft)
            self._compare_clocks()
        else:
            self._recorded()

    def _recorded(self) -> None:
        """Tells the front that asked, now that the draft has done it too, or is no more."""
        if self._recording is not None:
            (front, trace), self._recording = self._recording, None
            self._mail.post(trace, front)

    def _compare_clocks(self) -> None:
        if self._tracer.recorder is not None and self._draft is not None:
            for _ in range(_CLOCK_PINGS):
                self._mail.post(Ping(time.monotonic_ns()), self._draft)

    def _look_after_peers(self) -> None:
        self._looked = now = time.monotonic()
        if self._draft is not None and self._is_ready and self._coordinator.state is not State.IDLE:
            self._probe_draft(now)
        if now - self._fronts_told > _FRONT_SECONDS:
            self._fronts_told = now
            # One that waits for nothing may not be reading; but one whose recording is on must be known to live, and
            # where there are many those that are gone must be found.
            waiting = {owner for owner, _ in self._requests.values()} | ({self._recorder} if self._recorder else set())
            for peer in self._fronts.copy() if len(self._fronts) > MAX_FRONTS // 2 else waiting:
                self._mail.post(Heartbeat(self._work, self._coordinator.state.value, 0), peer)

    def _probe_draft(self, now: float) -> None:
        assert self._draft is not None
        silent = self._health.silent
        if silent > self._settings.draft_timeout:
            self._lose_draft(f"silent for {silent:.1f} s")
        elif silent > _PROBE_SECONDS and now - self._draft_probed > _PROBE_SECONDS:
            self._draft_probed = now
            self._mail.post(Ping(time.monotonic_ns()), self._draft)

    def _send_draft(self, message: Message) -> None:
        if self._draft is not None:
            self._mail.send(message, self._draft)

    # ---- commands ----

    def _handle(self, event: object) -> None:
        self._todo.extend(self._decide(event))

    def _carry_out(self, command: object) -> None:
        now = time.monotonic()
        if self._waiting and not isinstance(command, (Wait, Deliver, End)):
            why, since = self._waiting
            self._watch.waited(why, now - since)
            self._waiting = None
        match command:
            case Send(message):
                self._send_draft(message)
            case Deliver(message):
                self._deliver(message, now)
            case Wait(cause):
                self._waiting = self._waiting or (cause.value, now)
            case End():
                self._end(command)
            case Cancel():
                self._handle(command)
            case _:
                self._compute(command, now)

    def _compute(self, command: object, now: float) -> None:
        if isinstance(command, Open):
            alone = self._settings.expects_draft and not self._coordinator.draft_context
            self._watch = Stopwatch(begun=now, draft_lost=alone)
        if isinstance(command, Forward) and len(command.tokens) > LONG:
            self._announce(len(command.tokens))
        event = self._computed(command)
        seconds = time.monotonic() - now
        self._watch.busy += seconds
        if isinstance(command, Forward):
            self._work += 1
            if len(command.tokens) > LONG:
                self._prefill_pace = seconds / len(command.tokens)
            self._receive(0)  # what came meanwhile counts in the verdict
            if now + seconds - self._looked > _PROBE_SECONDS:
                self._look_after_peers()
        if event is not None:
            self._handle(event)

    def _computed(self, command: object) -> object | None:
        try:
            return self._execute(command)
        except ForwardError as error:
            log.info("%s", error)  # who asked is told; once is enough
            number: int = getattr(command, "request", -1)
            self._failures[number] = error
            return Failed(str(error), request=number)

    def _announce(self, tokens: int) -> None:
        """Tells the fronts that wait how long they may hear nothing."""
        each = self._prefill_pace or self._coordinator.speeds.t_target(LONG) / LONG
        for peer in {owner for owner, _ in self._requests.values()}:
            self._mail.send(Heartbeat(self._work, "prefill", tokens, tokens * each), peer)

    def _deliver(self, message: Message, now: float) -> None:
        assert isinstance(message, (Committed, Preview))
        if isinstance(message, Committed):
            self._watch.committed(len(message.tokens), now)
        owner = self._requests.get(message.request)
        if owner is not None:
            self._mail.post(replace(message, request=owner[1]), owner[0])

    def _end(self, end: End) -> None:
        owner = self._requests.pop(end.request, None)
        failure = self._failures.pop(end.request, None)
        if owner is not None and failure is not None:
            self._mail.post(Error(owner[1], type(failure).__name__, str(failure)), owner[0])
        elif owner is not None:
            speeds = self._coordinator.speeds
            statistics = fold(end.counts, self._watch, speeds, end.prompt_tokens, end.window)
            self._mail.post(Finished(owner[1], end.reason, statistics.to_json()), owner[0])
