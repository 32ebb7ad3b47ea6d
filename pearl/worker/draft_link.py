"""The target worker's connection to its draft.

It turns the draft's messages into events of the protocol, watches the draft's health, and unpacks
its distributions.
"""

import logging
import time
from collections.abc import Callable
from math import inf
from typing import Any

import torch

from pearl.decoding.distribution import AnnouncedRow, PackedRow, are_probabilities
from pearl.errors import DraftLost, RemoteProtocolError
from pearl.execution.target import TargetExecutor
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.events import DraftGone, DraftJoined
from pearl.protocol.messages import (
    PROTOCOL_VERSION,
    DraftTokens,
    Error,
    Heartbeat,
    Hello,
    Message,
    Ping,
    Pong,
    Resync,
    Verdict,
)
from pearl.trace.tracer import Tracer
from pearl.transport.base import Peer, TensorChannel
from pearl.worker.fronts import Post
from pearl.worker.health import DraftHealth
from pearl.worker.settings import TargetSettings

log = logging.getLogger(__name__)

# Between pings to a silent draft. They are worth it, because the socket of a dead process refuses
# them at once.
PROBE_SECONDS = 0.1
_CLOCK_PINGS = 8  # in a trace: they give the offset between the two clocks
# Belongs to no request; it replaces a message that is not examined.
_IGNORED = DraftTokens(-1, 0, 0, ())


class DraftLink:
    """The connected draft; at first there is none.

    Args:
        channel: opens the tensor channel. It is used only for the first draft, because a process
            group cannot be rejoined. None if there is no such channel: distributions then come as
            frames of messages.
        send: sends a message to the draft at once.
        post: lets the mailbox's thread send a message to the draft.
        handle: handles an event of the protocol.
    """

    def __init__(
        self,
        settings: TargetSettings,
        executor: TargetExecutor,
        channel: Callable[[], TensorChannel] | None,
        send: Post,
        post: Post,
        handle: Callable[[object], None],
    ) -> None:
        self._settings = settings
        self._executor = executor
        self._open_channel = channel
        self._send = send
        self._post = post
        self._handle = handle
        self.peer: Peer | None = None
        self.context = 0  # tokens that the draft's model holds
        self.health = DraftHealth(settings.config.draft_timeout)
        self._channel: TensorChannel | None = None
        # Why and when the draft was lost, until it is reported.
        self._loss: tuple[str, float] | None = None
        self._probed = 0.0
        self._sent_ns = 0  # when our last message was sent
        self._answered_ns = 0  # when the last ping that the draft has answered was sent

    # ---- connecting ----

    def fits(self, peer: Peer, hello: Hello) -> bool:
        """Return whether a draft speaks our version and has the target's vocabulary.

        If not, tell the draft why.
        """
        if hello.version != PROTOCOL_VERSION or hello.vocab_digest != self._settings.vocab_digest:
            why = f"version {hello.version}, vocabulary {hello.vocab_digest.hex()}"
            why += ". A draft of another vocabulary needs the target's tokenizer on its host"
            error = Error(-1, "ModelError", f"this draft does not fit the target: {why}")
            self._post(error, peer)
            return False
        return True

    def meet(self, peer: Peer, hello: Hello) -> None:
        self.peer = peer
        self.context = hello.context

    def open_channel(self) -> None:
        if self._open_channel is not None:
            self._channel = self._open_channel()

    def lose(self, why: str) -> None:
        """Give the draft up, and send it the error.

        A draft that is still connected exits when it receives the error; its launcher starts it
        again.
        """
        self._loss = (why, time.monotonic())
        self.post(Error(-1, "DraftLost", why))
        self.close()

    def report_loss(self, until: float = inf) -> None:
        """Log a loss that is not yet logged, if it happened before the time `until`."""
        if self._loss is not None and self._loss[1] < until:
            log.warning("draft lost: %s; the target goes on alone", self._loss[0])
            self._loss = None

    def close(self) -> None:
        self.peer = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def send(self, message: Message) -> None:
        """Send at once, if there is a draft; before a verdict, send the hidden states that go with it."""
        if self.peer is not None:
            self._sent_ns = time.monotonic_ns()
            if isinstance(message, Verdict):
                for states in self._executor.states(message):
                    self._send(states, self.peer)
            self._send(message, self.peer)

    def post(self, message: Message) -> None:
        """Let the mailbox's thread send a message, if there is a draft."""
        if self.peer is not None:
            self._post(message, self.peer)

    # ---- its messages ----

    def receive(
        self, message: DraftTokens | Resync | Heartbeat | Error, coordinator: Coordinator
    ) -> None:
        """Turn a message into events of the protocol, and call `handle` with each event.

        Raises `DraftLost` if the draft is no longer worth waiting for.
        """
        match message:
            case DraftTokens():
                self._receive_tokens(message, coordinator)
            case Resync():
                self._handle(message)
            case Heartbeat():
                self._receive_heartbeat(message, coordinator)
            case Error(request, "NumericalError", text) if request >= 0:
                self._handle(DraftGone(text, request))
            case Error(_, kind, text):
                raise DraftLost(f"the draft failed: {kind}: {text}")

    def _receive_tokens(self, received: DraftTokens, coordinator: Coordinator) -> None:
        self.health.drafted()
        message = self.with_needed_rows(received)
        if message is None:
            return
        # Tokens of a block of n may take n times as long, because they come from a search of n
        # levels, and each level takes one forward of many rows, or many forwards. A forward for n
        # requests may take n times as long, too.
        share = max(1, len(coordinator.running))
        if message.request in coordinator.running:
            share *= coordinator.running[message.request].request.block
        self._handle(message)
        # This comes last, because `took` may raise `DraftLost`, and the tokens are good
        # nevertheless.
        self.health.took(message.request, message.seconds / share, coordinator.speeds)

    def _receive_heartbeat(self, heartbeat: Heartbeat, coordinator: Coordinator) -> None:
        """Handle a heartbeat.

        A heartbeat for the work "calibrated" has the draft's seconds per token, and admits the
        draft.
        """
        if heartbeat.work == "prefill":
            self.health.announced(heartbeat.seconds)
        waiting = list(coordinator.waiting)
        # Over a slow link, the draft may have sent the heartbeat before our last message arrived. Once the draft has
        # answered a later ping, that is ruled out.
        is_news = self._answered_ns > self._sent_ns
        if self.health.stalled(heartbeat.work, bool(waiting) and is_news):
            log.warning(
                "draft and target wait for each other: a message was lost; giving the draft the whole prefix"
            )
            for number in waiting:
                self._handle(Resync(number, coordinator.running[number].epoch))
        if heartbeat.work == "calibrated":
            self._handle(DraftJoined(self.context, heartbeat.seconds))

    def look(self, coordinator: Coordinator, now: float) -> None:
        """Ping a silent draft. Raises `DraftLost` if it has been silent for too long.

        If requests have waited too long for the draft's tokens, go on without it in these requests.
        """
        silent = self.health.silence.seconds
        if silent > self._settings.config.draft_timeout:
            raise DraftLost(f"silent for {silent:.1f} s")
        if silent > PROBE_SECONDS and now - self._probed > PROBE_SECONDS:
            self._probed = now
            self.post(Ping(time.monotonic_ns()))
        for number in self.health.overdue(coordinator.waiting, now):
            self._handle(DraftGone("nothing has come of it for too long", number))

    def answered(self, pong: Pong) -> None:
        self._answered_ns = pong.sent

    def compare_clocks(self, tracer: Tracer) -> None:
        """Send pings that give the clock offset, if a trace is recorded."""
        if tracer.recorder is not None:
            for _ in range(_CLOCK_PINGS):
                self.post(Ping(time.monotonic_ns()))

    # ---- its distributions ----

    def examined(self, peer: Peer, message: Message) -> Message:
        """Check a message of the draft, and make tensors of its distributions.

        If the message comes from a peer that is not the draft, its tokens are ignored. Otherwise
        any peer could fill the memory, because a few bytes can stand for a row of the whole
        vocabulary. This method runs in the mailbox's thread, and waits there for announced rows
        while the loop computes.

        Raises `RemoteProtocolError` for a token id that the target lacks, or a row that is no
        distribution, and `TransportError` if announced rows do not come.
        """
        if not isinstance(message, DraftTokens):
            return message
        if peer != self.peer:
            return _IGNORED
        vocab = self._settings.vocab_size
        tokens = list(message.tokens)
        if message.after is not None:
            tokens.append(message.after[1])
        for seen in message.runners_up:
            tokens += seen.rivals
        largest = max(tokens, default=0)
        if largest >= vocab:
            raise RemoteProtocolError(
                f"draft sent token {largest}, the target has ids up to {vocab - 1}"
            )
        if not message.rows:
            return message
        return message.changed(rows=self._unpacked(message.rows, vocab))

    def _unpacked(self, rows: tuple[Any, ...], vocab: int) -> tuple[Any, ...]:
        """Return the rows as tensors [vocab].

        Rows that the message only announces are received from the channel.
        """
        tensors = list(rows)
        announced = []
        for index, row in enumerate(rows):
            if isinstance(row, PackedRow):
                tensors[index] = row.unpack(vocab)
            elif isinstance(row, AnnouncedRow):
                announced.append(index)
        if announced:
            received = self._receive_announced(len(announced))
            for index, probs in zip(announced, received, strict=True):
                tensors[index] = probs
        return tuple(tensors)

    def with_needed_rows(self, message: DraftTokens) -> DraftTokens | None:
        """Return the message, without its distributions if the request's rule does not need them.

        Return None if this target has not opened the request. Raises `RemoteProtocolError` if the
        rule needs distributions and they are missing.
        """
        needs = self._executor.needs_rows(message.request)
        if needs and not message.rows:
            raise RemoteProtocolError("draft sent tokens without what the rule needs to judge them")
        if needs is None:
            return None
        if message.rows and not needs:
            return message.changed(rows=())
        return message

    def _receive_announced(self, count: int) -> torch.Tensor:
        """Receive `count` announced rows at once, [count, vocab].

        The rows of outdated messages are received too, because the channel delivers rows in the
        order in which they were sent. Raises `RemoteProtocolError` for a row that is no
        distribution, and `TransportError` if the rows do not come.
        """
        channel = self._channel  # the loop may close it at any time
        if channel is None:
            raise RemoteProtocolError("draft announced rows on a channel that is not open")
        rows = channel.receive(count)
        if not are_probabilities(rows):
            raise RemoteProtocolError("draft sent what is no distribution")
        return rows
