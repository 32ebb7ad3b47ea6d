"""A draft model that speaks its target's vocabulary, which is not its own: a `ModelRunner` around another one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pearl.models.feeds import Feed
from pearl.models.runner import Capabilities, ModelRunner, check_feeds
from pearl.text.translation import Translation

_LONGEST = 2  # draft tokens for a token, on average from the text's beginning


class TranslatedRunner(ModelRunner):
    """Takes and gives token ids of `translation`'s target, over a vocabulary of `vocab_size`.

    Logits of tokens that the draft does not have are minus infinity, so its distribution is renormalised over those
    that both have: it never proposes others.  A token that only the target has is fed as it is spelled; where a text
    would take more than twice as many draft tokens as it has tokens, the rest of a spelling is left out.
    """

    def __init__(self, runner: ModelRunner, translation: Translation, vocab_size: int) -> None:
        self._runner, self._translation, can = runner, translation, runner.capabilities
        self.vocab_size, self.context = vocab_size, runner.context // _LONGEST
        self.device, self.weights = runner.device, runner.weights
        # No trees, and no launches: tokens must be known on the host to be translated.
        self.capabilities = Capabilities(slots=can.slots, together=can.together)
        self._ends: list[list[int]] = [
            [] for _ in range(can.slots)
        ]  # in the draft's cache, by token
        sources = [-1] * vocab_size
        for token, own in translation.shared.items():
            if token < vocab_size and own < runner.vocab_size:
                sources[token] = own
        source = torch.tensor(sources, device=runner.device)
        self._source, self._missing = source.clamp_min(0), source < 0

    def length(self, slot: int = 0) -> int:
        return len(self._ends[slot])

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """See `ModelRunner.forward`."""
        check_feeds(feeds, self, "a draft of another vocabulary")
        spelled, ends = zip(*map(self._spell, feeds), strict=True)
        found = list[torch.Tensor]()
        for feed, rows, its in zip(feeds, self._runner.forward(spelled), ends, strict=True):
            last = self._end(feed.slot, self.length(feed.slot)) + len(spelled[len(found)].tokens)
            asked = [end - last + len(rows) - 1 for end in its[len(its) - feed.rows :]]
            found.append(
                rows[asked].index_select(1, self._source).masked_fill_(self._missing, -torch.inf)
            )
        for feed, its in zip(feeds, ends, strict=True):
            self._ends[feed.slot] += its
        return found

    def _spell(self, feed: Feed) -> tuple[Feed, list[int]]:
        """The feed in the draft's tokens, and where each of its own tokens ends in the draft's cache."""
        before, tokens, ends = self.length(feed.slot), list[int](), list[int]()
        start = self._end(feed.slot, before)
        given = feed.tokens.tolist() if isinstance(feed.tokens, torch.Tensor) else feed.tokens
        for number, token in enumerate(given, before + 1):
            room = _LONGEST * number - start - len(tokens)
            tokens += self._translation.spell(token)[:room]
            ends.append(start + len(tokens))
        first = ends[-feed.rows] if feed.rows else ends[-1] + 1
        return Feed(tokens, ends[-1] + 1 - first, feed.slot, prompt=feed.prompt), ends

    def _end(self, slot: int, length: int) -> int:
        return self._ends[slot][length - 1] if length else 0

    def use_threads(self, count: int) -> Sequence[int]:
        return self._runner.use_threads(count)

    def rollback(self, length: int, slot: int = 0) -> None:
        self._runner.rollback(self._end(slot, length), slot)
        del self._ends[slot][length:]

    def fork(self, slot: int, into: int, length: int | None = None, shared: int = 0) -> None:
        length = self.length(slot) if length is None else length
        self._runner.fork(slot, into, self._end(slot, length), self._end(slot, shared))
        self._ends[into] = self._ends[slot][:length]
