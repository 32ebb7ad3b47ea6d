"""The connection to a running target, shared by all streams of an engine. Launches nothing.

Nothing runs in the background: a thread that waits for a message reads the socket for all who wait.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from weakref import WeakValueDictionary

from pearl.engine.launcher import Launcher
from pearl.engine.recording import Recording, logged_not_raised
from pearl.engine.stream import Stream
from pearl.errors import EngineClosed, PearlError, StartError, TargetLost, TraceError, TransportError, error_named
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
from pearl.transport.keys import channel_keys

log = logging.getLogger(__name__)

_READ_SECONDS = 0.1  # longest wait at the socket, so that a dead target is noticed


class Client:
    """Sends requests, and passes what arrives to their streams. It belongs to the process that made it, not to forks.

    Args:
        address: where the target listens.
        launcher: of the target. `close` closes it too, and so does dropping the client and its streams.

    Attributes:
        ahead: requests of other clients that come before ours, as last reported.
        trace_errors: why no trace was written at the end.
    """

    def __init__(self, address: str, launcher: Launcher) -> None:
        self._launcher, self._timeout = launcher, launcher.config.target_timeout
        self._owner = os.getpid()
        self._turns = threading.Condition(threading.RLock())  # threads that wait to read the socket
        self._is_reading = self.is_closed = False
        self._numbers = count(1)
        # Weak, so that a stream that its user has dropped is collected, and thereby cancelled.
        self._streams: WeakValueDictionary[int, Stream] = WeakValueDictionary()
        self._lost_because = ""
        self._silence = Silence(10 * _READ_SECONDS)
        self.ahead = 0
        self.welcome: Welcome | None = None
        self.trace_errors: list[PearlError] = []
        self.recording = Recording(self, launcher.directory, is_taken=launcher.config.trace is not None)
        self.endpoint = connect(address, channel_keys(launcher.config.keys, launcher.directory))

    def meet(self, deadline: float) -> None:
        """Returns once the target has answered. `deadline`: of time.monotonic(). Raises `StartError`."""
        self._silence.heard()
        self.endpoint.send(Hello(PROTOCOL_VERSION, Role.FRONT, 0, 0))
        try:
            self.read_until(lambda: self.welcome is not None or time.monotonic() > deadline)
        except TargetLost as error:
            raise StartError(str(error)) from None
        if self.welcome is None:
            raise StartError("the target does not answer; see --log-level debug")

    def __del__(self) -> None:
        """For a client dropped unclosed.

        Not at interpreter shutdown: threads are frozen then and may hold locks. The workers end by themselves, for
        their stdin closes.
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
        if self.recording.is_active:
            with logged_not_raised() as self.trace_errors:
                self.recording.stop()
        self.is_closed = True
        with self._turns:  # else a reader would use a closed socket
            self._turns.wait_for(lambda: not self._is_reading, 2 * _READ_SECONDS)
        self.endpoint.close()
        self._launcher.close()

    @property
    def _is_ours(self) -> bool:
        return os.getpid() == self._owner

    def _check_ours(self) -> None:
        if not self._is_ours:
            raise EngineClosed(
                f"this engine belongs to process {self._owner}, of which this one is a fork: make an engine here, or "
                "attach to that one"
            )

    def check_open(self) -> None:
        """Raises `EngineClosed` if this engine is closed, or belongs to the process that this one was forked from."""
        self._check_ours()
        if self.is_closed:
            raise EngineClosed("this engine has been closed; make another")

    # ---- requests ----

    def next_number(self) -> int:
        return next(self._numbers)

    def submit(self, stream: Stream, submit: Submit) -> Stream:
        self.wait_to_send()
        if not self._streams:
            self._silence.heard()
        self._streams[submit.request] = stream
        self.post(submit)
        return stream

    def wait_to_send(self) -> None:
        """Returns once a request may be sent: a target drops all messages of a peer that exceeds its limit."""
        while (seconds := self.endpoint.seconds_to_wait) and not self.is_closed:
            time.sleep(min(seconds, _READ_SECONDS))

    def next_message(self, stream: Stream) -> object | None:
        """The next message of `stream`, None once it is closed. Meanwhile this may read the socket, for all streams."""
        self.read_until(lambda: stream.is_ready)
        return stream.inbox.popleft() if stream.is_open else None

    def forget(self, request: int) -> None:
        """The request has ended."""
        self._streams.pop(request, None)

    def cancel(self, request: int) -> None:
        """The result is no longer wanted. From any thread."""
        self.forget(request)
        try:
            self.post(Cancel(request))
        except TargetLost:
            log.debug("could not cancel request %d: the target is gone", request)

    # ---- the socket, shared by all streams ----

    def post(self, message: Message) -> None:
        """Sends, from any thread."""
        if self.is_closed or not self._is_ours:
            return
        try:
            self.endpoint.send(message)
            self.endpoint.wake()  # a thread may wait for a text that this message ends
        except TransportError as error:
            raise self._lost(self._launcher.exit_cause(str(error))) from None

    def wake(self) -> None:
        """Makes a thread in `wait_for` check its condition again. From any thread."""
        if not self.is_closed and self._is_ours:
            self.endpoint.wake()

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Reads for all streams until `is_done`; checked after each message, on `wake`, and ten times a second.

        For one thread that reads for several streams; without any, the target's silence means nothing. Raises
        `TargetLost`, `EngineClosed`.
        """

        def is_over() -> bool:
            if not self._streams:
                self._silence.heard()
            return is_done()

        self.read_until(is_over)

    def read_until(self, is_done: Callable[[], bool]) -> None:
        """Returns once `is_done`. Of several waiting threads one reads, and the others check after each read."""
        self._check_ours()
        while not is_done():
            with self._turns:
                if self._is_reading:
                    self._turns.wait(_READ_SECONDS)
                    continue
                self._is_reading = True
            try:
                self._read()
            finally:
                with self._turns:
                    self._is_reading = False
                    self._turns.notify_all()

    def _read(self) -> None:
        self.check_open()
        if self._lost_because:
            raise TargetLost(self._lost_because)
        received = self.endpoint.receive(_READ_SECONDS)
        if received:
            self._silence.heard(max(m.seconds * SLACK if isinstance(m, Heartbeat) else 0.0 for _, m in received))
        elif not self._launcher.alive(self.endpoint.connected):
            raise self._lost(self._launcher.exit_cause("the target is gone"))
        elif self._silence.seconds > self._timeout:
            raise self._lost(f"the target has been silent for {self._timeout:.0f} s")
        for _, message in received:
            self._dispatch(message)

    def _lost(self, why: str) -> TargetLost:
        """The target cannot be used any more: ends what was launched, even if nobody closes the engine.

        Later callers get the same error, for the target is then dead because it was ended here.
        """
        with self._turns:
            self._lost_because = self._lost_because or f"{why}; the text ends here. {self._launcher.remedy}"
        self._launcher.lose()
        return TargetLost(self._lost_because)

    def _dispatch(self, message: object) -> None:
        match message:
            case Welcome(version) if version != PROTOCOL_VERSION:
                raise StartError(
                    f"the target speaks version {version} of the wire, this side {PROTOCOL_VERSION}: "
                    "run the same release of PEARL on both sides"
                )
            case Welcome():
                self.welcome = message
            case Heartbeat():
                self.ahead = message.tokens if message.work == "queued" else 0
            case Trace():
                self.recording.answer = message
            case Committed(request) | Preview(request) | Finished(request) | Error(request) if request >= 0:
                stream = self._streams.get(request)
                if stream is not None and not stream.take(message):
                    raise self._lost("the target's messages have a gap, or come twice")
            case Error(_, "TraceError", text):  # for the thread that records, not for the one that reads
                self.recording.answer = TraceError(text)
            case Error(_, kind, text):
                if kind == "RemoteProtocolError":  # the target has dropped that message and later ones unread
                    for stream in [each for each in self._streams.values() if not each.has_begun]:
                        stream.take(Error(stream.request, kind, text))
                raise error_named(kind)(text)
            case Exception():
                raise self._lost(f"the target sent a malformed message ({message})")
            case _:
                log.warning("the target sent an unexpected %s", type(message).__name__)
