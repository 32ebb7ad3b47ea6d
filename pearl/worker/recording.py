"""Recordings that fronts request of a target worker: one at a time, each of whole requests."""

from __future__ import annotations

import logging
import time
from collections import deque

from pearl.errors import RemoteProtocolError, TraceError
from pearl.protocol.messages import Error, Trace
from pearl.trace.tracer import Tracer
from pearl.transport.base import Peer
from pearl.worker.admission import MAX_RECORDINGS
from pearl.worker.fronts import Post

log = logging.getLogger(__name__)

_ECHO_SECONDS = 60.0  # longest wait for a draft, which answers between two forwards


class Recordings:
    """Begins and ends recordings between two requests, and tells the fronts once both workers have done it.

    Args:
        post: sends a message to a front.
    """

    def __init__(self, tracer: Tracer, post: Post) -> None:
        self._tracer, self._post = tracer, post
        self._wishes: deque[tuple[Peer, Trace]] = deque()
        self._asked: tuple[Peer, Trace] | None = None  # the front that waits for our echo
        self._since = 0.0  # when the draft was asked for its part
        self.recorder: Peer | None = None  # the front whose recording is running

    def wish(self, peer: Peer, trace: Trace) -> None:
        """A front requests to begin or end a recording; ending one that has not begun withdraws it.

        Raises `RemoteProtocolError` if too many wait.
        """
        if (begin := (peer, trace.changed(on=True))) in self._wishes and not trace.on:
            self._wishes.remove(begin)
            return
        if len(self._wishes) >= MAX_RECORDINGS:
            raise RemoteProtocolError("too many recordings are asked for: try again later")
        self._wishes.append((peer, trace))

    def lose(self, peer: Peer) -> None:
        """A front is gone: end its recording, and drop its requests for others."""
        self._wishes = deque(wish for wish in self._wishes if wish[0] != peer)
        if self.recorder == peer:
            self.recorder = None
            self._wishes.append((peer, Trace(self._tracer.number, False)))

    @property
    def are_due(self) -> bool:
        """Whether no request may begin until the running ones have ended and a recording has begun or ended."""
        return bool(self._wishes) and self._asked is None

    @property
    def fronts(self) -> set[Peer]:
        """Fronts with a running recording, or one that waits to begin or end."""
        asked = [self._asked] if self._asked is not None else []
        return {peer for peer, _ in [*self._wishes, *asked]} | ({self.recorder} if self.recorder else set())

    def begin_or_end(self) -> Trace | None:
        """Between two requests: begin or end what was requested first; return the message for the draft."""
        if not self._wishes or self._asked is not None:
            return None
        peer, trace = self._wishes.popleft()
        try:
            if trace.on:
                self._tracer.start(trace.number)
                self.recorder = peer
            else:
                self._tracer.stop(trace.number)
                self.recorder = self.recorder if self._tracer.number else None
        except TraceError as error:
            self._post(Error(-1, type(error).__name__, str(error)), peer)
            return None
        self._asked, self._since = (peer, trace), time.monotonic()
        return trace

    def look(self, now: float) -> None:
        """Go on without a draft that does not answer: else no recording would begin or end again."""
        if self._asked is not None and now - self._since > _ECHO_SECONDS:
            log.warning("the draft does not confirm the begin or end of its part of a recording: going on without it")
            self.done()

    def done(self, echo: Trace | None = None) -> None:
        """Tell the front that requested it, now that the draft has confirmed (`echo`) or is gone (None)."""
        if self._asked is None or (
            echo is not None and echo != self._asked[1]
        ):  # a draft that has just joined may confirm another
            return
        (peer, trace), self._asked = self._asked, None
        self._post(trace, peer)
