"""The target worker's side of its draft: whether it fits, whether it answers, and the distributions that it sends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pearl.decoding.distribution import AnnouncedRow, PackedRow, are_probabilities
from pearl.errors import DraftLost, RemoteProtocolError
from pearl.execution.target import TargetExecutor
from pearl.protocol.messages import (
    PROTOCOL_VERSION,
    DraftTokens,
    Error,
    Hello,
    Message,
    Ping,
)
from pearl.transport.base import Peer, TensorChannel
from pearl.transport.mailbox import Mailbox
from pearl.worker.health import DraftHealth

log = logging.getLogger(__name__)

PROBE_SECONDS = 0.1  # between pings to a draft that is waited for: a dead process's socket refuses them at once
_CLOCK_PINGS = 8  # where there is a trace: to tell how far the two clocks are apart
_UNPACKED_AT_ONCE = 64 << 20  # bytes of distributions in one message; of more each is unpacked where it is judged
_NOBODYS = DraftTokens(-1, 0, 0, ())  # of no request: in place of what has not been looked at


_OF_TOKEN, _OF_ROW = 64, 256  # bytes of Python's own


@dataclass(frozen=True)
class TargetSettings:
    """`vocab_digest`: of the target's tokens; a draft must bring the same. Times in seconds.

    `slots`: how many requests are worked on side by side. `has_classifier`: whether the draft has what stop policy
    disco needs.
    """

    vocab_size: int
    context: int
    vocab_digest: bytes
    draft_timeout: float
    expects_draft: bool
    slots: int = 1
    has_classifier: bool = False


def weigh(message: Message) -> int:
    """Bytes that a draft's tokens take while they wait to be looked at, roughly."""
    if not isinstance(message, DraftTokens):
        return 0
    return _OF_TOKEN * len(message.tokens) + sum(_OF_ROW + row.nbytes for row in message.rows)


class DraftLink:
    """One draft after the other, none at first.

    Args:
        channel: opens the tensor channel; only for the draft that is there at start, for a process group cannot be
            rejoined.
    """

    def __init__(
        self, settings: TargetSettings, executor: TargetExecutor, channel: Callable[[], TensorChannel] | None
    ) -> None:
        self._settings, self._executor, self._open_channel = settings, executor, channel
        self.mail: Mailbox | None = None
        self.peer: Peer | None = None
        self.context = 0  # tokens that its model holds
        self.health = DraftHealth(settings.draft_timeout)
        self._channel: TensorChannel | None = None
        self._probed = 0.0

    def fits(self, hello: Hello) -> bool:
        """Whether this draft speaks our version, and has the target's tokens."""
        return hello.version == PROTOCOL_VERSION and hello.vocab_digest == self._settings.vocab_digest

    def refuse(self, peer: Peer, hello: Hello) -> None:
        why = f"version {hello.version}, vocabulary {hello.vocab_digest.hex()}"
        self._mailbox.post(Error(-1, "ModelError", f"this draft does not fit the target: {why}"), peer)

    def meet(self, peer: Peer, hello: Hello) -> None:
        self.peer, self.context = peer, hello.context

    def open_channel(self) -> None:
        if self._open_channel is not None:
            self._channel = self._open_channel()

    def lose(self, why: str) -> None:
        """One that still listens ends by what it is told, and its launcher starts a sound one."""
        self.post(Error(-1, "DraftLost", why))
        self.close()

    def close(self) -> None:
        self.peer = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def send(self, message: Message) -> None:
        """Sends at once, if there is a draft."""
        if self.peer is not None:
            self._mailbox.send(message, self.peer)

    def post(self, message: Message) -> None:
        """Leaves sending to the mailbox's thread."""
        if self.peer is not None:
            self._mailbox.post(message, self.peer)

    def examined(self, peer: Peer, message: Message) -> Message:
        """In the mailbox's thread: what can be told of a draft's message by itself. Distributions become tensors.

        Only the draft's: a few bytes of anybody else's would be made into a vocabulary for each token.  Rows that were
        announced are waited for here, beside the forwards of the loop.

        Raises `RemoteProtocolError` for what is no token of the model, or no distribution over them, `TransportError`
        where announced rows do not come.
        """
        if not isinstance(message, DraftTokens):
            return message
        if peer != self.peer:
            return _NOBODYS
        vocab = self._settings.vocab_size
        most = max((*message.tokens, *(message.after or ())[1:]), default=0)
        if most >= vocab:
            raise RemoteProtocolError(f"draft sent token {most}, the target has ids up to {vocab - 1}")
        is_small = len(message.rows) * 4 * vocab <= _UNPACKED_AT_ONCE
        rows = [*message.rows]
        for i, row in enumerate(rows):
            if isinstance(row, PackedRow):
                if is_small:
                    rows[i] = self._executor.bring(row)
                else:  # a few bytes may become a vocabulary, so the executor unpacks only rows that it judges
                    row.check(vocab)
        announced = [i for i, row in enumerate(rows) if isinstance(row, AnnouncedRow)]
        if announced:
            for i, probs in zip(announced, self._receive_announced(len(announced)), strict=True):
                rows[i] = probs
        return message.changed(rows=tuple(rows)) if rows else message

    def with_needed_rows(self, message: DraftTokens) -> DraftTokens | None:
        """What the rule of its request judges: with a distribution for each token, or with none for any.

        None for a request that was not opened: no draft has been told of it yet. Raises `RemoteProtocolError` where
        distributions are missing.
        """
        needs = self._executor.needs_rows(message.request)
        if needs and not message.rows:
            raise RemoteProtocolError("draft sent tokens without what the rule needs to judge them")
        if needs is None:
            return None
        return message if needs or not message.rows else message.changed(rows=())

    def _receive_announced(self, count: int) -> torch.Tensor:
        """Receive announced rows [count, vocab] at once, stale ones included, so that the channel stays in step.

        Raises `RemoteProtocolError` for what is no distribution, `TransportError` where nothing comes.
        """
        channel = self._channel  # the loop may give it up meanwhile
        if channel is None:
            raise RemoteProtocolError("draft announced rows on a channel that is not open")
        rows = channel.receive(count)
        if not are_probabilities(rows):
            raise RemoteProtocolError("draft sent what is no distribution")
        return rows

    def probe(self, now: float) -> None:
        """Ask a silent draft for a sign of life. Raises `DraftLost` where it has been silent for too long."""
        silent = self.health.silent
        if silent > self._settings.draft_timeout:
            raise DraftLost(f"silent for {silent:.1f} s")
        if silent > PROBE_SECONDS and now - self._probed > PROBE_SECONDS:
            self._probed = now
            self.post(Ping(time.monotonic_ns()))

    def compare_clocks(self) -> None:
        for _ in range(_CLOCK_PINGS):
            self.post(Ping(time.monotonic_ns()))

    @property
    def _mailbox(self) -> Mailbox:
        assert self.mail is not None
        return self.mail
