"""A `ModelRunner` for a draft whose vocabulary differs from the target's.

It is fed the target's token ids, and returns logits for them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pearl.models.feeds import Feed
from pearl.models.runner import Capabilities, ModelRunner, check_feeds
from pearl.text.translation import Translation

_LONGEST = 2  # most draft tokens for each token of the target, on average over a text so far


class _Spelling(NamedTuple):
    """A feed translated into the draft's tokens.

    Attributes:
        ends: the position in the draft's cache after each of the target's tokens.
    """

    feed: Feed
    ends: list[int]


class TranslatedRunner(ModelRunner):
    """Runs the draft's `runner` on token ids of the target, whose vocabulary has `vocab_size` ids.

    Logits of tokens that the draft does not have are minus infinity.  So the draft's distribution
    is renormalised over the tokens that both models have, and only these are proposed.  A token
    that only the target has is fed as the draft tokens that spell it.  A text of n target tokens
    takes at most 2 n draft tokens; if a token's spelling would exceed this, the end of the spelling
    is left out.
    """

    def __init__(self, runner: ModelRunner, translation: Translation, vocab_size: int) -> None:
        slots = runner.capabilities.slots
        self._runner = runner
        self._translation = translation
        self.vocab_size = vocab_size
        self.context = runner.context // _LONGEST
        self.device = runner.device
        self.weights = runner.weights
        # No trees, and no launches: tokens must be known on the host to be translated.
        self.capabilities = Capabilities(slots=slots, together=runner.capabilities.together)
        # Where each token of a slot ends in the draft's cache.
        self._ends: list[list[int]] = [[] for _ in range(slots)]
        sources = [-1] * vocab_size
        for token, draft_token in translation.shared.items():
            if token < vocab_size and draft_token < runner.vocab_size:
                sources[token] = draft_token
        source = torch.tensor(sources, device=runner.device)
        self._source = source.clamp_min(0)
        self._missing = source < 0

    def length(self, slot: int = 0) -> int:
        return len(self._ends[slot])

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """See `ModelRunner.forward`."""
        check_feeds(feeds, self, "a draft of another vocabulary")
        spellings = [self._spell(feed) for feed in feeds]
        logits = self._runner.forward([spelling.feed for spelling in spellings])
        translated = []
        for feed, spelling, rows in zip(feeds, spellings, logits, strict=True):
            first = spelling.ends[-1] - len(rows) + 1  # where the token of row 0 ends
            ends = spelling.ends[len(spelling.ends) - feed.rows :]
            known = rows[[end - first for end in ends]].index_select(1, self._source)
            translated.append(known.masked_fill_(self._missing, -torch.inf))
            self._ends[feed.slot] += spelling.ends
        return translated

    def _spell(self, feed: Feed) -> _Spelling:
        """Translate a feed into the draft's tokens."""
        length = self.length(feed.slot)
        start = self._end(feed.slot, length)
        spelled: list[int] = []
        ends = []
        tokens = feed.tokens
        if isinstance(tokens, torch.Tensor):
            tokens = tokens.tolist()
        for number, token in enumerate(tokens, length + 1):
            room = _LONGEST * number - start - len(spelled)
            spelled += self._translation.spell(token)[:room]
            ends.append(start + len(spelled))
        if feed.rows:
            first = ends[-feed.rows]
        else:
            first = ends[-1] + 1
        rows = ends[-1] + 1 - first
        return _Spelling(Feed(spelled, rows, feed.slot, prompt=feed.prompt), ends)

    def _end(self, slot: int, length: int) -> int:
        if length:
            return self._ends[slot][length - 1]
        return 0

    def use_threads(self, count: int) -> Sequence[int]:
        return self._runner.use_threads(count)

    def rollback(self, length: int, slot: int = 0) -> None:
        self._runner.rollback(self._end(slot, length), slot)
        del self._ends[slot][length:]

    def fork(self, slot: int, into: int, length: int | None = None, shared: int = 0) -> None:
        if length is None:
            length = self.length(slot)
        self._runner.fork(slot, into, self._end(slot, length), self._end(slot, shared))
        self._ends[into] = self._ends[slot][:length]
