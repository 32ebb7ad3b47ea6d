"""The fronts that are attached to a target worker, and whose request is whose. Knows no models and no draft."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import count

from pearl.errors import ForwardError, RemoteProtocolError, RequestError
from pearl.metrics import Statistics
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
from pearl.transport.base import Peer
from pearl.worker.admission import MAX_FRONTS, Admission

log = logging.getLogger(__name__)

Post = Callable[[Message, Peer], None]


class Fronts:
    """Gives each request a number of the worker's own, keeps it until it can begin, and sends what concerns it to the
    front that asked.

    Args:
        post: sends a message to a front.
        vocab_size, context: the target's.
        has_classifier: of stop policy disco.
    """

    def __init__(self, post: Post, vocab_size: int, context: int, has_classifier: bool = False, slots: int = 1) -> None:
        self._post = post
        self._attached: set[Peer] = set()
        self._unwelcomed: list[Peer] = []  # said hello before requests could be served
        self._owners: dict[int, tuple[Peer, int]] = {}  # our number -> front, its number
        self._admission = Admission(self._owners, vocab_size, context, has_classifier, slots)
        self._numbers = count(1)

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._attached

    def meet(self, peer: Peer, hello: Hello) -> None:
        """Attach a front; `welcome` is due. Raises `RemoteProtocolError` or `RequestError` where it is refused."""
        if hello.version != PROTOCOL_VERSION:
            raise RemoteProtocolError(f"front speaks version {hello.version}, this target {PROTOCOL_VERSION}")
        if len(self._attached) >= MAX_FRONTS:
            raise RequestError(f"{MAX_FRONTS} fronts are attached: try again later")
        self._attached.add(peer)
        self._unwelcomed.append(peer)

    def welcome(self, introduction: Callable[[], Message]) -> None:
        """Send the target's introduction to all who have not had it."""
        for peer in self._unwelcomed:
            self._post(introduction(), peer)
        self._unwelcomed.clear()

    def lose(self, peer: Peer) -> list[int]:
        """Forget a front that is gone; return its requests, which nobody waits for."""
        self._attached.discard(peer)
        numbers = [number for number, (owner, _) in self._owners.items() if owner == peer]
        for number in numbers:
            log.info("front is gone: cancelling its request")
            del self._owners[number]
        return numbers

    def number(self, peer: Peer, submit: Submit) -> Submit:
        """A front's request with a number of our own. Raises `RequestError` if it cannot be served."""
        number = next(self._numbers)
        self._admission.admit(number, peer, submit)
        self._owners[number] = (peer, submit.request)
        return submit.changed(request=number, client=f"{peer.hex()[:24]} {submit.client[:32]}")

    def numbers(self, peer: Peer, request: int) -> list[int]:
        """Our numbers of a front's request."""
        return [number for number, owner in self._owners.items() if owner == (peer, request)]

    def owner(self, number: int) -> Peer:
        """The front that asked for a request; empty where it is gone."""
        return self._owners[number][0] if number in self._owners else b""

    def ahead(self, peer: Peer, waiting: Sequence[Submit]) -> int:
        """How many requests come before all of a front's; 0 where one of its own runs. `waiting`: in their order."""
        queued = [self.owner(submit.request) for submit in waiting]
        own = [number for number, (owner, _) in self._owners.items() if owner == peer]
        if not own or len(own) > queued.count(peer):
            return 0
        return len(self._owners) - len(queued) + queued.index(peer)

    @property
    def waiting(self) -> set[Peer]:
        """Those that wait for a text."""
        return {peer for peer, _ in self._owners.values()}

    @property
    def to_reassure(self) -> set[Peer]:
        """Those that must be known to live: who waits for nothing may not be reading; but where there are many, those
        that are gone must be found."""
        return set(self._attached) if len(self._attached) > MAX_FRONTS // 2 else self.waiting

    def deliver(self, message: Committed | Preview) -> None:
        owner = self._owners.get(message.request)
        if owner is not None:
            self._post(message.changed(request=owner[1]), owner[0])

    def end(self, end: End, failure: ForwardError | None, statistics: Callable[[], Statistics]) -> None:
        """Send the last word on a request: why it failed, or how it went."""
        peer, number = self._owners.pop(end.request, (b"", -1))
        if peer and failure is not None:
            self._post(Error(number, type(failure).__name__, str(failure)), peer)
        elif peer:
            self._post(Finished(number, end.reason, statistics().to_json()), peer)
