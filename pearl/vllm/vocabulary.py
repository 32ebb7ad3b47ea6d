"""The vocabulary of vLLM's target, for comparison with the draft's vocabulary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pearl.protocol.messages import Hello


class Vocabulary:
    """The tokens of a vocabulary, by id.

    Args:
        ids: maps each token to its id. An id that does not occur has no token.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        size = 1 + max(ids.values(), default=-1)
        self._tokens: list[str | None] = [None] * size
        for token, id in ids.items():
            self._tokens[id] = token

    @staticmethod
    def of(model_config: Any) -> Vocabulary:
        """Return the vocabulary of vLLM's target; an empty one if vLLM runs without a tokenizer."""
        if model_config.skip_tokenizer_init:
            return Vocabulary({})
        from vllm.tokenizers import cached_tokenizer_from_config

        return Vocabulary(cached_tokenizer_from_config(model_config).get_vocab())

    @property
    def size(self) -> int:
        return len(self._tokens)

    def digest(self, size: int) -> bytes:
        """Return a hash of the first `size` tokens.

        It equals the result of `pearl.text.tokenizer.vocabulary_digest`.
        """
        return _digest(self._tokens[:size])

    def misfit(self, hello: Hello) -> str:
        """Return how the draft's vocabulary differs from the target's.

        The result is empty if the two are the same, or if they cannot be compared.
        """
        if (
            not 0 < hello.vocab_size <= self.size
            or self.digest(hello.vocab_size) == hello.vocab_digest
        ):
            return ""
        return (
            f"its {hello.vocab_size:,} tokens are others than the target's. Choose a draft of the target's family, or "
            "start the service with --target NAME, whose tokenizer it then translates"
        )


def _digest(tokens: Sequence[str | None]) -> bytes:
    return hashlib.blake2b(json.dumps(tokens).encode(), digest_size=16).digest()
