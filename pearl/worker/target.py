"""The target worker's loop: messages in, commands carried out, messages out.

The loop sees interfaces only: an endpoint, a runner behind an executor, a coordinator that decides.
`fronts` knows the users' processes ("fronts") and their requests, `draft_link` is the connection to
the draft, and `recording` serves recordings; this module decides what is done when.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from pearl.errors import (
    DraftLost,
    ForwardError,
    ProtocolError,
    RemoteProtocolError,
    RequestError,
    TransportError,
)
from pearl.execution.batched import compute_together
from pearl.execution.target import TargetExecutor
from pearl.models.calibrate import calibrate_target, time_once
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.events import (
    Deliver,
    DraftDropped,
    DraftGone,
    DraftJoined,
    End,
    Failed,
    Forward,
    Forwarded,
    Open,
    Send,
    Wait,
)
from pearl.protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Committed,
    DraftTokens,
    Error,
    Heartbeat,
    Hello,
    Message,
    Ping,
    Pong,
    Preview,
    Resync,
    Role,
    Submit,
    Trace,
    Welcome,
)
from pearl.protocol.scheduler import Batch
from pearl.protocol.speeds import Cores, ForwardTimes, Profile, Speeds
from pearl.trace.tracer import TracedMailbox, TracedVerifier, Tracer
from pearl.transport.base import Fault, Listener, Peer, Received, TensorChannel
from pearl.worker.contention import CoreWait
from pearl.worker.draft import MAX_UNANNOUNCED
from pearl.worker.draft_link import PROBE_SECONDS, DraftLink
from pearl.worker.fronts import Fronts, Post
from pearl.worker.placement import shared_gpus
from pearl.worker.recording import Recordings
from pearl.worker.settings import TargetSettings

log = logging.getLogger(__name__)

_IDLE_SECONDS = 0.2  # longest sleep of the loop, so that closing is noticed
# Delay before a lost draft is reported: a front that ends closes both workers, and the draft may end first.
_LOSS_SECONDS = 0.5
# Share of a forward's usual time on a device during which the draft's tokens are handled.
_HANDLING = 0.8
# Between two checks whether the device is done. A longer nap would lengthen the measured times.
_NAP_SECONDS = 1e-3
_FRONT_SECONDS = 2.0  # between two signs of life to the fronts
_WARN_SECONDS = 10.0  # between two equal log lines about peers and their requests


class TargetWorker:
    """Serves requests until `stopping()` is true.

    Args:
        ready: called once, when requests can be served.
        channel: opens the tensor channel to the draft. None if there is no such channel: dense
            distributions then come as frames of messages.
        profile: known speeds of the pair; None if none are known.
        measured: called with the measured speeds once requests can be served, but only if `profile`
            is None.
    """

    def __init__(
        self,
        endpoint: Listener,
        executor: TargetExecutor,
        settings: TargetSettings,
        ready: Callable[[], None],
        stopping: Callable[[], bool],
        tracer: Tracer,
        channel: Callable[[], TensorChannel] | None = None,
        profile: Profile | None = None,
        measured: Callable[[Profile], None] = lambda profile: None,
    ) -> None:
        self._endpoint = endpoint
        self._executor = executor
        self._settings = settings
        self._tracer = tracer
        self._ready = ready
        self._stopping = stopping
        self._measured = measured if profile is None else None
        speeds = Speeds.of(profile or Profile())
        if executor.head is not None:
            speeds.auto.add_head()
        if executor.spread is not None:
            speeds.auto.add_one_core()
        if shared_gpus(settings.config):  # forwards do not overlap there
            speeds.auto.untimed = "sd"
        self._coordinator = Coordinator(
            TracedVerifier(executor, tracer),
            speeds,
            settings.config.slots,
            executor.runner.capabilities.prompt_piece,
        )
        post: Post = lambda message, peer: self._mail.post(message, peer)  # noqa: E731
        send: Post = lambda message, peer: self._mail.send(message, peer)  # noqa: E731
        self._fronts = Fronts(post, settings)
        self._draft = DraftLink(settings, executor, channel, send, post, self._handle_draft)
        self._recordings = Recordings(tracer, post)
        self._warned: dict[str, float] = {}  # kind of line -> when it was written last
        self._commands: deque[object] = deque()
        self._batch: Batch[Forward] = Batch()
        self._unhandled: list[Received] = []  # messages that wait for the end of a forward
        #: request -> why it cannot be computed: the answer to its next forward
        self._failures: dict[int, ForwardError] = {}
        self._core_waits: dict[int, CoreWait] = {}  # by request, from its prefill on
        self._is_ready = False
        self._reassured = 0.0
        self._looked = 0.0
        # Until when messages are handled during the forward that is running.
        self._computes_until = 0.0
        self._num_forwards = 0
        self._prefill_pace = 0.0  # seconds per token of the last long forward

    def run(self) -> None:
        """Run the loop. Between any two forwards it handles messages."""
        mailbox = TracedMailbox(self._tracer, self._endpoint, incoming=self._draft.examined)
        with mailbox as self._mail:
            try:
                if not self._settings.config.has_draft:
                    self._time_own_cores()
                    self._become_ready()
                while not self._stopping():
                    self._step()
            finally:
                self._draft.close()

    def _step(self) -> None:
        if self._commands:
            self._carry_out(self._commands.popleft())
        elif self._batch.commands:
            waiting = self._coordinator.waiting
            delay = self._batch.delay(waiting, time.monotonic(), self._coordinator.speeds)
            if delay:
                self._receive(delay)
            else:
                self._forward()
        else:
            self._receive(PROBE_SECONDS if self._coordinator.running else _IDLE_SECONDS)
            self._look_after_peers()

    # ---- messages ----

    def _receive(self, timeout: float) -> None:
        self._fronts.flush()
        messages = self._unhandled
        self._unhandled = []
        if messages:
            timeout = 0
        messages += self._mail.receive(timeout)
        for peer, message in messages:
            self._take(peer, message)

    def _meanwhile(self) -> None:
        """While a device computes, send pending messages to fronts and handle the draft's tokens.

        If these tokens were handled after the forward, the device would have to wait. Other
        messages are handled after the forward, because they may change what is being computed or
        recorded.
        """
        self._fronts.flush()
        runner = self._executor.runner
        while not self._unhandled and not runner.is_done():
            seconds_left = self._computes_until - time.monotonic()
            if seconds_left <= 0:
                return
            for peer, message in self._mail.receive(min(seconds_left, _NAP_SECONDS)):
                is_drafted = peer == self._draft.peer and isinstance(message, DraftTokens)
                if is_drafted and not self._unhandled:
                    self._take(peer, message)
                else:
                    self._unhandled.append((peer, message))

    def _take(self, peer: Peer, message: Message | Fault) -> None:
        if peer == self._draft.peer:
            self._draft.health.silence.heard()
        try:
            self.on_message(peer, message)
        except (ProtocolError, TransportError, DraftLost) as error:
            if peer == self._draft.peer:
                self._lose_draft(str(error))
            elif isinstance(error, TransportError):
                self._record(self._recordings.lose(peer))
                self._commands.extend(map(Cancel, self._fronts.lose(peer)))
            else:
                self._warn("dropped a message of a peer: %s", error)
                self._mail.post(Error(-1, type(error).__name__, str(error)), peer)
        except RequestError as error:
            request = message.request if isinstance(message, Submit) else -1
            self._mail.post(Error(request, type(error).__name__, str(error)), peer)

    def on_message(self, peer: Peer, message: Message | Fault) -> None:
        is_draft = peer == self._draft.peer
        is_front = peer in self._fronts
        match message:
            case DraftTokens() if is_draft:  # first, because these delay the next forward
                watch = self._fronts.watch(message.request)
                watch.draft_waited = max(watch.draft_waited, message.waited)
                self._draft.receive(message, self._coordinator)
            case ProtocolError() | TransportError():
                raise message
            case Hello() if is_draft or is_front:
                pass  # repeated
            case Hello(role=Role.DRAFT):
                self._meet_draft(peer, message)
            case Hello():
                self._fronts.meet(peer, message)
                if self._is_ready:
                    self._fronts.welcome(self._introduction)
            case Ping(sent):
                self._mail.post(Pong(sent, time.monotonic_ns()), peer)
            case Pong() if is_draft:
                self._draft.answered(message)
                self._tracer.pong(message)
            case Submit() if is_front:
                self._handle(self._fronts.number(peer, message))
            case Cancel(request) if is_front:
                self._commands.extend(map(Cancel, self._fronts.numbers(peer, request)))
            case Trace() if is_front:
                self._record(self._recordings.ask(peer, message))
            case Trace() if is_draft:
                self._recordings.done(message)
            case Resync() | Heartbeat() | Error() if is_draft:
                self._draft.receive(message, self._coordinator)
            case DraftTokens() | Resync() | Heartbeat() | Trace() | Pong() | Cancel():
                pass  # from a draft that has been replaced, or a front that is gone
            case _:
                raise RemoteProtocolError(
                    f"target does not expect {type(message).__name__} from this peer"
                )

    def _become_ready(self) -> None:
        self._is_ready = True
        self._ready()
        self._fronts.welcome(self._introduction)
        profile = self._coordinator.speeds.profile
        if self._measured is not None and profile.t_draft and profile.t_target:
            self._measured(profile)

    @property
    def _introduction(self) -> Welcome:
        speeds = self._coordinator.speeds
        draft_context = self._coordinator.draft_context
        return Welcome(
            PROTOCOL_VERSION,
            self._settings.vocab_size,
            self._settings.context,
            draft_context,
            speeds.t_draft,
            speeds.target.measured,
            window=speeds.best_window() if draft_context else 0,
        )

    # ---- peers ----

    def _meet_draft(self, peer: Peer, hello: Hello) -> None:
        if not self._draft.fits(peer, hello):
            return
        if self._draft.peer is not None:
            self._lose_draft("its successor is here")
        self._draft.meet(peer, hello)
        self._draft.post(self._introduction)
        if not self._is_ready:
            self._draft.open_channel()
            self._calibrate()
        elif self._tracer.number:
            # The earlier draft was lost. Its successor sends frames, because it cannot rejoin a
            # process group.
            self._draft.post(Trace(self._tracer.number, True))
        self._draft.health.joined()

    def _calibrate(self) -> None:
        """Measure the target's forward times."""
        speeds = self._coordinator.speeds
        is_brief = bool(speeds.target.measured)
        for fed, seconds in calibrate_target(self._executor.runner, brief=is_brief):
            speeds.observe_target(fed, seconds)
        speeds.target.settle()

    def _time_own_cores(self) -> None:
        """Measure forward times briefly, unless they are known.

        Without these times every guess would seem to save time.
        """
        target = self._coordinator.speeds.target
        if not target.measured:
            self._time(target)

    def _time_all_cores(self) -> None:
        """Measure forward times on the draft's cores too, if the target may use them."""
        spread = self._executor.spread
        speeds = self._coordinator.speeds
        times = speeds.on(Cores.ALL)
        if spread is None or times.measured:
            return
        spread(Cores.ALL)
        self._time(times)
        spread(speeds.cores)

    def _time(self, times: ForwardTimes) -> None:
        for fed, seconds in time_once(self._executor.runner):
            times.observe(fed, seconds)
        times.settle()

    def _handle_draft(self, event: object) -> None:
        """Handle an event that `DraftLink` has made from a message of the draft.

        If the event says that a draft has joined, admit the draft.
        """
        self._handle(event)
        if isinstance(event, DraftJoined):
            self._admit_draft(event.seconds)

    def _admit_draft(self, seconds: float) -> None:
        """Begin to serve requests, because a draft is ready.

        If requests are served already, only log that the draft has joined.

        Args:
            seconds: the draft's seconds per token.
        """
        is_news = self._draft.health.calibrated(seconds)
        if not self._is_ready:
            self._time_all_cores()  # now, because the draft is idle
            self._become_ready()
        elif is_news:
            self._draft.report_loss()
            log.warning("a draft has joined")
        self._draft.compare_clocks(self._tracer)

    def _lose_draft(self, why: str) -> None:
        """Go on without the draft.

        If this worker is ending, report no loss, because then the draft is meant to end too.
        """
        if self._stopping():
            self._draft.close()
            return
        self._draft.lose(why)
        self._handle(DraftGone(why))
        self._recordings.done()

    def _look_after_peers(self) -> None:
        self._looked = now = time.monotonic()
        self._draft.report_loss(now - _LOSS_SECONDS)
        if self._draft.peer is not None and self._is_ready and self._coordinator.running:
            try:
                self._draft.look(self._coordinator, now)
            except DraftLost as lost:
                self._lose_draft(str(lost))
        if now - self._reassured > _FRONT_SECONDS:
            self._reassured = now
            heartbeat = Heartbeat(self._num_forwards, self._coordinator.state.value, 0)
            for peer in self._fronts.attached:  # sending shows which fronts are gone
                self._mail.post(heartbeat, peer)

    def _record(self, trace: Trace | None) -> None:
        """Let the draft begin or end its part of a recording, as this worker has just done.

        Args:
            trace: the message for the draft; None: there is nothing to do.
        """
        if trace is None:
            return
        if self._draft.peer is None:
            self._recordings.done()
        self._draft.post(trace)
        self._draft.compare_clocks(self._tracer)

    def _warn(self, text: str, why: object) -> None:
        """Log a warning, but each `text` at most once in 10 seconds, however many faults come."""
        now = time.monotonic()
        if now - self._warned.get(text, -_WARN_SECONDS) >= _WARN_SECONDS:
            self._warned[text] = now
            log.warning(text, why)

    # ---- commands ----

    def _handle(self, event: object) -> None:
        self._commands.extend(self._tracer.decide(self._coordinator, event))

    def _carry_out(self, command: object) -> None:
        match command:
            case Send(message):
                self._fronts.watch(getattr(message, "request", -1)).resume(time.monotonic())
                self._draft.send(message)
            case Deliver(Committed(request, start, tokens) as message):
                details = self._executor.details(request, start, len(tokens))
                if details:
                    message = message.changed(details=details)
                self._fronts.deliver(message)
            case Deliver(Preview() as message):
                self._fronts.deliver(message)
            case Wait(cause, request=request):
                now = time.monotonic()
                self._fronts.watch(request).resume(now)
                self._fronts.watch(request).wait(cause.value, now)
            case DraftDropped(reason):
                self._warn(
                    "the draft cannot go on with this request: %s; the target goes on alone", reason
                )
            case End(request):
                core_wait = self._core_waits.pop(request, None)
                if core_wait is not None:  # else it was cancelled before it began
                    self._fronts.watch(request).core_wait = core_wait.share()
                self._failures.pop(request, None)
                self._fronts.end(command, self._coordinator.speeds)
            case Cancel():
                self._handle(command)
            case Forward():
                self._batch.commands.append(command)
            case _:
                self._prepare(command)

    def _prepare(self, command: object) -> None:
        """Carry out a command that changes what the next forward computes."""
        request = getattr(command, "request", -1)
        if isinstance(command, Open):
            watch = self._fronts.watch(request)
            watch.begun = time.monotonic()
            self._core_waits[request] = CoreWait()
            has_draft = bool(self._coordinator.draft_context)
            watch.draft_lost = self._settings.config.has_draft and not has_draft
        try:
            self._tracer.compute(self._executor.execute, command)
        except ForwardError as error:
            self._failures[request] = error

    def _forward(self) -> None:
        """Compute one forward for all requests that are ready for one."""
        if not self._executor.launches:
            self._fronts.flush()
        commands = self._batch.take()
        began = time.monotonic()
        fed = sum(len(command.tokens) for command in commands)
        for command in commands:
            self._fronts.watch(command.request).resume(began)
        is_long = max(len(command.tokens) for command in commands) > MAX_UNANNOUNCED
        if self._executor.launches:
            self._computes_until = began + _HANDLING * self._coordinator.speeds.t_target(fed)
        if is_long:
            self._announce(fed)
        compute = partial(self._tracer.compute, self._compute)
        events = compute_together(commands, compute, _failed)
        seconds = time.monotonic() - began
        self._num_forwards += 1
        if is_long:
            self._prefill_pace = seconds / fed
        self._receive(0)  # draft tokens that came during the forward are judged with it
        if began + seconds - self._looked > PROBE_SECONDS:
            self._look_after_peers()
        for event in events:
            self._handle(event)

    def _compute(self, commands: Sequence[Forward]) -> Sequence[Forwarded | Failed]:
        for command in commands:
            if command.request in self._failures:
                raise self._failures[command.request]
        return self._executor.forward(commands, self._meanwhile)

    def _announce(self, fed: int) -> None:
        """Tell the waiting fronts how long a forward of `fed` tokens may keep us silent."""
        pace = self._prefill_pace
        if not pace:
            pace = self._coordinator.speeds.t_target(MAX_UNANNOUNCED) / MAX_UNANNOUNCED
        heartbeat = Heartbeat(self._num_forwards, "prefill", fed, fed * pace)
        for peer in self._fronts.waiting:
            self._mail.send(heartbeat, peer)


def _failed(command: Forward, error: ForwardError) -> Failed:
    return Failed(str(error), type(error).__name__, request=command.request)
