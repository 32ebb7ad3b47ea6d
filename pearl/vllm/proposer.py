"""PEARL in vLLM's step: a proposer whose draft is a service on a device of its own (`pearl draft serve`).

vLLM calls `propose` after every step.  What the step committed picks, of what the draft has sent meanwhile, the window
that the next step verifies: the tokens after an accepted window, or those that the draft had prepared for this
rejection.  The outcome is sent on at once, and the draft works while vLLM verifies.
"""

from __future__ import annotations

import atexit
import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any

from pearl.errors import ConfigError, RemoteProtocolError
from pearl.protocol.events import DraftGone, DraftJoined, Send
from pearl.protocol.messages import (
    PROTOCOL_VERSION,
    Begin,
    DraftTokens,
    Error,
    Finish,
    Hello,
    Message,
    Outcomes,
    Pong,
    Resync,
    Role,
    Verdict,
)
from pearl.protocol.outside import REFUSED
from pearl.vllm.link import ServiceLink
from pearl.vllm.recording import Readiness, Stepped, StepRecorder
from pearl.vllm.rows import Match, RowTable
from pearl.vllm.settings import Place, ProposerSettings
from pearl.vllm.text import DraftedText
from pearl.vllm.vocabulary import Vocabulary
from pearl.vllm.windows import StepSpeeds, window_lengths, worth_waiting

log = logging.getLogger(__name__)

_START_SECONDS = 2.0  # for the service to answer before vLLM's first request
_FORESEEN_WEIGHT = 0.05  # of one rejection
_PATIENCE = 1.5  # times the time that the awaited tokens should take
_LEAST_WAIT_SECONDS = 1e-3
_STEPS_UNTIL_RETRY = 32  # after the service had no slot for a request


class PearlProposer:
    """vLLM's custom proposer class.

        vllm serve TARGET \\
          --speculative-config '{"method": "custom_class", "model": "pearl.vllm.PearlProposer",
                                 "num_speculative_tokens": 8}' \\
          --additional-config '{"pearl": {"address": "ipc:///run/user/1000/pearl/draft"}}'

    Raises `ConfigError` for settings that are wrong, and where the service's draft has another vocabulary.
    """

    def __init__(self, vllm_config: Any) -> None:
        settings = ProposerSettings.of(vllm_config)
        place = Place.of(vllm_config)
        model_config = vllm_config.model_config
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._limit = int(model_config.max_model_len)
        self._vocab_size = int(model_config.get_vocab_size())
        self._speeds = StepSpeeds(most=self._most)
        self._foreseen = 0.5  # how often the draft has prepared for a rejection
        self._waits_in_vain = False
        self._texts: dict[int, DraftedText] = {}  # by request
        self._rows = RowTable(secrets.randbits(31) << 32)
        self._unserved: dict[
            int, None
        ] = {}  # requests that wait for a slot at the service, in turn
        self._pause = 0  # steps until the next of them asks
        self._window = 0  # c as last used
        self._outbox: list[object] = []
        self._returned = 0  # when `propose` last returned, ns
        self._verified: dict[
            int, int
        ] = {}  # request -> drafted tokens that the step under way verifies
        self._vocabulary = Vocabulary({})
        self._link: ServiceLink | None = None
        trace: str | None = None
        if place.asks:
            self._vocabulary = Vocabulary.of(model_config)
            self._link = self._connect(settings, place)
            trace = settings.trace if place.data_rank == 0 else None
        about = {"target": str(model_config.model), "draft": "service", "tensors": "frames"}
        self._recorder = StepRecorder(trace, about | {"control": _control(settings.address)})
        atexit.register(self.close)

    def _connect(self, settings: ProposerSettings, place: Place) -> ServiceLink:
        vocabulary = self._vocabulary
        digest = vocabulary.digest(vocabulary.size) if vocabulary.size else b""
        hello = Hello(
            PROTOCOL_VERSION, Role.TARGET, vocabulary.size, self._limit, digest, place.name
        )
        return ServiceLink(
            settings.address, settings.read_keys(), hello, vocabulary.misfit, settings.timeout
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Meet the service, if it is there already. Raises `ConfigError` if its draft does not fit."""
        if self._link is None:
            return
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and not self._link.is_ready:
            self._take(self._link.receive(0.05))
            if self._link.refusal:
                raise ConfigError(f"the draft service does not fit: {self._link.refusal}")
        if not self._link.is_ready:
            log.warning("no draft service answers yet: vLLM goes on alone until it does")

    def close(self) -> None:
        """End the connection, and complete the trace."""
        self._recorder.close()
        if self._link is not None:
            self._link.close()
            self._link = None

    # ---- vLLM's call ----

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        **_: Any,
    ) -> list[list[int]]:
        """Return up to `num_speculative_tokens` drafted tokens for each row; none where no draft is ready.

        Args:
            sampled_token_ids: tokens that the step has committed, by row; none while a prompt is being read.
            num_tokens_no_spec: [rows] tokens of each row, these included.
            token_ids_cpu: [rows, max_model_len] their ids; what stands after a row's length is of no meaning.
        """
        if self._link is None:
            return [[] for _ in sampled_token_ids]
        began = self._recorder.clock()
        self._take(self._link.receive())
        rows = []
        for row in range(len(sampled_token_ids)):
            rows.append(token_ids_cpu[row, : int(num_tokens_no_spec[row])])
        matches = self._rows.follow(rows)
        is_decoding = [bool(tokens) for tokens in sampled_token_ids]
        is_whole = True  # whether each row has grown by what was sampled, and by something
        for tokens, match, sampled in zip(rows, matches, sampled_token_ids, strict=True):
            is_whole = is_whole and len(tokens) - match.start == len(sampled) > 0
        self._observe(matches, began, is_whole=is_whole)
        readiness = self._follow(matches, rows, is_decoding, began)
        decided = self._recorder.clock()
        numbers = [match.number for match in matches]
        self._wait(numbers, is_decoding)
        windows = self._choose(numbers, is_decoding)
        self._recorder.proposed(began, decided, readiness)
        self._returned = self._recorder.clock()
        return windows

    def _observe(self, matches: Sequence[Match], now: int, *, is_whole: bool) -> None:
        """Take in how long vLLM's step took, if it only decoded requests that were there before."""
        numbers = [match.number for match in matches]
        if is_whole and set(numbers) == self._verified.keys() and self._returned:
            windows = [self._verified[number] for number in numbers]
            fed = len(windows) + sum(windows)
            self._speeds.observe_target(fed, (now - self._returned) / 1e9)
            self._recorder.step(numbers, windows, self._returned, now)
        elif self._verified and self._returned:
            self._recorder.prompts(self._returned, now)

    def _follow(
        self,
        matches: Sequence[Match],
        rows: Sequence[Any],
        is_decoding: Sequence[bool],
        start: int,
    ) -> Readiness:
        """Begin, go on with and end texts as their rows say, and tell the service."""
        readiness = Readiness()
        lengths: list[int] = []
        numbers = {match.number for match in matches}
        for number in self._texts.keys() - numbers:
            self._end(number)
        for match, tokens, decodes in zip(matches, rows, is_decoding, strict=True):
            if match.start:
                text = self._texts[match.number]
                text.draft.beside = len(rows) - 1
                text.commit(tokens[match.start :].tolist(), self._outbox.append)
                self._window = text.draft.window
            else:
                text = self._begin(match.number, tokens.tolist())
            if decodes:
                lengths.append(len(tokens) - match.start)
                readiness += self._look(text)
        self._begin_next()
        commands = list(self._outbox)
        self._flush()
        self._recorder.decided(Stepped(tuple(lengths)), commands, start)
        return readiness

    def _begin(self, number: int, tokens: list[int]) -> DraftedText:
        assert self._link is not None
        context = self._link.context if self._link.is_ready else 0
        text = DraftedText(number, tokens, self._limit, self._speeds, context, self._window)
        self._texts[number] = text
        self._unserved[number] = None
        self._recorder.begin(number, len(tokens))
        return text

    def _end(self, number: int) -> None:
        text = self._texts.pop(number)
        self._unserved.pop(number, None)
        if text.is_served:
            self._pause = 0
        text.end(self._outbox.append)
        self._recorder.end(number)

    def _begin_next(self) -> None:
        """Give the service the texts that it has slots for."""
        if self._pause or not self._unserved:
            self._pause = max(0, self._pause - 1)
            return
        assert self._link is not None
        served = sum(text.is_served for text in self._texts.values())
        for number in list(self._unserved)[: max(0, self._link.slots - served)]:
            del self._unserved[number]
            self._texts[number].begin(self._outbox.append)

    def _look(self, text: DraftedText) -> Readiness:
        """Return what the draft has ready, and learn how often it prepares for what happens."""
        if text.was_rejected:
            self._foreseen += _FORESEEN_WEIGHT * (text.was_foreseen - self._foreseen)
        is_ready = bool(text.request.sequence.pending)
        return Readiness(1, int(is_ready), int(text.was_rejected), int(text.was_foreseen))

    # ---- waiting and choosing ----

    def _wait(self, numbers: Sequence[int], is_decoding: Sequence[bool]) -> None:
        """Wait for first tokens where that makes more tokens a second, for as long as they should take."""
        lacking = self._lacking(numbers, is_decoding, 1)
        if not lacking or self._waits_in_vain:
            return
        wanted = worth_waiting(self._speeds, self._foreseen, self._most, len(numbers), len(lacking))
        lacking = self._lacking(lacking, [True] * len(lacking), wanted)
        if not lacking:
            return
        assert self._link is not None
        start = self._recorder.clock()
        deadline = time.monotonic() + max(
            _LEAST_WAIT_SECONDS, _PATIENCE * (wanted + 1) * self._speeds.t_draft
        )
        while lacking and (seconds := deadline - time.monotonic()) > 0:
            self._take(self._link.receive(seconds))
            lacking = self._lacking(lacking, [True] * len(lacking), wanted)
        self._flush()
        self._waits_in_vain = bool(lacking)
        self._recorder.waited(start)

    def _lacking(
        self, numbers: Sequence[int], is_decoding: Sequence[bool], wanted: int
    ) -> list[int]:
        """Return the requests that have fewer than `wanted` drafted tokens, though their draft is at work."""
        lacking: list[int] = []
        for number, decodes in zip(numbers, is_decoding, strict=True):
            text = self._texts[number]
            num_drafted = len(text.request.sequence.pending)
            if decodes and text.has_begun and num_drafted < wanted:
                lacking.append(number)
        return lacking

    def _choose(self, numbers: Sequence[int], is_decoding: Sequence[bool]) -> list[list[int]]:
        """Return the drafted tokens to verify, by row."""
        chances: list[list[float]] = []
        for number, decodes in zip(numbers, is_decoding, strict=True):
            text = self._texts[number]
            room = self._limit - 1 - text.request.sequence.committed
            chances.append(text.chances(max(0, min(self._most, room))) if decodes else [])
        lengths = window_lengths(chances, self._speeds)
        self._verified = dict(zip(numbers, lengths, strict=True))
        windows: list[list[int]] = []
        for number, length in zip(numbers, lengths, strict=True):
            windows.append(self._texts[number].request.sequence.pending[:length])
        return windows

    # ---- the service ----

    def _take(self, events: Sequence[object]) -> None:
        """Take in what has arrived from the service."""
        for event in events:
            match event:
                case DraftJoined(context, seconds):
                    self._speeds.observe_draft(seconds)
                    self._unserved = dict.fromkeys(self._texts)
                    self._pause = 0
                    for text in self._texts.values():
                        text.draft.context = context
                case DraftGone(reason):
                    log.warning("draft lost: %s; vLLM goes on alone", reason)
                    for text in self._texts.values():
                        text.draft.context = 0
                        text.drop()
                case Pong():
                    self._recorder.pong(event)
                case DraftTokens() | Resync() | Error():
                    self._take_of_request(event)

    def _take_of_request(self, message: DraftTokens | Resync | Error) -> None:
        text = self._texts.get(message.request)
        if text is None:
            return  # it has ended
        match message:
            case DraftTokens():
                self._waits_in_vain = False
                self._receive(text, message)
            case Resync(_, epoch):
                text.resynchronise(epoch, self._outbox.append)
            case Error(_, kind) if kind == REFUSED:
                text.drop()
                self._unserved[message.request] = None
                self._pause = _STEPS_UNTIL_RETRY
            case Error(_, kind, why):
                log.warning("the draft cannot go on with a request: %s: %s", kind, why)
                text.fail()

    def _receive(self, text: DraftedText, message: DraftTokens) -> None:
        """Take drafted tokens; a draft that sends what it had no right to send loses the request."""
        try:
            if max(message.tokens, default=0) >= self._vocab_size:
                raise RemoteProtocolError(f"draft sent token {max(message.tokens)}")
            text.receive(message, self._outbox.append)
        except RemoteProtocolError as error:
            log.warning("the draft is not used for a request any more: %s", error)
            text.fail()

    def _flush(self) -> None:
        """Send the service what is to be sent, in one message."""
        start = self._recorder.clock()
        messages: list[Message] = []
        for command in self._outbox:
            if isinstance(command, Send):
                messages.append(command.message)
        self._outbox.clear()
        if messages and self._link is not None:
            self._link.send(_together(messages))
            self._recorder.sent(messages, start)


def _together(messages: Sequence[Message]) -> Outcomes:
    """Return the messages as one. Those of one request are in this order anyway."""
    finishes = [message for message in messages if isinstance(message, Finish)]
    begins = [message for message in messages if isinstance(message, Begin)]
    verdicts = [message for message in messages if isinstance(message, Verdict)]
    return Outcomes(tuple(finishes), tuple(begins), tuple(verdicts))


def _control(address: str) -> str:
    """Return the setting of the control channel that a trace of two hosts is known by."""
    return "ipc" if address.startswith("ipc://") else address
