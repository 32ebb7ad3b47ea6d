"""The interface of heads of any kind, and what a head needs from its target."""

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
        features: numbers of hidden states that the target keeps of each token.
        context, slots: size of the head's cache, in positions and texts.
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
        """Reduce the target's hidden states [n, features] to the states [n, hidden] that the head reads."""
        ...

    def read(
        self, tokens: torch.Tensor, states: torch.Tensor, slot: int, guessed: int = 0
    ) -> torch.Tensor:
        """Return the outputs [n, hidden] for tokens [n], each read with the states [n, hidden] of the token before it.

        Args:
            states: the target's, or the head's own outputs where it drafts on by itself.
            guessed: how many of the slot's last tokens, `tokens` included, are read with the head's own outputs.
        """
        ...

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, len(ids)] of outputs [n, hidden], float32."""
        ...


class DraftHead(Head, Protocol):
    """A head that can also be a draft, in a process of its own.

    Attributes:
        hidden: numbers of its states.
        features: numbers of the target's states that it reads of each token.
        weights: their type, as in `ModelRunner`.
    """

    hidden: int
    features: int
    weights: str

    def copy(self, slot: int, into: int, start: int, end: int) -> None:
        """Copy the cached tokens from `start` to `end` of a slot to another one, which then ends there."""
        ...
