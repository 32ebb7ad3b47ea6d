"""The interface that heads of all kinds have, and the parts of the target that a head needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

Tensors = Mapping[str, torch.Tensor]  # weights of a head, by name


class HeadTarget(NamedTuple):
    """The parts of a target that its head uses.

    Attributes:
        embedding: [vocab, hidden].
        vocab_size: number of token ids.
        features: width of the hidden states that the target keeps for each token; 3 * hidden for most EAGLE-3 heads.
        context: positions that each slot of the head's cache has room for.
        slots: number of texts that the cache holds.
    """

    embedding: torch.Tensor
    vocab_size: int
    features: int
    context: int
    slots: int


class Head(Protocol):
    """Guesses token i + 1 of a text from token i and the target's hidden states at position i - 1.

    Attributes:
        ids: [logits], the target's token id for each logit. A head may have a smaller vocabulary than its target.
        lengths: number of cached tokens in each slot. Lower it to drop the last ones.
        context: tokens that a slot has room for.
    """

    ids: torch.Tensor
    lengths: list[int]
    context: int
    device: torch.device
    dtype: torch.dtype

    def fused(self, features: torch.Tensor) -> torch.Tensor:
        """Reduce the target's hidden states [n, features] to the states [n, hidden] that the head reads."""
        ...

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
        ...

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, len(ids)] of outputs [n, hidden], float32."""
        ...


class DraftHead(Head, Protocol):
    """A head that can also be a draft, in a process of its own.

    Attributes:
        hidden: width of the head's outputs.
        features: width of the target's hidden states that the head reads for each token.
        weights: the type of its weights, as in `ModelRunner`.
    """

    hidden: int
    features: int
    weights: str

    def copy(self, slot: int, into: int, start: int, end: int) -> None:
        """Copy the cached tokens from `start` to `end` into slot `into`, whose length becomes `end`."""
        ...
