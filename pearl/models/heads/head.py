"""The interface that heads of all kinds have, and the parts of the target that a head needs.

A head reads the target's hidden states of a text, and proposes tokens that follow the text.  With one
forward it proposes one token (`ChainHead`) or a block of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from pearl.models.forward.linear_layers import Matrix
    from pearl.models.forward.quantised import Embedding

Tensors = Mapping[str, torch.Tensor]  # weights of a head, by name
Draw = Callable[[torch.Tensor, int], int]  # (logits [len(ids)], position) -> token


class HeadTarget(NamedTuple):
    """The parts of a target that its head uses.

    Attributes:
        embedding: [vocab, hidden].
        vocab_size: number of token ids.
        features: width of the hidden states that the target keeps for each token; 3 * hidden for most heads.
        context: positions that each slot of the head's cache has room for.
        slots: number of texts that the cache holds.
        output: returns the matrix that computes the target's logits.
    """

    embedding: Embedding
    vocab_size: int
    features: int
    context: int
    slots: int
    output: Callable[[], Matrix]


class HeadToken(NamedTuple):
    """A proposed token, and the head's estimate of the probability that the target accepts it."""

    token: int
    prob: float


Level = list[HeadToken]  # of one position: the head's own draw first, then the likeliest others


class Block:
    """Tokens that a head proposes after a text, each with its runners-up.

    A head adds logits for one position after another.  Each token is drawn from them with the random
    numbers of the target's own draw.

    Attributes:
        levels: the tokens proposed for each position.

    Args:
        ids: see `Head`.
        draw: draws a token from logits [len(ids)], for a position of the text.
        position: the position of the first token.
        most: how many levels are wanted.
        least: no further level is wanted once the product of the drawn tokens' probabilities is
            less than this.
        ranks: number of tokens in a level: the drawn token and its runners-up.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        draw: Draw,
        position: int,
        most: int,
        least: float = 0.0,
        ranks: int = 3,
    ) -> None:
        self.levels: list[Level] = []
        self._ids = ids
        self._draw = draw
        self._position = position
        self._most = most
        self._least = least
        self._ranks = ranks
        self._prob = 1.0

    @property
    def wants_more(self) -> bool:
        return len(self.levels) < self._most and self._prob >= self._least

    def draw(self, logits: torch.Tensor, depth: int) -> int:
        """Draw the token of level `depth` from logits [len(ids)], without adding it."""
        return self._draw(logits, self._position + depth)

    def add(self, logits: torch.Tensor, confidence: float | None = None) -> int:
        """Draw the next token from logits [len(ids)], add its level, and return the token.

        Args:
            confidence: the probability that the target accepts the token, if the head predicts it.
                None: the token's probability by the logits is taken instead.
        """
        token = self.draw(logits, len(self.levels))
        level = self._level(logits, token)
        if confidence is not None:
            level[0] = HeadToken(token, confidence)
        self.levels.append(level)
        self._prob *= level[0].prob
        return token

    def _level(self, logits: torch.Tensor, drawn: int) -> Level:
        probs = logits.softmax(-1)
        top_probs, indices = probs.topk(min(self._ranks, len(logits)))
        ids = self._ids[indices]
        likeliest = dict(zip(ids.tolist(), top_probs.tolist(), strict=True))
        prob = likeliest.pop(drawn, 0.0) or float(probs[self._ids == drawn].sum())
        level = [HeadToken(drawn, prob)]
        for token, share in likeliest.items():
            if share > 0:
                level.append(HeadToken(token, share))
        return level[: self._ranks]


class Head(Protocol):
    """Proposes tokens after a text from the target's hidden states of the text.

    Attributes:
        ids: [logits], the target's token id for each logit. A head may have a smaller vocabulary than its target.
        lengths: for each slot, number of positions whose hidden states are cached. To drop the last
            positions of a slot, lower its number.
        context: positions that a slot has room for.
        deepest: most tokens of a proposal.
    """

    ids: torch.Tensor
    lengths: list[int]
    context: int
    deepest: int
    device: torch.device
    dtype: torch.dtype

    def extend(self, tokens: torch.Tensor, features: torch.Tensor, slot: int) -> None:
        """Read the target's hidden states [n, features] of the slot's next positions.

        Args:
            tokens: [n], the token after each of these positions.
        """
        ...

    def propose(self, block: Block, slot: int) -> None:
        """Add levels to `block` while it wants more.

        The first level follows the last token that `extend` was given. After the call, the slot's
        cache holds the same positions as before the call.
        """
        ...
