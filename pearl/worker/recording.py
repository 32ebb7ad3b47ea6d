"""Recordings (traces) that a front, a user's process, requests from a target worker."""

from pearl.errors import TraceError
from pearl.protocol.messages import Error, Trace
from pearl.trace.tracer import Tracer
from pearl.transport.base import Peer
from pearl.worker.fronts import Post


class Recordings:
    """Begins and ends recordings, one at a time, for the fronts that ask for them.

    A front gets its answer only after both target and draft have begun or ended its recording.

    Args:
        post: sends a message to a front.
    """

    def __init__(self, tracer: Tracer, post: Post) -> None:
        self._tracer = tracer
        self._post = post
        # Fronts to be told once the draft has done the same.
        self._waiting: list[tuple[Peer, Trace]] = []
        self._recorder: Peer | None = None  # the front whose recording is running

    def ask(self, peer: Peer, trace: Trace) -> Trace | None:
        """Begin or end a recording for a front.

        Return the message to pass on to the draft. If this worker could not begin or end the
        recording, tell the front why, and return None.
        """
        try:
            if trace.on:
                self._tracer.start(trace.number)
                self._recorder = peer
            else:
                self._end(trace.number)
        except TraceError as error:
            self._post(Error(-1, type(error).__name__, str(error)), peer)
            return None
        self._waiting.append((peer, trace))
        return trace

    def lose(self, peer: Peer) -> Trace | None:
        """Forget a front that is gone, and end its recording.

        Return the message for the draft; None if the front was not recording.
        """
        self._waiting = [(front, trace) for front, trace in self._waiting if front != peer]
        if self._recorder != peer:
            return None
        ended = Trace(self._tracer.number, False)
        self._end(ended.number)
        return ended

    def _end(self, number: int) -> None:
        self._tracer.stop(number)
        if not self._tracer.number:
            self._recorder = None

    def done(self, echo: Trace | None = None) -> None:
        """Tell waiting fronts that their recording has begun or ended.

        Args:
            echo: the message that the draft has confirmed; only the front that asked for it is
                told. None: the draft is gone, so that all waiting fronts are told.
        """
        waiting = self._waiting
        self._waiting = []
        for peer, trace in waiting:
            if echo in (None, trace):
                self._post(trace, peer)
            else:
                self._waiting.append((peer, trace))
