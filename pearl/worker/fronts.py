"""The fronts that are attached to a target worker: which requests are whose, their times and their results."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import count

from pearl.errors import ForwardError, RemoteProtocolError, RequestError
from pearl.metrics import Stopwatch, fold
from pearl.models.checkpoints.checkpoint import is_head
from pearl.protocol.events import End
from pearl.protocol.messages import (
    PROTOCOL_VERSION,
    Committed,
    Error,
    Finished,
    Hello,
    Message,
    Preview,
    Submit,
)
from pearl.protocol.speeds import Speeds
from pearl.transport.base import Peer
from pearl.worker.admission import problem
from pearl.worker.settings import TargetSettings

log = logging.getLogger(__name__)

Post = Callable[[Message, Peer], None]
MAX_FRONTS = 256
MAX_REQUESTS = 128  # of one front, running ones included


class Fronts:
    """Gives each request a number of the worker's own, and sends its results to the front that submitted it.

    Args:
        post: sends a message to a front.

    Attributes:
        attached: all of them, busy or not.
    """

    def __init__(self, post: Post, settings: TargetSettings) -> None:
        self._post = post
        self.attached: set[Peer] = set()
        self._unwelcomed: list[Peer] = []  # attached before requests could be served
        self._owners: dict[int, tuple[Peer, int]] = {}  # our number -> front, its number
        self._settings = settings
        self._is_head = is_head(settings.config.draft)
        self._numbers = count(1)
        self._watches: dict[int, Stopwatch] = {}
        self._undelivered: list[Committed | Preview] = []

    def __contains__(self, peer: Peer) -> bool:
        return peer in self.attached

    def meet(self, peer: Peer, hello: Hello) -> None:
        """Attach a front; `welcome` is due. Raises `RemoteProtocolError` or `RequestError` if it is refused."""
        if hello.version != PROTOCOL_VERSION:
            raise RemoteProtocolError(
                f"front speaks version {hello.version}, this target {PROTOCOL_VERSION}"
            )
        if len(self.attached) >= MAX_FRONTS:
            raise RequestError(f"{MAX_FRONTS} fronts are attached: try again later")
        self.attached.add(peer)
        self._unwelcomed.append(peer)

    def welcome(self, introduction: Message) -> None:
        """Send the target's introduction to all fronts that have not received it."""
        for peer in self._unwelcomed:
            self._post(introduction, peer)
        self._unwelcomed.clear()

    def lose(self, peer: Peer) -> list[int]:
        """Forget a front that is gone; return its requests, whose results nobody reads."""
        self.attached.discard(peer)
        numbers = [number for number, (owner, _) in self._owners.items() if owner == peer]
        for number in numbers:
            log.info("front is gone: cancelling its request")
            del self._owners[number]
        return numbers

    def number(self, peer: Peer, submit: Submit) -> Submit:
        """A front's request under a number of our own. Raises `RequestError` if it cannot be served."""
        number = next(self._numbers)
        if why := problem(submit, self._settings, self._is_head):
            raise RequestError(why)
        if sum(owner == peer for owner, _ in self._owners.values()) >= MAX_REQUESTS:
            raise RequestError(f"{MAX_REQUESTS} requests of yours wait already: try again later")
        self._owners[number] = (peer, submit.request)
        self._watches[number] = Stopwatch(time.monotonic())
        return submit.changed(request=number, client=f"{peer.hex()[:24]} {submit.client[:32]}")

    def numbers(self, peer: Peer, request: int) -> list[int]:
        """Our numbers of a front's request."""
        return [number for number, owner in self._owners.items() if owner == (peer, request)]

    def watch(self, request: int) -> Stopwatch:
        """The times of a request; of one that is none, for peers name such ones too, a watch that nobody reads."""
        return self._watches.get(request) or Stopwatch()

    @property
    def held_up(self) -> set[int]:
        """Requests that wait for their draft."""
        return {number for number, watch in self._watches.items() if watch.waiting is not None}

    @property
    def waiting(self) -> set[Peer]:
        """Fronts that wait for a text."""
        return {peer for peer, _ in self._owners.values()}

    def deliver(self, message: Committed | Preview) -> None:
        """Send tokens with the next `flush`."""
        self._undelivered.append(message)

    def flush(self) -> None:
        """Send what `deliver` has taken, in its order."""
        for message in self._undelivered:
            if isinstance(message, Committed):
                self.watch(message.request).committed(len(message.tokens), time.monotonic())
            owner = self._owners.get(message.request)
            if owner is not None:
                self._post(message.changed(request=owner[1]), owner[0])
        self._undelivered.clear()

    def end(self, end: End, failure: ForwardError | None, speeds: Speeds) -> None:
        """Send the last message of a request: why it failed, or its statistics."""
        self.flush()
        peer, number = self._owners.pop(end.request, (b"", -1))
        watch = self._watches.pop(end.request, Stopwatch())
        if peer and failure is not None:
            self._post(Error(number, type(failure).__name__, str(failure)), peer)
        elif peer:
            statistics = fold(end.counts, watch, speeds, end.prompt_tokens, end.window)
            self._post(Finished(number, end.reason, statistics.to_json()), peer)
