"""All texts that this engine is decoding, and the messages about them to the draft service.

The service drafts for as many texts as it has slots; all others wait for a slot. Drafted tokens are
handled when they arrive, in the connection's thread, while vLLM computes. Everything else happens
in vLLM's thread.
"""

import logging
import threading
from collections.abc import Iterable, Sequence

from pearl.errors import RemoteProtocolError
from pearl.protocol.events import DraftGone, DraftJoined, Send
from pearl.protocol.messages import (
    Begin,
    DraftTokens,
    Error,
    Finish,
    Message,
    Outcomes,
    Pong,
    Resync,
    Verdict,
)
from pearl.protocol.outside import REFUSED
from pearl.vllm.link import ServiceLink
from pearl.vllm.recording import StepRecorder
from pearl.vllm.text import DraftedText
from pearl.vllm.windows import StepSpeeds

log = logging.getLogger(__name__)

_STEPS_UNTIL_RETRY = 32  # how long to wait after the service had no slot for a request


class ServedTexts:
    """All requests that are being decoded, by their numbers.

    Args:
        limit: the maximum number of tokens of a request in vLLM.
        vocab_size: number of ids that the target has. If the draft sends an id beyond these, the
            draft is no longer used for the request.
    """

    def __init__(
        self,
        link: ServiceLink,
        speeds: StepSpeeds,
        limit: int,
        vocab_size: int,
        recorder: StepRecorder,
        *,
        has_ngrams: bool,
    ) -> None:
        self.link = link
        self.speeds = speeds
        self.texts: dict[int, DraftedText] = {}
        #: Whether waiting may help. It is False after a wait that was in vain, until drafted tokens
        #: arrive again.
        self.has_news = True
        self._limit = limit
        self._vocab_size = vocab_size
        self._recorder = recorder
        self._has_ngrams = has_ngrams
        self._window = 0  # the window c that was used last
        #: Requests that wait for a slot at the service, in turn.
        self._unserved: dict[int, None] = {}
        self._pause = 0  # number of steps until the next of these asks for a slot
        self._outbox: list[object] = []
        self._is_waiting = False  # whether vLLM's thread waits for drafted tokens
        self._lock = threading.Lock()  # held by whoever changes a text, or the outbox, or waits
        link.take_tokens = self._take_early

    # ---- vLLM's steps ----

    def begin(self, number: int, tokens: Sequence[int]) -> DraftedText:
        """Add a new request, which then waits for a slot at the service."""
        context = self.link.context if self.link.is_ready else 0
        text = DraftedText(
            number,
            tokens,
            self._limit,
            self.speeds,
            context,
            self._window,
            has_ngrams=self._has_ngrams,
        )
        self.texts[number] = text
        self._unserved[number] = None
        self._recorder.begin(number, len(tokens))
        return text

    def commit(self, number: int, tokens: Sequence[int], beside: int) -> DraftedText:
        """Add the tokens that a step has committed to a request, and queue a verdict for the draft.

        `beside`: the number of other requests in the step.
        """
        text = self.texts[number]
        with self._lock:
            text.request.beside = beside
            text.commit(tokens, self._outbox.append)
        self._window = text.draft.window
        return text

    def end(self, number: int) -> None:
        """Remove a request that has ended."""
        with self._lock:
            text = self.texts.pop(number)
            self._unserved.pop(number, None)
            if text.is_served:
                self._pause = 0
            text.end(self._outbox.append)
        self._recorder.end(number)

    def flush(self) -> list[object]:
        """Begin texts that the service has slots for, and send all queued messages as one.

        Returns the commands that were queued, for the trace.
        """
        with self._lock:
            self._begin_next()
            return self._send()

    def _begin_next(self) -> None:
        if self._pause or not self._unserved:
            self._pause = max(0, self._pause - 1)
            return
        num_served = sum(text.is_served for text in self.texts.values())
        for number in list(self._unserved)[: max(0, self.link.slots - num_served)]:
            del self._unserved[number]
            self.texts[number].begin(self._outbox.append)

    def _send(self) -> list[object]:
        start = self._recorder.clock()
        commands = self._outbox
        self._outbox = []
        messages = []
        for command in commands:
            if isinstance(command, Send):
                messages.append(command.message)
        if messages:
            self.link.send(_together(messages))
            self._recorder.sent(messages, start)
        return commands

    # ---- the service ----

    def receive(self, timeout: float = 0.0) -> None:
        """Handle what has arrived from the service; wait at most `timeout` seconds for it."""
        for event in self.link.receive(timeout):
            with self._lock:
                self._handle(event)

    def _take_early(self, message: DraftTokens) -> bool:
        """Handle drafted tokens in the connection's thread.

        Returns whether vLLM's thread is waiting for drafted tokens, and has to be woken.
        """
        with self._lock:
            self._take(message)
            return self._is_waiting

    def _handle(self, event: object) -> None:
        match event:
            case DraftJoined(context, seconds):
                self._join(context, seconds)
            case DraftGone(reason):
                log.warning("draft lost: %s; vLLM goes on alone", reason)
                for text in self.texts.values():
                    text.draft.context = 0
                    text.drop()
            case Pong():
                self._recorder.pong(event)
            case DraftTokens() | Resync() | Error():
                self._take(event)

    def wait(self, texts: Iterable[DraftedText], wanted: int, seconds: float) -> bool:
        """Wait until the service has sent `wanted` tokens for each text.

        Returns False if the tokens have not come within `seconds`.
        """
        deadline = self._recorder.clock() + round(1e9 * seconds)
        with self._lock:
            self._is_waiting = True
            lacking = [text for text in texts if text.lacks(wanted)]
        while lacking and (left := deadline - self._recorder.clock()) > 0:
            self.receive(left / 1e9)
            lacking = [text for text in lacking if text.lacks(wanted)]
        with self._lock:
            self._is_waiting = False
            self._send()
        return not lacking

    def _join(self, context: int, seconds: float) -> None:
        """Handle a draft that has connected, for the first time or again.

        All texts now wait for the draft's slots.

        Args:
            context: how many tokens of a text the draft can hold.
            seconds: the time that the draft takes for a token; 0 if it is unknown.
        """
        self.speeds.observe_draft(seconds)
        self._unserved = dict.fromkeys(self.texts)
        self._pause = 0
        for text in self.texts.values():
            text.draft.context = context

    def _take(self, message: DraftTokens | Resync | Error) -> None:
        text = self.texts.get(message.request)
        if text is None:
            return  # it has ended
        match message:
            case DraftTokens():
                self.has_news = True
                self._take_tokens(text, message)
            case Resync(_, epoch):
                text.resynchronise(epoch, self._outbox.append)
            case Error(_, kind) if kind == REFUSED:
                text.drop()
                self._unserved[message.request] = None
                self._pause = _STEPS_UNTIL_RETRY
            case Error(_, kind, why):
                log.warning("the draft cannot go on with a request: %s: %s", kind, why)
                text.fail(self._outbox.append)

    def _take_tokens(self, text: DraftedText, message: DraftTokens) -> None:
        """Add drafted tokens to a text.

        If they violate the protocol, the draft is no longer used for this request.
        """
        try:
            largest = max(message.tokens, default=0)
            if largest >= self._vocab_size:
                raise RemoteProtocolError(
                    f"draft sent token {largest}, the target has ids up to {self._vocab_size - 1}"
                )
            text.receive(message, self._outbox.append)
        except RemoteProtocolError as error:
            log.warning("the draft is not used for a request any more: %s", error)
            text.fail(self._outbox.append)


def _together(messages: Iterable[Message]) -> Outcomes:
    """Combine messages into one: first those of type Finish, then Begin, then Verdict.

    The messages about one request come in this order anyway, so their order stays the same.
    """
    finishes = []
    begins = []
    verdicts = []
    for message in messages:
        match message:
            case Finish():
                finishes.append(message)
            case Begin():
                begins.append(message)
            case Verdict():
                verdicts.append(message)
    return Outcomes(tuple(finishes), tuple(begins), tuple(verdicts))
