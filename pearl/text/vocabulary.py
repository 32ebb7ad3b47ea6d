"""The vocabulary of a tokenizer.json, read without its merges.

A tokenizer of 262,144 tokens takes a second to load, and nearly all of it goes into merges. Only
encoding needs merges: decoding a text and comparing two vocabularies need only the entries.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

# A noncharacter of Unicode. A text is split there before it is tokenized, so that no token spans the place.
BREAK = "\ufdd0"
_WITHOUT_MODEL = '{"model": {"type": "BPE", "vocab": {}, "merges": []}, "decoder": %s}'


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]  # a list (Unigram) is in the order of ids


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []
    decoder: msgspec.Raw = msgspec.Raw(b"null")


@dataclass(frozen=True)
class Vocabulary:
    """The entries of a tokenizer.

    Attributes:
        entries: the entry of each id; None for an id without an entry.
        ids: the id of each entry.
        added: entries that `encode` looks for in a text before it splits the text.
        special: the added entries that have no text.
        decoder: a decoder of the `tokenizers` library; None if entries are joined by spaces.
    """

    entries: list[str | None]
    ids: Mapping[str, int]
    added: frozenset[str]
    special: frozenset[str]
    decoder: Any

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` as the library's `decode` writes it; ids without an entry are skipped."""
        tokens = []
        for id in ids:
            entry = self.entries[id] if 0 <= id < len(self.entries) else None
            if entry is not None and entry not in self.special:
                tokens.append(entry)
        if self.decoder is None:
            return " ".join(tokens)
        return str(self.decoder.decode(tokens))


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Return the vocabulary of a tokenizer that the library has loaded.

    `BREAK` is left out, because it is no entry of the checkpoint.
    """
    ids = tokenizer.get_vocab(with_added_tokens=True)
    ids.pop(BREAK, None)
    decoded = tokenizer.get_added_tokens_decoder().values()
    added = [token for token in decoded if token.content != BREAK]
    return _vocabulary(ids, added, tokenizer.decoder)


def _vocabulary(ids: dict[str, int], added_tokens: Collection[Any], decoder: Any) -> Vocabulary:
    # There may be gaps, because the ids of added tokens need not follow directly on the others.
    entries: list[str | None] = [None] * (max(ids.values()) + 1)
    for entry, id in ids.items():
        entries[id] = entry
    added = frozenset(token.content for token in added_tokens)
    special = frozenset(token.content for token in added_tokens if token.special)
    return Vocabulary(entries, ids, added, special, decoder)


def read_vocabulary(file: Path) -> Vocabulary | None:
    """Return the vocabulary of a tokenizer.json; None if the file does not determine all ids.

    The library may give an added token another id than the file states: the id of the model's own
    entry with that text, or else the next free id. If any id differs, only the library can tell the
    ids. Raises `ValueError` or `OSError` if the file cannot be read.
    """
    import tokenizers

    stated = msgspec.json.decode(file.read_bytes(), type=_File)
    ids = _ids_of(stated.model.vocab)
    free = len(ids)
    for token in stated.added_tokens:
        if token.id != ids.get(token.content, free):
            return None
        ids[token.content] = token.id
        free = max(free, token.id + 1)
    if not ids:
        return None
    without_model = _WITHOUT_MODEL % bytes(stated.decoder).decode()
    decoder = tokenizers.Tokenizer.from_str(without_model).decoder
    return _vocabulary(ids, stated.added_tokens, decoder)


def _ids_of(vocab: dict[str, int] | list[tuple[str, float]]) -> dict[str, int]:
    if isinstance(vocab, dict):
        return dict(vocab)
    return {piece: id for id, (piece, _) in enumerate(vocab)}
