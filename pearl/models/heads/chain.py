"""Heads that draft one token with each forward.

Each drafted token is read with the head's output for the token before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from pearl.models.heads.head import Block

_DEEPEST = 8  # tokens of a chain


class ChainHead(ABC):
    """Guesses token i + 1 of a text from token i and the target's hidden states at position i - 1.

    For a drafted token, the target has no states yet: the head then reads its own outputs in their
    place.  For the methods see `Head`.
    """

    deepest = _DEEPEST
    ids: torch.Tensor
    lengths: list[int]
    context: int
    device: torch.device
    dtype: torch.dtype

    def __init__(self) -> None:
        self._last_outputs: dict[
            int, torch.Tensor
        ] = {}  # by slot: [1, hidden], for the last token read

    @abstractmethod
    def fused(self, features: torch.Tensor) -> torch.Tensor:
        """Reduce the target's hidden states [n, features] to the states [n, hidden] that the head reads."""

    @abstractmethod
    def read(
        self, tokens: torch.Tensor, states: torch.Tensor, slot: int, guessed: int = 0
    ) -> torch.Tensor:
        """Run the head on tokens [n], which continue a slot, and return its outputs [n, hidden].

        Args:
            states: [n, hidden]; row i belongs to the token before tokens[i]. They are the target's, after `fused`, or,
                for drafted tokens, the head's own outputs.
            guessed: how many of the slot's last tokens, including `tokens`, are drafted ones. A head with a sliding
                window widens it by this number.
        """

    @abstractmethod
    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, len(ids)] of outputs [n, hidden], float32."""

    def extend(self, tokens: torch.Tensor, features: torch.Tensor, slot: int) -> None:
        """See `Head.extend`."""
        self._last_outputs[slot] = self.read(tokens, self.fused(features), slot)[-1:]

    def propose(self, block: Block, slot: int) -> None:
        """See `Head.propose`."""
        length = self.lengths[slot]
        output = self._last_outputs[slot]
        while True:
            (logits,) = self.logits(output)
            token = block.add(logits)
            if not block.wants_more:
                break
            ids = torch.tensor([token], device=self.device)
            output = self.read(ids, output, slot, guessed=len(block.levels))
        self.lengths[slot] = length


class DraftHead(ChainHead):
    """A head that can also be a draft, in a process of its own.

    Attributes:
        hidden: width of the head's outputs.
        features: width of the target's hidden states that the head reads for each token.
        weights: the type of its weights, as in `ModelRunner`.
    """

    hidden: int
    features: int
    weights: str

    @abstractmethod
    def copy(self, slot: int, into: int, start: int, end: int) -> None:
        """Copy the cached tokens from `start` to `end` into slot `into`, whose length becomes `end`."""
