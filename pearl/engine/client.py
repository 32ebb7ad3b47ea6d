"""The connection to a running target, shared by all streams of an engine. Launches nothing.

A thread reads the socket, passes what arrives to the streams, and notices a lost target.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from weakref import WeakValueDictionary, ref

from pearl.engine.launcher import Attached, LocalLauncher
from pearl.engine.recording import Recording
from pearl.engine.stream import Stream
from pearl.errors import (
    EngineClosed,
    PearlError,
    StartError,
    TargetLost,
    TraceError,
    TransportError,
    error_named,
)
from pearl.protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Committed,
    Error,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Preview,
    Role,
    Submit,
    Trace,
    Welcome,
)
from pearl.silence import SLACK, Silence
from pearl.transport import connect
from pearl.transport.base import Connection, Received
from pearl.transport.keys import channel_keys

log = logging.getLogger(__name__)

_READ_SECONDS = 0.1  # longest wait, so that a dead target is noticed


class Client:
    """Sends requests, and passes what arrives to their streams. It belongs to the process that made it, not to forks.

    Args:
        address: where the target listens.
        launcher: what launched the target. It is closed by `close`, and when the client and its streams are dropped.

    Attributes:
        numbers: of requests to come.
        lost: why the target cannot be used any more; empty while it can.
    """

    def __init__(self, address: str, launcher: LocalLauncher | Attached) -> None:
        config = launcher.config
        self._launcher = launcher
        self._timeout = config.target_timeout
        self._owner = os.getpid()
        self._changed = threading.Condition(threading.RLock())  # something has arrived, or is over
        self._fault: PearlError | None = None  # of no request: for one of the waiting threads
        self.is_closed = False
        self.numbers = count(1)
        # Weak, so that a stream that its user has dropped is collected, and thereby cancelled.
        self._streams: WeakValueDictionary[int, Stream] = WeakValueDictionary()
        self.lost = ""
        self._silence = Silence(10 * _READ_SECONDS)
        self.welcome: Welcome | None = None
        is_taken = config.trace is not None
        self.recording = Recording(self.post, self.wait_until, launcher.directory, is_taken)
        self.endpoint = connect(address, channel_keys(config.keys))
        self._reader = threading.Thread(
            target=_read, args=(ref(self), self.endpoint), daemon=True, name="pearl-text"
        )

    def meet(self, deadline: float) -> Client:
        """Returns the client once the target has answered.

        Raises `StartError` and closes the client if no answer has come when time.monotonic() reaches `deadline`.
        """
        try:
            self.endpoint.send(Hello(PROTOCOL_VERSION, Role.FRONT, 0, 0))
            self._reader.start()
            self.wait_until(lambda: self.welcome is not None or time.monotonic() > deadline)
            if self.welcome is None:
                raise StartError("the target does not answer; see --log-level debug")
        except BaseException as error:
            self.close()
            if isinstance(error, TargetLost):
                raise StartError(str(error)) from None
            raise
        return self

    def __del__(self) -> None:
        """Closes a client that was dropped.

        At interpreter shutdown it does nothing: threads are frozen then and may hold locks. The workers end by
        themselves, for their stdin closes.
        """
        if not sys.is_finalizing():
            with suppress(Exception):
                self.close()

    def close(self) -> None:
        """Ends the connection and closes the launcher; a second time it does nothing.

        In a forked process it only marks itself closed: the engine is the parent's, and locks may be held by threads
        that do not exist here.
        """
        if self.is_closed:
            return
        if not self._is_ours:
            self.is_closed = True
            return
        with suppress(TargetLost):
            self.recording.stop()
        self.is_closed = True
        self.endpoint.wake()
        if self._reader.is_alive() and self._reader is not threading.current_thread():
            self._reader.join(2 * _READ_SECONDS)  # else it would use a closed socket
        self.endpoint.close()
        self._tell()
        self._launcher.close()

    @property
    def _is_ours(self) -> bool:
        return os.getpid() == self._owner

    def _check_ours(self) -> None:
        if not self._is_ours:
            raise EngineClosed(
                f"this engine belongs to process {self._owner}, of which this one is a fork: make "
                "an engine here, or attach to that one"
            )

    def check_open(self) -> None:
        """Raises `EngineClosed` if this engine is closed, or belongs to the process that this one was forked from."""
        self._check_ours()
        if self.is_closed:
            raise EngineClosed("this engine has been closed; make another")

    # ---- requests ----

    def submit(self, stream: Stream, submit: Submit) -> Stream:
        with self._changed:
            if not self._streams:
                self._fault = None
            self._streams[submit.request] = stream
        self.post(submit)
        return stream

    def forget(self, request: int) -> None:
        """Drops the stream of a request that has ended."""
        if self._is_ours:
            with self._changed:
                self._streams.pop(request, None)
                self._changed.notify_all()

    def cancel(self, request: int) -> None:
        """Cancels a request whose result is no longer wanted; from any thread."""
        self.forget(request)
        if not self.lost:
            with suppress(TargetLost):
                self.post(Cancel(request))

    def post(self, message: Message) -> None:
        """Sends a message, from any thread."""
        if self.is_closed or not self._is_ours:
            return
        try:
            self.endpoint.send(message)
        except TransportError as error:
            self._lose(str(error))
            raise TargetLost(self.lost) from None

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Returns once `is_done`; checked after each message, and ten times a second.

        Raises `TargetLost`, `EngineClosed`, and an error of the target about no particular request.
        """
        self._check_ours()
        with self._changed:
            while not is_done():
                self.check_open()
                if self.lost:
                    raise TargetLost(self.lost)
                if self._fault is not None:
                    fault = self._fault
                    self._fault = None
                    raise fault
                self._changed.wait(_READ_SECONDS)

    # ---- the reading thread ----

    def receive(self, received: Sequence[Received]) -> None:
        """Passes messages to their streams; a silence that is too long during a text, or a dead process, is a loss."""
        if received or not self._streams:
            allowance = 0.0
            for _, message in received:
                if isinstance(message, Heartbeat):
                    allowance = max(allowance, message.seconds * SLACK)
            self._silence.heard(allowance)
        if not received and not (self._launcher.alive and self.endpoint.connected):
            self._lose("the target is gone")
        elif self._silence.seconds > self._timeout:
            self._lose(f"the target has been silent for {self._timeout:.0f} s")
        for _, message in received:
            try:
                self._dispatch(message)
            except PearlError as error:
                if self.welcome is None or self._streams:
                    self._fault = error
                else:
                    log.warning("%s", error)
        self._tell()

    def _lose(self, why: str) -> None:
        """The target cannot be used any more: ends what was launched, even if nobody closes the engine.

        Later callers get the same error, for the target is then dead because it was ended here.
        """
        cause = self._launcher.exit_cause(why)
        self._launcher.lose()
        self.lost = self.lost or f"{cause}; the text ends here. {self._launcher.remedy}"
        self._tell()

    def _tell(self) -> None:
        """Wakes the threads in `wait_until`."""
        with self._changed:
            self._changed.notify_all()

    def _dispatch(self, message: object) -> None:
        match message:
            case Welcome(version) if version != PROTOCOL_VERSION:
                raise StartError(
                    f"the target speaks version {version} of the wire, this side "
                    f"{PROTOCOL_VERSION}: run the same release of PEARL on both sides"
                )
            case Welcome():
                self.welcome = message
            case Heartbeat():
                pass
            case Trace():
                self.recording.answer = message
            case Committed(request) | Preview(request) | Finished(request) | Error(request) if (
                request >= 0
            ):
                stream = self._streams.get(request)
                if stream is not None and not stream.take(message):
                    self._lose("the target's messages have a gap, or come twice")
            case Error(_, "TraceError", text):
                # for the thread that records, not for the one that reads
                self.recording.answer = TraceError(text)
            case Error(_, kind, text):
                raise error_named(kind)(text)
            case Exception():
                self._lose(f"the target sent a malformed message ({message})")
            case _:
                log.warning("the target sent an unexpected %s", type(message).__name__)


def _read(client: ref[Client], endpoint: Connection) -> None:
    """Reads as long as the client is open and something besides this thread refers to it."""
    while True:
        try:
            received = endpoint.receive(_READ_SECONDS)
        except TransportError:  # it was closed
            return
        owner = client()
        if owner is None or owner.is_closed or owner.lost:
            return
        owner.receive(received)
        del owner
