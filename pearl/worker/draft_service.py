"""A draft worker as a service: other engines connect to it, and it drafts for their targets.

The requests of all these targets share the draft's slots.  A draft never decides anything about a text, so an engine
that leaves, hangs or lies costs the others nothing but the slots of its requests.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pearl.errors import ProtocolError, RemoteProtocolError, TransportError
from pearl.execution.draft import DraftExecutor
from pearl.protocol.messages import (
    PROTOCOL_VERSION,
    Begin,
    Error,
    Finish,
    Heartbeat,
    Hello,
    Message,
    Outcomes,
    Ping,
    Pong,
    Resync,
    Role,
    Verdict,
)
from pearl.protocol.outside import REFUSED, can_serve
from pearl.trace.tracer import Tracer
from pearl.transport.base import Fault, Listener, Peer
from pearl.worker.draft import DraftWorker
from pearl.worker.draft_rows import RowPacker

log = logging.getLogger(__name__)

# A new request may take the slot of a request that has been silent for this time: its engine has preempted it, hangs or
# is gone.
_ABANDONED_SECONDS = 2.0
_HEARTBEAT_SECONDS = 0.5

Event = Begin | Verdict | Finish
# Bytes of the digest of the first `size` ids of the draft's vocabulary.
Digest = Callable[[int], bytes]


@dataclass
class _Served:
    """A request that has a slot.

    Attributes:
        peer: the engine that the request belongs to.
        heard: when this engine last sent something about the request.
    """

    peer: Peer
    heard: float = field(default_factory=time.monotonic)


class DraftService(DraftWorker):
    """Drafts for every engine that connects, until `stopping()` is true.

    Args:
        hello: introduces the draft; `vocab_size` and `vocab_digest` are those of the draft's tokenizer.
        digest: digest(n) is the digest of the first n ids of the draft's vocabulary. If an engine's
            vocabulary has n ids, its digest must be equal to digest(n).
        executor: computes the drafts.
        slots: how many requests are drafted for at the same time; further requests are refused for
            now.
        computes, piece: see `DraftWorker`.
    """

    def __init__(
        self,
        endpoint: Listener,
        hello: Hello,
        digest: Digest,
        executor: DraftExecutor,
        ready: Callable[[], None],
        stopping: Callable[[], bool],
        tracer: Tracer,
        slots: int,
        computes: Callable[[], None] = lambda: None,
        piece: int = 1,
    ) -> None:
        super().__init__(
            endpoint,
            hello,
            lambda welcome: (executor, RowPacker()),
            ready,
            stopping,
            _HEARTBEAT_SECONDS,
            tracer,
            slots=slots,
            computes=computes,
            piece=piece,
        )
        self._digest = digest
        self._service = executor
        self._slots = slots
        self._seconds = 0.0  # of a token
        self._peers: dict[Peer, str] = {}  # with their names
        self.served: dict[int, _Served] = {}  # by request

    # ---- connections ----

    def _greet(self) -> None:
        """Measure the draft's speed, and report that the service is ready for engines."""
        self._seconds = self._prepare(self._service, RowPacker(), is_brief=False)
        self._ready()

    def on_message(self, peer: Peer, message: Message | Fault) -> None:
        is_known = peer in self._peers
        match message:
            case Hello():
                self._meet_engine(peer, message)
            case Outcomes(finishes, begins, verdicts) if is_known:
                events: list[Event] = [*finishes, *begins, *verdicts]
                for event in events:
                    self._take(peer, event)
            case Ping(sent):
                self._mail.post(Pong(sent, time.monotonic_ns()), peer)
            case Error(_, kind, text):
                self._part_from(peer, f"{kind}: {text}")
            case ProtocolError() | TransportError():
                self._part_from(peer, str(message))
            case _:
                self._refuse(peer, f"a draft service does not expect {type(message).__name__}")

    def _meet_engine(self, peer: Peer, hello: Hello) -> None:
        name = hello.name or "an engine"
        problem = self._misfit(hello)
        if problem:
            log.warning("%s is refused: %s", name, problem)
            self._refuse(peer, problem, kind="ModelError")
            return
        if not hello.vocab_size:
            log.warning(
                "%s has not told its vocabulary: taking its token ids for the draft's", name
            )
        log.info("%s has connected", name)
        self._peers[peer] = name
        self._mail.send(self._hello, peer)
        self._mail.send(Heartbeat(self._num_forwards, "calibrated", 1, self._seconds), peer)

    def _misfit(self, hello: Hello) -> str:
        """Return why the draft cannot serve this engine; "" if `hello` shows no reason."""
        if hello.version != PROTOCOL_VERSION:
            return f"it speaks version {hello.version} of the wire, this draft {PROTOCOL_VERSION}"
        if hello.role is not Role.TARGET:
            return f"a draft service serves targets in other engines, not a {hello.role.value}"
        is_checked = 0 < hello.vocab_size <= self._hello.vocab_size
        if is_checked and self._digest(hello.vocab_size) != hello.vocab_digest:
            return (
                f"its target's first {hello.vocab_size:,} tokens are others than the draft's. Choose a draft of the "
                "target's family, or start the service with --target NAME, whose tokenizer it then translates"
            )
        return ""

    def _refuse(self, peer: Peer, problem: str, kind: str = "RemoteProtocolError") -> None:
        self._mail.send(Error(-1, kind, problem), peer)
        self._part_from(peer, problem)

    def _part_from(self, peer: Peer, why: str) -> None:
        """Forget an engine that is gone or broke the protocol, and release its requests."""
        name = self._peers.pop(peer, None)
        if name is None:
            return
        log.info("%s is gone: %s", name, why)
        for request, served in list(self.served.items()):
            if served.peer == peer:
                self._release(request)

    def _send(self, message: Message) -> None:
        """Send a message to the engine of its request, or to all engines if it names no request."""
        request = getattr(message, "request", None)
        if request is None:
            for peer in self._peers:
                self._mail.post(message, peer)
            return
        served = self.served.get(request)
        if served is None:
            return  # released while its forward ran
        self._mail.send(message, served.peer)
        if isinstance(message, Error):  # nothing more is drafted for this request
            del self.served[request]
            self._waited_before.pop(request, None)

    # ---- requests ----

    def _take(self, peer: Peer, event: Event) -> None:
        """Handle an engine's event, if its request belongs to the engine and has a slot.

        The request of a `Begin` gets a slot here, or is refused. If the request of a verdict has no
        slot, the engine is asked to begin anew.
        """
        request = event.request
        served = self.served.get(request)
        is_own = served is not None and served.peer == peer
        if isinstance(event, Begin):
            problem = self._problem(peer, event)
            if problem:
                self._mail.send(Error(request, REFUSED, problem), peer)
                return
            self.served[request] = _Served(peer)
        elif not is_own:
            if isinstance(event, Verdict):
                self._mail.send(Resync(request, event.epoch), peer)
            return
        elif isinstance(event, Finish):
            del self.served[request]
        else:
            self.served[request] = _Served(peer)
        try:
            self._handle(event)
        except RemoteProtocolError as error:
            self._refuse(peer, str(error))

    def _problem(self, peer: Peer, begin: Begin) -> str:
        """Return why a request cannot have a slot; "" if it can."""
        if not can_serve(begin.options):
            return "a draft service drafts greedily, by unchanged logits"
        if len(begin.tokens) >= self._hello.context:
            return f"{len(begin.tokens)} tokens do not fit the draft's context of {self._hello.context}"
        served = self.served.get(begin.request)
        if served is not None:
            return "" if served.peer == peer else "another connection has begun this request"
        if len(self.served) >= self._slots:
            self._free_abandoned()
        if len(self.served) >= self._slots:
            return f"all {self._slots} slots are in use: see --slots"
        return ""

    def _free_abandoned(self) -> None:
        """Free the slot of the request that was silent longest, if it counts as abandoned."""
        request = min(self.served, key=lambda number: self.served[number].heard)
        if time.monotonic() - self.served[request].heard > _ABANDONED_SECONDS:
            self._release(request)

    def _release(self, request: int) -> None:
        del self.served[request]
        self._handle(Finish(request))
