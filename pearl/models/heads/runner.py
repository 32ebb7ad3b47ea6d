"""A head as a draft model: a `ModelRunner` that reads hidden states of the target as far as they have come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from pearl.models.cpu import native
from pearl.models.feeds import Feed
from pearl.models.heads.eagle3 import Eagle3Head
from pearl.models.runner import Capabilities, ModelRunner, check_feeds

_IN_TURN = 16  # tokens: a longer feed is part of a prompt, whose states will come


class HeadRunner(ModelRunner):
    """Drafts with the target's states where they have arrived, and with the head's own outputs behind them.

    Token p is read with the state of token p - 1.  When further states arrive, all tokens from the first one read
    without its state are read again in one forward.  So logits depend on when states arrive: use it only under rules
    whose texts no draft can change.

    Args:
        head: with room for `slots` texts.
        vocab_size: the target's.
    """

    def __init__(self, head: Eagle3Head, vocab_size: int, slots: int) -> None:
        self._head, self.vocab_size = head, vocab_size
        self.context, self.device, self.weights = head.context, head.device, head.kind
        self.capabilities, self.features = Capabilities(slots=slots), head.features
        self._tokens = torch.zeros(slots, head.context, dtype=torch.long, device=head.device)
        self._states = torch.zeros(
            slots, head.context, head.hidden, dtype=head.dtype, device=head.device
        )
        self._lengths = [0] * slots  # tokens
        self._known = [0] * slots  # positions with states of the target
        self._any = [0] * slots  # positions with states of the target or of the head
        self._news = [0] * slots  # tokens that were read with the states that are there now

    def length(self, slot: int = 0) -> int:
        return self._lengths[slot]

    def use_threads(self, count: int) -> Sequence[int]:
        return super().use_threads(count) if native.library() is None else native.use_threads(count)

    def extend(self, start: int, features: torch.Tensor, slot: int) -> None:
        """The target's states [n, features] of tokens from position `start` on, in or behind the slot's text."""
        features = features[: max(0, self.context - start)]
        end, before = start + len(features), self._known[slot]
        if len(features):
            self._states[slot, start:end] = self._head.fused(features.to(self.device))
        if end > before:
            self._news[slot] = min(self._news[slot], max(start, before) + 1)
            self._known[slot], self._any[slot] = end, max(end, self._any[slot])

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        check_feeds(feeds, self, "a head")
        return [self._fed(feed) for feed in feeds]

    def _fed(self, feed: Feed) -> torch.Tensor:
        slot, start = feed.slot, self._lengths[feed.slot]
        end = start + len(feed.tokens)
        self._tokens[slot, start:end] = torch.as_tensor(feed.tokens, device=self.device)
        self._lengths[slot] = end
        if self._news[slot] < start:
            self._read(slot, self._news[slot], start)
        outputs = torch.cat([self._read(slot, *piece) for piece in self._pieces(feed, start, end)])
        found = outputs.new_full((feed.rows, self.vocab_size), -torch.inf, dtype=torch.float32)
        if feed.rows:
            found[:, self._head.ids] = self._head.logits(outputs[-feed.rows :])
        return found

    def _pieces(self, feed: Feed, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Tokens to read together: as far as there are states, then each with the output for the one before."""
        if feed.prompt or end - start > _IN_TURN:
            self._states[feed.slot, self._any[feed.slot] : end] = 0  # unknown
            self._any[feed.slot] = max(end, self._any[feed.slot])
        first = max(start + 1, min(self._any[feed.slot] + 1, end))
        yield start, first
        yield from ((each, each + 1) for each in range(first, end))

    def _read(self, slot: int, start: int, end: int) -> torch.Tensor:
        """Read the slot's tokens from `start` to `end`; their outputs [end - start, hidden]."""
        first, head = max(start, 1), self._head  # nothing stands before token 0
        guessed = max(0, first - self._known[slot])
        if not start and not self._known[slot]:
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
        own = max(first, self._known[slot])
        if own < end:
            self._states[slot, own:end] = outputs[own - start :]
        self._any[slot], self._news[slot] = max(end, self._any[slot]), end
        return outputs

    def rollback(self, length: int, slot: int = 0) -> None:
        self._lengths[slot] = length
        for counts in (self._known, self._any, self._news):
            counts[slot] = min(length, counts[slot])

    def fork(self, slot: int, into: int, length: int | None = None, shared: int = 0) -> None:
        end = self._lengths[slot] if length is None else length
        for room in (self._tokens, self._states):
            room[into, shared:end] = room[slot, shared:end]
        self._head.copy(slot, into, max(0, shared - 1), max(0, end - 1))
        for counts in (self._lengths, self._known, self._any, self._news):
            counts[into] = min(end, counts[slot])
