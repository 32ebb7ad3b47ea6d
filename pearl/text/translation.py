"""Tokens of a target in the words of a draft that has another vocabulary.

A token that both have, byte for byte, is the same token.  Others are spelled by the draft's tokenizer.  Source: Timor
et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies"
(token-level intersection).
"""

from __future__ import annotations

from collections.abc import Sequence

from pearl.text.stream import Tokenizer, is_byte_piece, token_bytes

_FILLER = (0,)  # for a token that the draft cannot spell


class Translation:
    """From the target's ids to the draft's.

    Attributes:
        shared: target id -> draft id, each once, of tokens that are the same bytes; and of ends of texts beyond these.
        target: the target's tokenizer.
    """

    def __init__(
        self,
        target: Tokenizer,
        draft: Tokenizer,
        target_eos: Sequence[int] = (),
        draft_eos: Sequence[int] = (),
    ) -> None:
        self.target, self._draft = target, draft
        self._of_draft: dict[bytes, int] = {}
        for id in _characters_first(draft):
            self._of_draft.setdefault(token_bytes(draft, id), id)
        self._of_draft.pop(b"", None)
        self.shared: dict[int, int] = {}
        taken = set[int]()
        for id in _characters_first(target):
            known = self._of_draft.get(token_bytes(target, id))
            if known is not None and known not in taken:
                self.shared[id] = known
                taken.add(known)
        ours = (id for id in target_eos if id not in self.shared)
        theirs = (id for id in draft_eos if id not in taken)
        self.shared |= dict(zip(ours, theirs, strict=False))
        self._spelled: dict[int, tuple[int, ...]] = {}

    def __str__(self) -> str:
        return f"it has {len(self.shared):,} of the target's {self.target.vocab_size:,} tokens"

    def spell(self, token: int) -> tuple[int, ...]:
        """The draft's tokens, at least one, for one of the target's."""
        if (same := self.shared.get(token)) is not None:
            return (same,)
        if token not in self._spelled:
            self._spelled[token] = self._spell(token_bytes(self.target, token)) or _FILLER
        return self._spelled[token]

    def _spell(self, spelled: bytes) -> tuple[int, ...]:
        try:
            text = spelled.decode()
        except UnicodeDecodeError:  # part of a character
            return tuple(
                self._of_draft[one] for byte in spelled if (one := bytes([byte])) in self._of_draft
            )
        # Behind a line feed, for at the start of a text some tokenizers add a space.
        before, found = (self._draft.encode(f"\n{part}", special=False) for part in ("", text))
        if found[: len(before)] == before:
            return tuple(found[len(before) :])
        return tuple(self._draft.encode(text, special=False))


def _characters_first(tokenizer: Tokenizer) -> list[int]:
    """All ids, those of bytes such as "<0x2E>" last: a vocabulary that has them writes "." otherwise where it can."""
    return sorted(
        range(tokenizer.vocab_size), key=lambda id: is_byte_piece(tokenizer.token(id) or "")
    )
