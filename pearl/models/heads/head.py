"""What drafting asks of a head of any kind, and what a head takes of its target."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class HeadTarget(NamedTuple):
    """What a head takes of its target.

    Attributes:
        embedding: [vocab, hidden].
        vocab_size: number of token ids.
        features: numbers of hidden states that the target keeps of each token.
        context, slots: positions and texts that the head has room for.
    """

    embedding: torch.Tensor
    vocab_size: int
    features: int
    context: int
    slots: int


class Head(Protocol):
    """Guesses the token that follows each token, from it and the target's hidden states of the token before it.

    Attributes:
        ids: the target's token id of each of the head's logits.
        lengths: of each slot, how many tokens its cache holds; set a smaller one to forget the last tokens.
        context: tokens that a slot has room for.
    """

    ids: torch.Tensor
    lengths: list[int]
    context: int
    device: torch.device
    dtype: torch.dtype

    def fused(self, features: torch.Tensor) -> torch.Tensor:
        """The states [n, hidden] that the head reads, of the target's hidden states [n, features]."""
        ...

    def read(
        self, tokens: torch.Tensor, states: torch.Tensor, slot: int, guessed: int = 0
    ) -> torch.Tensor:
        """The outputs [n, hidden] for tokens [n], each read with the states [n, hidden] of the token before it.

        Args:
            states: of the target, or the head's own outputs, which it reads where it drafts on by itself.
            guessed: how many tokens before these were read with the head's own outputs, these included.
        """
        ...

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """The logits [n, len(ids)] of outputs [n, hidden], float32."""
        ...
