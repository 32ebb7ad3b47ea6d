"""The connection to a draft service, which may be absent, hang, die and come back.

No call here takes longer than its timeout, and vLLM goes on by itself while there is no draft.
"""

import logging
import time
from collections.abc import Callable, Iterator

from pearl.errors import ConfigError, ProtocolError, TransportError
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
)
from pearl.silence import SLACK, Silence
from pearl.transport import connect
from pearl.transport.base import Connection, Fault, Peer
from pearl.transport.keys import Keys
from pearl.transport.mailbox import Mailbox

log = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS = 0.5
_LAST_RETRY_SECONDS = 30.0
_FLUSH_SECONDS = 0.2  # for what is still queued when the connection is closed
_CLOCK_PINGS = 8  # they give the offset between the two clocks, for a trace

_TAKEN = Heartbeat(0, "drafting", 0)  # ends a wait once tokens have been handled
# Takes the service's Hello, and returns why its draft does not fit this target; empty if it fits.
Check = Callable[[Hello], str]


class ServiceLink:
    """Receives messages from a draft service and sends messages to it.

    The link connects by itself, and connects again after a failure.

    Args:
        hello: introduces this side to the service.
        check: called with the service's Hello; see `Check`.
        timeout: seconds of silence after which the service counts as lost. Another connection is
            then tried.
    """

    def __init__(
        self, address: str, keys: Keys | None, hello: Hello, check: Check, timeout: float
    ) -> None:
        self._address = address
        self._keys = keys
        self._hello = hello
        self._check = check
        self._timeout = timeout
        self._endpoint: Connection | None = None
        self._mail: Mailbox | None = None
        self._silence = Silence()
        self._is_met = False
        self.context = 0  # how many tokens of a text the draft can hold
        self.slots = 0  # number of requests that the draft can draft for at once
        #: Called with drafted tokens when they arrive, in the mailbox's thread. It returns whether
        #: a waiting `receive` has to end. If it is None, `receive` returns the tokens.
        self.take_tokens: Callable[[DraftTokens], bool] | None = None
        #: Whether a draft is connected and ready to draft.
        self.is_ready = False
        #: Why this side refused the last service, or the service refused this side; or empty.
        self.refusal = ""
        self._retry_at = 0.0
        self._back_off = _FIRST_RETRY_SECONDS

    # ---- receiving ----

    def receive(self, timeout: float = 0.0) -> list[object]:
        """Return what has arrived: messages of the draft, and news about the connection.

        The news are `DraftJoined` once the draft is ready, and `DraftGone` once it is lost. This
        waits at most `timeout` seconds for the first message.
        """
        if self._mail is None:
            self._connect()
        if self._mail is None:
            return []
        events: list[object] = []
        try:
            for _, message in self._mail.receive(timeout):
                events += self._take(message)
            self._check_silence()
        except (TransportError, ProtocolError) as error:
            events += self._lose(str(error))
        return events

    def _arrived(self, _: Peer, message: Message) -> Message | None:
        """Take a message when it arrives; return the message if `receive` has to handle it.

        Heartbeats of a ready draft are dropped here: while vLLM is idle, nobody calls `receive`.
        """
        allowance = 0.0
        if isinstance(message, Heartbeat) and message.work == "prefill":
            allowance = min(SLACK * message.seconds, 10 * self._timeout)
        self._silence.heard(allowance)
        if not self.is_ready:
            return message
        if isinstance(message, Heartbeat):
            return None
        if self.take_tokens is None or not isinstance(message, DraftTokens):
            return message
        ends_wait = self.take_tokens(message)
        return _TAKEN if ends_wait else None

    def _take(self, message: Message | Fault) -> Iterator[object]:
        match message:
            case ProtocolError() | TransportError():
                raise message
            case Hello():
                self._meet(message)
            case Heartbeat(work="calibrated") if self._is_met and not self.is_ready:
                self.is_ready = True
                self._back_off = _FIRST_RETRY_SECONDS
                log.info("a draft service at %s drafts for this engine", self._address)
                yield DraftJoined(self.context, message.seconds)
            case Error(-1, kind, text):
                self.refusal = text
                raise TransportError(f"the draft service refused: {kind}: {text}")
            case DraftTokens() | Resync() | Error() if self.is_ready:
                yield message
            case Pong():
                yield message
            case _:
                pass  # an ordinary heartbeat is a sign of life, which `_arrived` has noted

    def _meet(self, hello: Hello) -> None:
        problem = self._check(hello)
        if hello.version != PROTOCOL_VERSION:
            problem = f"it speaks version {hello.version} of the wire, this side {PROTOCOL_VERSION}"
        if problem:
            self.refusal = problem
            raise TransportError(f"the draft {hello.name} does not fit: {problem}")
        self.refusal = ""
        self._is_met = True
        self.context = hello.context
        self.slots = hello.slots
        for _ in range(_CLOCK_PINGS):
            self.send(Ping(time.monotonic_ns()))

    def _check_silence(self) -> None:
        """Raise `TransportError` if the service has been silent for too long since its Hello."""
        seconds = self._silence.seconds
        if self._is_met and seconds > self._timeout:
            raise TransportError(f"the draft service was silent for {seconds:.1f} s")

    # ---- connecting ----

    def _connect(self) -> None:
        if time.monotonic() < self._retry_at:
            return
        try:
            self._endpoint = connect(self._address, self._keys)
        except (ConfigError, TransportError) as error:
            self._wait_to_retry(str(error))
            return
        self._mail = Mailbox(self._endpoint, incoming=self._arrived)
        self._silence.heard()
        self._mail.send(self._hello)

    def _lose(self, why: str) -> list[object]:
        was_ready = self.is_ready
        self.close(flush=0.0)
        self._wait_to_retry(why)
        return [DraftGone(why)] if was_ready else []

    def _wait_to_retry(self, why: str) -> None:
        log.warning("%s; vLLM goes on alone, next attempt in %.1f s", why, self._back_off)
        self._retry_at = time.monotonic() + self._back_off
        self._back_off = min(2 * self._back_off, _LAST_RETRY_SECONDS)

    # ---- sending ----

    def send(self, message: Message) -> None:
        """Send a message; do nothing without a connection. The next `receive` notices a failure."""
        if self._mail is not None:
            self._mail.send(message)

    def close(self, flush: float = _FLUSH_SECONDS) -> None:
        """End the connection. The next `receive` makes another one.

        `flush`: how many seconds queued messages have to be sent.
        """
        self.is_ready = False
        self._is_met = False
        if self._mail is not None and self._endpoint is not None:
            self._mail.close()
            self._endpoint.close(flush)
        self._mail = None
        self._endpoint = None
