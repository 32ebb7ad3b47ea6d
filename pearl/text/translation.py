"""Translates a target's tokens to those of a draft that has another vocabulary.

Tokens with the same bytes are the same token. Any other token is spelled with tokens of the draft.
Source: Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms
for Heterogeneous Vocabularies" (token-level intersection).
"""

from collections.abc import Sequence

from pearl.text.stream import Tokenizer, is_byte_piece, token_bytes

_FILLER = (0,)  # for a token that the draft cannot spell


class Translation:
    """Translates the target's ids to the draft's ids.

    Attributes:
        shared: maps target ids to draft ids, for tokens with the same bytes, and for further tokens
            that end texts. An id occurs at most once on each side.
        target: the target's tokenizer.
    """

    def __init__(
        self,
        target: Tokenizer,
        draft: Tokenizer,
        target_eos: Sequence[int] = (),
        draft_eos: Sequence[int] = (),
    ) -> None:
        self.target = target
        self._draft = draft
        self._of_draft: dict[bytes, int] = {}
        for id in _characters_first(draft):
            self._of_draft.setdefault(token_bytes(draft, id), id)
        self._of_draft.pop(b"", None)
        self.shared: dict[int, int] = {}
        shared_draft_ids = set[int]()
        for id in _characters_first(target):
            draft_id = self._of_draft.get(token_bytes(target, id))
            if draft_id is not None and draft_id not in shared_draft_ids:
                self.shared[id] = draft_id
                shared_draft_ids.add(draft_id)
        target_ends = [id for id in target_eos if id not in self.shared]
        draft_ends = [id for id in draft_eos if id not in shared_draft_ids]
        self.shared.update(zip(target_ends, draft_ends, strict=False))
        self._spelled: dict[int, tuple[int, ...]] = {}

    def __str__(self) -> str:
        return f"it has {len(self.shared):,} of the target's {self.target.vocab_size:,} tokens"

    def spell(self, token: int) -> tuple[int, ...]:
        """Return the draft's tokens, at least one, that stand for a token of the target.

        A token that the draft cannot spell becomes the id 0.
        """
        draft_id = self.shared.get(token)
        if draft_id is not None:
            return (draft_id,)
        if token not in self._spelled:
            self._spelled[token] = self._spell(token_bytes(self.target, token)) or _FILLER
        return self._spelled[token]

    def _spell(self, spelling: bytes) -> tuple[int, ...]:
        try:
            text = spelling.decode()
        except UnicodeDecodeError:  # part of a character
            tokens = []
            for byte in spelling:
                token = self._of_draft.get(bytes([byte]))
                if token is not None:
                    tokens.append(token)
            return tuple(tokens)
        # Encode it after a line feed, because some tokenizers add a space at the start of a text.
        prefix = self._draft.encode("\n", special=False)
        tokens = self._draft.encode(f"\n{text}", special=False)
        if tokens[: len(prefix)] == prefix:
            return tuple(tokens[len(prefix) :])
        return tuple(self._draft.encode(text, special=False))


def _characters_first(tokenizer: Tokenizer) -> list[int]:
    """Return all ids, with the ids of byte tokens such as "<0x2E>" last.

    A tokenizer writes "." with its token ".", not with the byte token, so "." has to come first.
    """
    ids = range(tokenizer.vocab_size)
    return sorted(ids, key=lambda id: is_byte_piece(tokenizer.token(id) or ""))
