"""The target worker's loop: messages in, commands carried out, messages out.

It sees interfaces only: an endpoint, a runner behind an executor, a coordinator.  `fronts` knows who asks, `draft_link`
the draft as a peer, `recording` the recordings; here is the order in which things are done, and how long they take.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from pearl.errors import (
    DraftLost,
    ForwardError,
    ProtocolError,
    RemoteProtocolError,
    RequestError,
    TransportError,
)
from pearl.execution.target import TargetExecutor
from pearl.metrics import fold
from pearl.models.calibrate import calibrate_target
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.events import (
    Deliver,
    DraftGone,
    DraftJoined,
    End,
    Failed,
    Forward,
    Hold,
    Open,
    Send,
    Spread,
    Stalled,
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
from pearl.protocol.scheduler import seconds_to_gather
from pearl.protocol.speeds import Profile, Speeds
from pearl.trace.tracer import Tracer
from pearl.transport.base import Fault, Listener, Peer, TensorChannel
from pearl.worker.draft import MOST_UNANNOUNCED
from pearl.worker.draft_link import PROBE_SECONDS, DraftLink, TargetSettings, weigh
from pearl.worker.fronts import Fronts
from pearl.worker.notices import Notices
from pearl.worker.recording import Recordings
from pearl.worker.watches import Watches

log = logging.getLogger(__name__)

_IDLE_SECONDS = 0.2  # longest sleep of the loop, so that closing is noticed
_FRONT_SECONDS = 2.0  # between signs of life to fronts


class TargetWorker:
    """Serves requests until `stopping()`; `ready` is called once, when requests can be served.

    Args:
        channel: opens the tensor channel to the draft; None: dense distributions come as frames.
        profile: what is known of the pair; None: nothing.
        measured: told what has been measured of the pair where nothing was known, once requests can be served.
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
        self._endpoint, self._executor, self._settings, self._tracer = endpoint, executor, settings, tracer
        self._ready, self._stopping = ready, stopping
        self._measured = None if profile else measured
        self._slots = settings.slots
        self._piece = executor.runner.capabilities.prompt_piece
        self._coordinator = Coordinator(Speeds.of(profile) if profile else None, settings.slots, self._piece)
        self._decide = tracer.deciding(self._coordinator)
        self._execute = tracer.computing(executor.execute)
        self._forward_together = tracer.computing(executor.forward)
        self._fronts = Fronts(
            self._post, settings.vocab_size, settings.context, settings.has_classifier, settings.slots
        )
        self._draft = DraftLink(settings, executor, channel)
        self._recordings = Recordings(tracer, self._post, self._renew)
        self._notices = Notices(log)
        self._todo: deque[object] = deque()
        self._forwards: list[Forward] = []  # asked for and not begun: one forward of the model is to do for all
        self._watches = Watches()
        self._failures: dict[int, ForwardError] = {}  # request -> what ends it
        self._is_ready = False
        self._fronts_told = self._looked = 0.0
        self._gather_until = 0.0  # how long others may still join the next forward; 0: nobody has asked
        self._work = 0  # forwards so far
        self._prefill_pace = 0.0  # seconds a token of the last long forward

    def run(self) -> None:
        """The loop. Between any two forwards it looks at its messages."""
        with self._tracer.mailbox(self._endpoint, incoming=self._draft.examined, weigh=weigh) as self._mail:
            self._draft.mail = self._mail
            try:
                self._serve()
            finally:
                self._draft.close()

    def _serve(self) -> None:
        if not self._settings.expects_draft:
            self._become_ready()
        while not self._stopping():
            if self._todo:
                self._carry_out(self._todo.popleft())
            elif self._forwards:
                if not self._gathers():
                    self._forward()
            else:
                self._record_between_requests()
                self._receive(PROBE_SECONDS if self._coordinator.running else _IDLE_SECONDS)
                self._look_after_peers()

    # ---- messages ----

    def _post(self, message: Message, peer: Peer) -> None:
        self._mail.post(message, peer)

    def _receive(self, timeout: float) -> None:
        for peer, message in self._mail.receive(timeout):
            if peer == self._draft.peer:
                self._draft.health.heard()
            try:
                self._on_message(peer, message)
            except (ProtocolError, TransportError, DraftLost) as error:
                self._on_fault(peer, error)
            except RequestError as error:
                request = message.request if isinstance(message, Submit) else -1
                self._post(Error(request, type(error).__name__, str(error)), peer)

    def _on_message(self, peer: Peer, message: Message | Fault) -> None:
        is_draft = peer == self._draft.peer
        match message:
            case DraftTokens() if is_draft:  # first, for these come between two forwards
                self._on_draft_tokens(message)
            case ProtocolError() | TransportError():
                raise message
            case Hello() if is_draft or peer in self._fronts:
                pass  # a second time
            case Hello(role=Role.DRAFT):
                self._meet_draft(peer, message)
            case Hello():
                self._fronts.meet(peer, message)
                self._welcome()
            case Ping(sent):
                self._post(Pong(sent, time.monotonic_ns()), peer)
            case Pong() if is_draft:
                self._tracer.pong(message)
            case Submit() if peer in self._fronts:
                submit = self._fronts.number(peer, message)
                self._watches.submit(submit.request)
                self._handle(submit)
            case Cancel(request) if peer in self._fronts:
                self._todo.extend(map(Cancel, self._fronts.numbers(peer, request)))
            case Trace() if peer in self._fronts:
                self._recordings.wish(peer, message)
                self._begin()  # should it have taken back one that others had to wait for
            case Trace() if is_draft:
                self._recordings.done(message)
            case Resync() if is_draft:
                self._handle(message)
                self._limit_resyncs(message.request)
            case Heartbeat() if is_draft:
                self._on_heartbeat(message)
            case Error(request, "NumericalError", text) if is_draft and request >= 0:
                self._go_on_without_draft(request, text)
            case Error(_, kind, text) if is_draft:
                raise DraftLost(f"the draft failed: {kind}: {text}")
            case DraftTokens() | Resync() | Heartbeat() | Trace() | Pong() | Cancel():
                pass  # from a draft that has been replaced, or a front that is known to be gone already
            case _:
                raise RemoteProtocolError(f"target does not expect {type(message).__name__} from this peer")

    def _on_fault(self, peer: Peer, error: Exception) -> None:
        if peer == self._draft.peer:
            self._lose_draft(str(error))
        elif isinstance(error, TransportError):
            self._recordings.lose(peer)
            self._todo.extend(map(Cancel, self._fronts.lose(peer)))
            self._begin()
        else:
            self._notices.warn(peer, "dropped a message: %s", error)
            self._post(Error(-1, type(error).__name__, str(error)), peer)

    # ---- being ready ----

    def _become_ready(self) -> None:
        self._is_ready = True
        self._ready()
        self._welcome()
        profile = self._coordinator.speeds.profile
        if self._measured is not None and profile.t_draft and profile.t_target:
            self._measured(profile)

    def _welcome(self) -> None:
        """Introduces the engine to the fronts that have not been told, once requests can be served."""
        if self._is_ready:
            speeds = self._coordinator.speeds
            window = speeds.best_window() if self._coordinator.draft_context else 0
            self._fronts.welcome(lambda: self._introduction(window))

    def _introduction(self, window: int) -> Welcome:
        s, speeds, context = self._settings, self._coordinator.speeds, self._coordinator.draft_context
        return Welcome(
            PROTOCOL_VERSION, s.vocab_size, s.context, context, speeds.t_draft, speeds.target.measured, window
        )

    # ---- the draft ----

    def _meet_draft(self, peer: Peer, hello: Hello) -> None:
        if not self._draft.fits(hello):
            self._draft.refuse(peer, hello)
            return
        if self._draft.peer is not None:
            self._lose_draft("its successor is here")
        self._draft.meet(peer, hello)
        self._endpoint.trust(peer)
        self._draft.post(self._introduction(0))
        if self._is_ready:  # its predecessor was lost; this one sends frames, for a process group cannot be rejoined
            if self._tracer.number:
                self._draft.post(Trace(self._tracer.number, True))
        else:
            self._draft.open_channel()
            speeds = self._coordinator.speeds
            for fed, seconds in calibrate_target(self._executor.runner, brief=bool(speeds.target.measured)):
                speeds.observe_target(fed, seconds)
            speeds.target.settle()
        self._draft.health.joined()

    def _on_draft_tokens(self, said: DraftTokens) -> None:
        self._draft.health.drafted(said.request)
        message = self._draft.with_needed_rows(said)
        if message is None:
            return
        self._watches.draft_waited(message.request, message.waited)
        working = self._coordinator.running.get(message.request)
        # A token of a block took a search through as many levels, with forwards of many rows or many forwards.
        levels = 1 if working is None else working.request.block
        self._handle(message)
        self._limit_resyncs(message.request)
        self._draft.health.took(message.request, message.seconds / levels, self._coordinator.speeds)

    def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """The one that says how long a token takes it admits the draft; the first of all makes us ready."""
        if heartbeat.work == "prefill":
            self._draft.health.announced(heartbeat.seconds)
        waiting = self._coordinator.waiting
        neglected = self._draft.health.neglected(waiting)
        if self._draft.health.stalled(heartbeat.work, bool(waiting)):
            log.warning("draft and target wait for each other: a message was lost; giving the draft the whole prefix")
            neglected = list(waiting)
        elif neglected:
            log.warning("the draft goes on without %d that wait for it: a message was lost; likewise", len(neglected))
        for number in neglected:
            self._handle(Stalled(request=number))
        self._limit_resyncs(*neglected)
        if heartbeat.work == "calibrated":
            is_news = self._draft.health.calibrated(heartbeat.seconds)
            self._handle(DraftJoined(self._draft.context, heartbeat.seconds))
            self._limit_resyncs(*self._coordinator.running)
            if not self._is_ready:
                self._become_ready()
            elif is_news:
                log.warning("a draft has joined")
            self._compare_clocks()

    def _limit_resyncs(self, *requests: int) -> None:
        """Each is a whole prefix, that waits here until the draft reads it; one that asks on and on need not read."""
        for number in requests:
            machine = self._coordinator.running.get(number)
            if machine is not None and machine.draft.resyncs_too_often and not machine.draft.is_lost:
                self._go_on_without_draft(number, "it was given the whole prefix too often")

    def _lose_draft(self, why: str) -> None:
        """Goes on alone; unless this worker is ending too, for then its draft has been told to end as well."""
        if self._stopping():
            self._draft.close()
            return
        log.warning("draft lost: %s; the target goes on alone", why)
        self._draft.lose(why)
        self._watches.lose_draft()
        self._handle(DraftGone(why))
        self._recordings.done()

    def _go_on_without_draft(self, request: int, why: str) -> None:
        """For this request only: what its model chokes on says nothing of the next one."""
        if request in self._watches:
            front = self._fronts.owner(request)
            self._notices.warn(front, "the draft cannot go on with this request: %s; the target goes on alone", why)
            self._watches.lose_draft(request)
        self._handle(DraftGone(why, request))

    def _look_after_peers(self) -> None:
        self._looked = now = time.monotonic()
        if self._draft.peer is not None and self._is_ready and self._coordinator.running:
            try:
                self._draft.probe(now)
            except DraftLost as lost:
                self._lose_draft(str(lost))
            for number in self._draft.health.overdue(self._coordinator.waiting, now):
                self._go_on_without_draft(number, "nothing has come of it for too long")
        self._recordings.look(now)
        if now - self._fronts_told > _FRONT_SECONDS:
            self._fronts_told = now
            for peer in self._fronts.to_reassure | self._recordings.fronts:
                ahead = self._fronts.ahead(peer, self._coordinator.scheduler.waiting)
                self._post(Heartbeat(self._work, "queued" if ahead else self._coordinator.state.value, ahead), peer)

    # ---- recording ----

    def _record_between_requests(self) -> None:
        if self._coordinator.running or not self._recordings.are_due:
            return
        trace = self._recordings.begin_or_end()
        if trace is not None and self._draft.peer is not None:
            self._draft.post(trace)
            self._compare_clocks()
        elif trace is not None:
            self._recordings.done()
        self._begin()

    def _renew(self) -> None:
        """Begins anew with an empty cache and a new state machine, that knows of the pair what was known."""
        for slot in range(self._slots):
            self._executor.runner.rollback(0, slot)
        if self._coordinator.speeds.is_spread:
            self._execute(Spread(False))
        waiting = self._coordinator.scheduler.waiting
        self._coordinator = Coordinator(Speeds.of(self._coordinator.speeds.profile), self._slots, self._piece)
        self._decide = self._tracer.deciding(self._coordinator)
        if self._draft.peer is not None:
            self._handle(DraftJoined(self._draft.context))
        for submit in waiting:
            self._handle(submit)

    def _compare_clocks(self) -> None:
        if self._tracer.recorder is not None:
            self._draft.compare_clocks()

    # ---- commands ----

    def _handle(self, event: object) -> None:
        self._todo.extend(self._decide(event))

    def _begin(self) -> None:
        """Begin requests that wait, unless a recording is to begin or end first."""
        if self._coordinator.scheduler.is_held != self._recordings.are_due:
            self._handle(Hold(self._recordings.are_due))

    def _carry_out(self, command: object) -> None:
        now = time.monotonic()
        match command:
            case Send(message):
                self._watches.go_on(getattr(message, "request", -1), now)
                self._draft.send(message)
            case Deliver(Committed() | Preview() as message):
                if isinstance(message, Committed):
                    message = self._committed(message, now)
                self._fronts.deliver(message)
            case Wait(cause, request=request):
                self._watches.wait(request, cause.value, now)
            case End():
                self._end(command)
            case Cancel():
                self._handle(command)
            case Forward():
                self._forwards.append(command)
            case _:
                self._compute(command, getattr(command, "request", -1), now)

    def _committed(self, message: Committed, now: float) -> Committed:
        """What the front is told."""
        self._watches.commit(message.request, len(message.tokens), now)
        logprobs = self._executor.logprobs(message.request, message.start, len(message.tokens))
        return message.changed(logprobs=logprobs) if logprobs else message

    def _compute(self, command: object, request: int, now: float) -> None:
        self._watches.go_on(request, now)
        if isinstance(command, Open):
            alone = self._settings.expects_draft and not self._coordinator.draft_context
            self._watches.open(request, now, draft_lost=alone)
        event = self._computed(command, request)
        self._watches.work([request], time.monotonic() - now)
        if event is not None:
            self._handle(event)

    def _gathers(self) -> bool:
        """Waits a little for requests that wait for their draft, so that one forward does for them too.

        What the draft says of several requests comes of one forward of its own, in a message for each. Whoever misses
        the target's forward waits for a whole one; the wait is never longer than what it can save them, shared by all.
        """
        others = self._watches.waiting - {command.request for command in self._forwards}
        if not others:
            return False
        now, speeds = time.monotonic(), self._coordinator.speeds
        if not self._gather_until:
            self._gather_until = now + seconds_to_gather(len(self._forwards), len(others), speeds)
        if now >= self._gather_until:
            return False
        self._receive(self._gather_until - now)
        return True

    def _forward(self) -> None:
        """One forward for all requests that are ready for one."""
        self._gather_until = 0.0
        commands, self._forwards = self._forwards, []
        now, fed = time.monotonic(), sum(len(command.tokens) for command in commands)
        for command in commands:
            self._watches.go_on(command.request, now)
        is_long = max(len(command.tokens) for command in commands) > MOST_UNANNOUNCED
        if is_long:
            self._announce(fed)
        events = self._forwarded(commands)
        seconds = time.monotonic() - now
        self._watches.work((command.request for command in commands), seconds)
        self._work += 1
        if is_long:
            self._prefill_pace = seconds / fed
        self._receive(0)  # what came meanwhile counts in the verdict
        if now + seconds - self._looked > PROBE_SECONDS:
            self._look_after_peers()
        for event in events:
            self._handle(event)

    def _forwarded(self, commands: Sequence[Forward]) -> Sequence[object]:
        """What answers them. Where they cannot be computed together each is by itself: only what fails alone fails."""
        if len(commands) > 1:
            try:
                return self._forward_together(commands)
            except ForwardError as error:
                log.info("%s; computing %d requests one by one", error, len(commands))
        return [self._computed(command, command.request) for command in commands]

    def _computed(self, command: object, request: int) -> object | None:
        try:
            return self._execute(command)
        except ForwardError as error:
            log.info("%s", error)  # who asked is told; once is enough
            self._failures[request] = error
            return Failed(str(error), request=request)

    def _announce(self, tokens: int) -> None:
        """Tells the fronts that wait how long they may hear nothing."""
        each = self._prefill_pace or self._coordinator.speeds.t_target(MOST_UNANNOUNCED) / MOST_UNANNOUNCED
        for peer in self._fronts.waiting:
            self._mail.send(Heartbeat(self._work, "prefill", tokens, tokens * each), peer)

    def _end(self, end: End) -> None:
        watch = self._watches.end(end.request)
        speeds = self._coordinator.speeds
        self._fronts.end(
            end,
            self._failures.pop(end.request, None),
            lambda: fold(end.counts, watch, speeds, end.prompt_tokens, end.window),
        )
        self._begin()
