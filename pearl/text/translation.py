"""Tokens of a target in the words of a draft that has another vocabulary.

A token that both have, byte for byte, is the same token.  Others are spelled by the draft's tokenizer.  Source: Timor
et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies"
(token-level intersection).
"""

from __future__ import annotations

from collections.abc import Sequence

from pearl.text.stream import Tokenizer, token_bytes

_FILLER = (0,)  # for a token that the draft cannot spell


class Translation:
    """From the target's ids to the draft's.

    Attributes:
        shared: target id -> draft id, each once, of tokens that are the same bytes; and of the ends of texts.
        target: the target's tokenizer.
    """

    def __init__(
        self, target: Tokenizer, draft: Tokenizer, target_eos: Sequence[int] = (), draft_eos: Sequence[int] = ()
    ) -> None:
        self.target, self._draft = target, draft
        of_draft: dict[bytes, int] = {}
        for id in range(draft.vocab_size):
            of_draft.setdefault(token_bytes(draft, id), id)
        of_draft.pop(b"", None)
        self.shared = dict(zip(target_eos, draft_eos, strict=False))
        taken = set(self.shared.values())
        for id in range(target.vocab_size):
            known = of_draft.get(token_bytes(target, id))
            if known is not None and known not in taken and id not in self.shared:
                self.shared[id] = known
                taken.add(known)
        self._spelled: dict[int, tuple[int, ...]] = {}

    def __str__(self) -> str:
        return f"it has {len(self.shared):,} of the target's {self.target.vocab_size:,} tokens"

    def spell(self, token: int) -> tuple[int, ...]:
        """The draft's tokens, at least one, for one of the target's."""
        if (same := self.shared.get(token)) is not None:
            return (same,)
        if token not in self._spelled:
            text = token_bytes(self.target, token).decode("utf-8", "replace")
            self._spelled[token] = tuple(self._draft.encode(text, special=False)) or _FILLER
        return self._spelled[token]
