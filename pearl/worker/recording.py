"""Recordings that fronts ask a target worker for: one at a time, each of whole requests."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from pearl.errors import RemoteProtocolError, TraceError
from pearl.protocol.messages import Error, Trace
from pearl.trace.tracer import Tracer
from pearl.transport.base import Peer
from pearl.worker.admission import MAX_RECORDINGS
from pearl.worker.fronts import Post

log = logging.getLogger(__name__)

_ECHO_SECONDS = 60.0  # a draft answers between two forwards


class Recordings:
    """Keeps what fronts wish, until no request is being worked on, and tells them once both workers have done it.

    Args:
        post: sends a message to a front.
        renew: called when a recording begins: the state machine that it is of must be new, so that it can be replayed.
    """

    def __init__(self, tracer: Tracer, post: Post, renew: Callable[[], None]) -> None:
        self._tracer, self._post, self._renew = tracer, post, renew
        self._wishes: deque[tuple[Peer, Trace]] = deque()
        self._asked: tuple[Peer, Trace] | None = None  # who waits for our echo, and of what
        self._since = 0.0  # of time.monotonic(), when the draft was asked for its own
        self.recorder: Peer | None = None  # the front whose recording is on

    def wish(self, peer: Peer, trace: Trace) -> None:
        """Raises `RemoteProtocolError` where too many wait. The end of one that has not begun takes that back."""
        if (begin := (peer, trace.changed(on=True))) in self._wishes and not trace.on:
            self._wishes.remove(begin)
            return
        if len(self._wishes) >= MAX_RECORDINGS:
            raise RemoteProtocolError("too many recordings are asked for: try again later")
        self._wishes.append((peer, trace))

    def lose(self, peer: Peer) -> None:
        """A front that is gone takes its recording with it, and its wishes."""
        self._wishes = deque(wish for wish in self._wishes if wish[0] != peer)
        if self.recorder == peer:
            self.recorder = None
            self._wishes.append((peer, Trace(self._tracer.number, False)))

    @property
    def are_due(self) -> bool:
        """Whether the next request must wait until those that are being worked on have ended, and a wish is done."""
        return bool(self._wishes) and self._asked is None

    @property
    def fronts(self) -> set[Peer]:
        """Those that must be known to live: their recording is on, or they wait for its begin or end."""
        asked = [self._asked] if self._asked is not None else []
        return {peer for peer, _ in [*self._wishes, *asked]} | ({self.recorder} if self.recorder else set())

    def begin_or_end(self) -> Trace | None:
        """Between two requests: do what was wished first; return what the draft is to do likewise."""
        if not self._wishes or self._asked is not None:
            return None
        peer, trace = self._wishes.popleft()
        try:
            if trace.on:
                self._tracer.start(trace.number)
                self._renew()
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
        """Go on without a draft that does not answer, though it lives: else no recording would begin or end again."""
        if self._asked is not None and now - self._since > _ECHO_SECONDS:
            log.warning("the draft does not say that it has begun or ended its part of a recording: going on without")
            self.done()

    def done(self, echo: Trace | None = None) -> None:
        """Tell the front that asked, now that the draft has done it too (its `echo`), or is no more (None)."""
        if self._asked is None or (echo is not None and echo != self._asked[1]):  # a draft may only just have joined
            return
        (peer, trace), self._asked = self._asked, None
        self._post(trace, peer)
