"""A head as a draft model: a `ModelRunner` that reads the target's hidden states as far as they have arrived."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pearl.models.cpu import native
from pearl.models.feeds import Feed
from pearl.models.heads.chain import DraftHead
from pearl.models.runner import Capabilities, ModelRunner, check_feeds

_IN_TURN = 16  # a feed of more tokens is part of a prompt, whose states the target will send


@dataclass
class _Text:
    """How much of a slot's text has states, and how much the head has read.

    Attributes:
        length: number of tokens.
        target_end: the first `target_end` positions have states of the target.
        state_end: the first `state_end` positions have states, of the target or of the head.
        read: the first `read` tokens need not be read again. The head has read them, and no newer
            states for them have arrived since then.
    """

    length: int = 0
    target_end: int = 0
    state_end: int = 0
    read: int = 0

    def cut(self, length: int) -> _Text:
        """Return this record for the text's first `length` tokens."""
        return _Text(
            length,
            min(length, self.target_end),
            min(length, self.state_end),
            min(length, self.read),
        )


class StatesRunner(ModelRunner):
    """A draft that reads the target's hidden states.

    Attributes:
        features: width of the states of a token.
    """

    features: int

    @abstractmethod
    def extend(self, start: int, features: torch.Tensor, slot: int) -> None:
        """Store the target's states [n, features] for the positions from `start` on.

        These positions may lie after the end of the text.
        """


class HeadRunner(StatesRunner):
    """Drafts with the target's states as far as they have arrived, and from there on with the head's own outputs.

    Token p is read with the state of token p - 1.  When further states of the target arrive, the
    tokens that were read with the head's own outputs are read again, in one forward.  So the logits
    depend on when states arrive.  Use this runner only with decoding rules under which a draft
    cannot change the text, such as greedy and coupled.

    Args:
        head: a head whose cache has room for `slots` texts.
        vocab_size: number of the target's token ids.
    """

    def __init__(self, head: DraftHead, vocab_size: int, slots: int) -> None:
        self._head = head
        self.vocab_size = vocab_size
        self.context = head.context
        self.device = head.device
        self.weights = head.weights
        self.capabilities = Capabilities(slots=slots)
        self.features = head.features
        self._tokens = torch.zeros(slots, head.context, dtype=torch.long, device=head.device)
        self._states = torch.zeros(
            slots, head.context, head.hidden, dtype=head.dtype, device=head.device
        )
        self._texts = [_Text() for _ in range(slots)]

    def length(self, slot: int = 0) -> int:
        return self._texts[slot].length

    def use_threads(self, count: int) -> Sequence[int]:
        if native.library() is None:
            return super().use_threads(count)
        return native.use_threads(count)

    def extend(self, start: int, features: torch.Tensor, slot: int) -> None:
        """See `StatesRunner.extend`."""
        features = features[: max(0, self.context - start)]
        end = start + len(features)
        text = self._texts[slot]
        if len(features):
            self._states[slot, start:end] = self._head.fused(features.to(self.device))
        if end > text.target_end:
            text.read = min(text.read, max(start, text.target_end) + 1)
            text.target_end = end
            text.state_end = max(end, text.state_end)

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        check_feeds(feeds, self, "a head")
        return [self._fed(feed) for feed in feeds]

    def _fed(self, feed: Feed) -> torch.Tensor:
        slot = feed.slot
        text = self._texts[slot]
        start = text.length
        end = start + len(feed.tokens)
        self._tokens[slot, start:end] = torch.as_tensor(feed.tokens, device=self.device)
        text.length = end
        if text.read < start:
            self._read(slot, text.read, start)
        pieces = [self._read(slot, first, stop) for first, stop in self._pieces(feed, start, end)]
        logits = self._states.new_full(
            (feed.rows, self.vocab_size), -torch.inf, dtype=torch.float32
        )
        if feed.rows:
            outputs = torch.cat(pieces)
            logits[:, self._head.ids] = self._head.logits(outputs[-feed.rows :])
        return logits

    def _pieces(self, feed: Feed, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the (start, end) of each piece of the tokens to read, in order.

        The first piece has all tokens whose states are there; each further piece has one token.
        """
        text = self._texts[feed.slot]
        if feed.prompt or end - start > _IN_TURN:
            self._states[feed.slot, text.state_end : end] = 0  # in place of unknown states
            text.state_end = max(end, text.state_end)
        stop = max(start + 1, min(text.state_end + 1, end))
        yield start, stop
        for position in range(stop, end):
            yield position, position + 1

    def _read(self, slot: int, start: int, end: int) -> torch.Tensor:
        """Read the slot's tokens from `start` to `end`; return their outputs [end - start, hidden]."""
        head = self._head
        text = self._texts[slot]
        first = max(start, 1)  # the head reads no token 0, which has no token before it
        guessed = max(0, first - text.target_end)
        if not start and not text.target_end:
            self._states[slot, 0] = 0
        outputs = self._states[slot, start:end].clone()
        if first < end:
            head.lengths[slot] = first - 1
            outputs[first - start :] = head.read(
                self._tokens[slot, first:end],
                self._states[slot, first - 1 : end - 1],
                slot,
                guessed,
            )
        guess = max(first, text.target_end)
        if guess < end:
            self._states[slot, guess:end] = outputs[guess - start :]
        text.state_end = max(end, text.state_end)
        text.read = end
        return outputs

    def rollback(self, length: int, slot: int = 0) -> None:
        self._texts[slot] = self._texts[slot].cut(length)

    def fork(self, slot: int, into: int, length: int | None = None, shared: int = 0) -> None:
        end = self.length(slot) if length is None else length
        # Of the shared tokens, those are copied for which states have come since `into` was forked.
        before = self._texts[into]
        shared = min(shared, before.target_end, before.read)
        for room in (self._tokens, self._states):
            room[into, shared:end] = room[slot, shared:end]
        self._head.copy(slot, into, max(0, shared - 1), max(0, end - 1))
        self._texts[into] = self._texts[slot].cut(end)
