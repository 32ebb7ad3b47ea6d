"""The one interface between the runtime and a model. Knows nothing of drafts, targets, windows or processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from pearl.errors import RequestError

Tokens = Sequence[int] | torch.Tensor  # [n]


def check_room(tokens: Tokens, end: int, context: int, vocab_size: int) -> None:
    """Raises `RequestError` where `tokens`, ending at position `end`, cannot be fed: before anything has changed."""
    if end > context:
        raise RequestError(
            f"{end} tokens do not fit the context of {context}. Shorten the prompt, lower "
            "max_tokens, or load the model with a larger context."
        )
    if isinstance(tokens, torch.Tensor):
        return
    # On a GPU an id outside the table would abort the whole process, not this request.
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise RequestError(
            f"A token id lies outside the model's vocabulary of {vocab_size}: "
            "the prompt was made with another model's tokenizer."
        )


class ModelRunner(Protocol):
    """A causal language model with a KV cache that can be rolled back; one sequence, batch size 1.

    Attributes:
        vocab_size: number of token ids that the logits cover (the model's own count, padding ids included).
        context: the most tokens the cache can hold.
        length: tokens in the cache now.
        device: where the logits live.
        launches: whether a forward of few tokens returns before it is done: it can then be fed a token yet to be drawn.
        row_invariant: whether the logits of a position are the same bits however its sequence was cut into forwards.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def launches(self) -> bool: ...

    @property
    def row_invariant(self) -> bool: ...

    @property
    def length(self) -> int: ...

    def forward(self, tokens: Tokens, rows: int) -> torch.Tensor:
        """Appends `tokens` to the cache; logits [rows, vocab_size], float32, of the last `rows` of them.

        A tensor of ids stands on the device, perhaps not yet computed there: nobody looks whether they are sound.

        Row j holds the logits for the position after fed token len(tokens) - rows + j. 0 <= rows <= len(tokens), and
        tokens is not empty.  Raises `RequestError` where the context would overflow (the cache is then unchanged).
        The tensor is the caller's to keep: a later forward does not overwrite it.
        """
        ...

    def rollback(self, length: int) -> None:
        """Forgets all but the first `length` tokens, in O(1). 0 <= length <= self.length.

        A forward after a rollback gives what it would have given on a cache filled from scratch.
        """
        ...

    def synchronize(self) -> None:
        """Waits until the device has done all that was asked of it; at once on a CPU."""
        ...


class WrappedRunner:
    """A `ModelRunner` that passes everything on to another; what wraps a runner overrides what it changes."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def context(self) -> int:
        return self._runner.context

    @property
    def device(self) -> torch.device:
        return self._runner.device

    @property
    def launches(self) -> bool:
        return self._runner.launches

    @property
    def row_invariant(self) -> bool:
        return self._runner.row_invariant

    @property
    def length(self) -> int:
        return self._runner.length

    def forward(self, tokens: Tokens, rows: int) -> torch.Tensor:
        return self._runner.forward(tokens, rows)

    def rollback(self, length: int) -> None:
        self._runner.rollback(length)

    def synchronize(self) -> None:
        self._runner.synchronize()
