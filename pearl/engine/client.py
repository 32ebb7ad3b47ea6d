"""The connection from the user's process to a running target, shared by all streams of an engine.

A thread reads the socket, passes messages to the streams, and notices when the target is lost.
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

_READ_SECONDS = 0.1  # longest wait for a message before checking that the target is alive


class Client:
    """Sends requests to the target, and passes the target's messages to the requests' streams.

    A client can be used only in the process that made it, not in a fork of that process.

    Args:
        address: where the target listens.
        launcher: what launched the target. Closing the client closes the launcher too. A client is
            closed by `close`, or once neither the client nor one of its streams is referenced.

    Attributes:
        numbers: yields the numbers of new requests.
        streams: the streams of running requests, by number.
        lost: why the target can no longer be used; empty while it can be used.
        welcome: the target's answer to the greeting; None before it has come.
    """

    def __init__(self, address: str, launcher: LocalLauncher | Attached) -> None:
        config = launcher.config
        self._launcher = launcher
        self._timeout = config.target_timeout
        self._owner = os.getpid()
        # Notified when a message has arrived, and when a stream or the client has ended.
        self._changed = threading.Condition(threading.RLock())
        # An error of the target that concerns no particular request; one waiting thread raises it.
        self._fault: PearlError | None = None
        self.is_closed = False
        self.numbers = count(1)
        # Weak references, so that a stream that its user drops is garbage-collected, which cancels
        # its request.
        self.streams: WeakValueDictionary[int, Stream] = WeakValueDictionary()
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
        """Greet the target, wait for its answer, and return this client.

        If no answer comes before `deadline`, a time of time.monotonic(), close the client and raise
        `StartError`.
        """
        try:
            self.endpoint.send(Hello(PROTOCOL_VERSION, Role.FRONT, 0, 0))
            self._reader.start()
            self.wait_until(lambda: self.welcome is not None or time.monotonic() > deadline)
            if self.welcome is None:
                raise StartError(
                    "the target does not answer within startup_timeout; see --log-level debug"
                )
        except BaseException as error:
            self.close()
            if isinstance(error, TargetLost):
                raise StartError(str(error)) from None
            raise
        return self

    def __del__(self) -> None:
        """Close a client that is not referenced any more.

        At interpreter shutdown this does nothing, because the other threads are then frozen and may
        hold locks. The workers still end, because their stdin closes.
        """
        if not sys.is_finalizing():
            with suppress(Exception):
                self.close()

    def close(self) -> None:
        """End the connection and close the launcher. A second call does nothing.

        In a forked process this only marks the client as closed. The engine belongs to the parent
        process, and threads that do not exist in the fork may hold locks.
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
            self._reader.join(2 * _READ_SECONDS)  # otherwise it could use a closed socket
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
        """Raise `EngineClosed` if this engine is closed, or if this process did not make it."""
        self._check_ours()
        if self.is_closed:
            raise EngineClosed("this engine has been closed; make another")

    # ---- requests ----

    def submit(self, stream: Stream, submit: Submit) -> Stream:
        with self._changed:
            if not self.streams:
                self._fault = None
            self.streams[submit.request] = stream
        self.post(submit)
        return stream

    def forget(self, request: int) -> None:
        """Drop the stream of a request that has ended."""
        if self._is_ours:
            with self._changed:
                self.streams.pop(request, None)
                self._changed.notify_all()

    def cancel(self, request: int) -> None:
        """Cancel a request whose result is no longer wanted. Any thread may call this."""
        self.forget(request)
        if not self.lost:
            with suppress(TargetLost):
                self.post(Cancel(request))

    def post(self, message: Message) -> None:
        """Send a message. Any thread may call this; it does nothing if the client is closed.

        Raises `TargetLost` if the message cannot be sent.
        """
        if self.is_closed or not self._is_ours:
            return
        try:
            self.endpoint.send(message)
        except TransportError as error:
            self._lose(str(error))
            raise TargetLost(self.lost) from None

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done()` is true; check this after each message and ten times a second.

        Raises `TargetLost` if the target is lost, and `EngineClosed` if the client is closed. Also
        raises an error that the target has sent and that concerns no particular request.
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
        """Pass messages to their streams. `received` is empty if no message has come in time.

        The target counts as lost if its process is dead, or if it is silent for too long while a
        request is running.
        """
        if received or not self.streams:
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
                if self.welcome is None or self.streams:
                    self._fault = error
                else:
                    log.warning("%s", error)
        self._tell()

    def _lose(self, why: str) -> None:
        """Give up the target, and end the workers without waiting for the user to close the engine.

        A second call keeps the cause of the first call. Any later trouble with the target is only
        the effect of the first call, which has ended the target.
        """
        cause = self._launcher.exit_cause(why)
        self._launcher.lose()
        self.lost = self.lost or f"{cause}; the text ends here. {self._launcher.remedy}"
        self._tell()

    def _tell(self) -> None:
        """Wake the threads that wait in `wait_until`."""
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
                stream = self.streams.get(request)
                if stream is not None and not stream.take(message):
                    self._lose("the target's messages have a gap, or come twice")
            case Error(_, "TraceError", text):
                # This is for the thread that waits in `Recording`, not for one that reads a stream.
                self.recording.answer = TraceError(text)
            case Error(_, kind, text):
                raise error_named(kind)(text)
            case Exception():
                self._lose(f"the target sent a malformed message ({message})")
            case _:
                log.warning("the target sent an unexpected %s", type(message).__name__)


def _read(client: ref[Client], endpoint: Connection) -> None:
    """Read messages until the client is closed, lost, or referenced by nobody but this thread."""
    while True:
        try:
            received = endpoint.receive(_READ_SECONDS)
        except TransportError:  # the endpoint was closed
            return
        owner = client()
        if owner is None or owner.is_closed or owner.lost:
            return
        owner.receive(received)
        del owner
