"""A block drafter as a draft model: a `ModelRunner` whose logits are the rows of blocks.

A block (see `dflash`) attends to the target's states of the text before it.  The target has no
states of tokens that it has not verified yet.  So a block begins with its anchor, the first token
that has no state.  The drafted tokens after the anchor take the places of the block's first mask
tokens, so that the rows after them see them.  The block may have too few rows for these tokens and
a guess.  Then the anchor is the text's last token, and stands at the position after the last state.

Each token that is fed after a block was computed takes the block's next row, which costs no
forward.  A new block is computed when the rows are used up, after a rollback, and in each fork.  So
a branch, which is a fork that continues another possible outcome of the verification, has a block of
its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pearl.models.cpu import native
from pearl.models.feeds import Feed
from pearl.models.heads.dflash import DFlashHead, TextEnd
from pearl.models.heads.head import Block
from pearl.models.heads.runner import StatesRunner
from pearl.models.runner import Capabilities, check_feeds


class _Rows(Block):
    """A `Block` that takes its tokens from a list, and keeps the logits after the last token."""

    def __init__(self, ids: torch.Tensor, tokens: Sequence[int]) -> None:
        super().__init__(ids, self._given, 0, len(tokens) + 1)
        self.logits = torch.empty(0)
        self._tokens = tokens

    def _given(self, logits: torch.Tensor, position: int) -> int:
        if position < len(self._tokens):
            return self._tokens[position]
        return 0  # nobody reads this token

    def add(self, logits: torch.Tensor, confidence: float | None = None) -> int:
        """See `Block.add`. The logits are kept; the added level is empty, as nobody reads it."""
        self.logits = logits
        token = self.draw(logits, len(self.levels))
        self.levels.append([])
        return token


@dataclass
class _Text:
    """The text of a slot.

    Attributes:
        tokens: all tokens of the text.
        first: position of the first token for which the head has the target's state.
        anchor: index in `tokens` of the block's anchor.
        states: the states of the block [size, hidden]; None if the next row needs a new block.
    """

    tokens: list[int] = field(default_factory=list)
    first: int = 0
    anchor: int = 0
    states: torch.Tensor | None = None


class BlockRunner(StatesRunner):
    """Drafts with the rows of blocks.

    As in a `HeadRunner`, the logits depend on when the target's states arrive.

    Args:
        head: a head whose cache has room for `slots` texts.
        vocab_size: number of the target's token ids.
    """

    def __init__(self, head: DFlashHead, vocab_size: int, slots: int) -> None:
        self.head = head
        self.vocab_size = vocab_size
        self.context = head.context
        self.device = head.device
        self.weights = head.weights
        self.capabilities = Capabilities(slots=slots)
        self.features = head.features
        self._texts = [_Text() for _ in range(slots)]

    def length(self, slot: int = 0) -> int:
        return len(self._texts[slot].tokens)

    def use_threads(self, count: int) -> Sequence[int]:
        if native.library() is None:
            return super().use_threads(count)
        return native.use_threads(count)

    def extend(self, start: int, features: torch.Tensor, slot: int) -> None:
        """See `StatesRunner.extend`.

        If states of positions before `start` are missing, the head drops all states that it has
        read, and begins again with the states from `start` on.
        """
        head = self.head
        text = self._texts[slot]
        end = text.first + head.lengths[slot]
        if start > end:
            text.first = start
            head.lengths[slot] = 0
            end = start
        new_states = features[end - start : max(0, self.context - start)].to(self.device)
        if len(new_states):
            head.cache_states(new_states, slot)

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        check_feeds(feeds, self, "a block drafter")
        return [self._fed(feed) for feed in feeds]

    def _fed(self, feed: Feed) -> torch.Tensor:
        text = self._texts[feed.slot]
        text.tokens += torch.as_tensor(feed.tokens).tolist()
        logits = torch.full((feed.rows, self.vocab_size), -torch.inf, device=self.device)
        end = len(text.tokens)
        for row, length in enumerate(range(end - feed.rows + 1, end + 1)):
            logits[row, self.head.ids] = self._row(feed.slot, length)
        return logits

    def _row(self, slot: int, length: int) -> torch.Tensor:
        """Return the logits [the head's vocabulary] after the text's first `length` tokens."""
        text = self._texts[slot]
        head = self.head
        if text.states is None or not 0 <= length - 1 - text.anchor < head.deepest:
            self._begin_block(slot, length)
        assert text.states is not None
        rows = _Rows(head.ids, text.tokens[text.anchor + 1 : length])
        before = text.tokens[max(0, text.anchor - 1)]
        head.add_levels(rows, text.states, TextEnd(before, text.tokens[text.anchor]))
        return rows.logits

    def _begin_block(self, slot: int, length: int) -> None:
        """Compute a block with a row that guesses the token after the text's first `length` tokens."""
        text = self._texts[slot]
        head = self.head
        text.anchor = text.first + head.lengths[slot]
        if not 0 <= length - 1 - text.anchor < head.deepest:
            text.anchor = length - 1
        text.states = head.block_states(text.tokens[text.anchor : length], slot)

    def rollback(self, length: int, slot: int = 0) -> None:
        text = self._texts[slot]
        if length >= len(text.tokens):
            return
        del text.tokens[length:]
        text.states = None
        text.first = min(text.first, length)
        lengths = self.head.lengths
        lengths[slot] = max(0, min(lengths[slot], length - text.first))

    def fork(self, slot: int, into: int, length: int | None = None, shared: int = 0) -> None:
        text = self._texts[slot]
        end = len(text.tokens) if length is None else length
        self.head.copy(slot, into, max(0, min(self.head.lengths[slot], end - text.first)))
        self._texts[into] = _Text(text.tokens[:end], text.first)
