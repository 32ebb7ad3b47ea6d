"""Datastores of a few documents."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pearl.drafting import datastore, datastore_build
from pearl.drafting.datastore import Datastore, width_of
from pearl.models.checkpoints.tokenizers import ToyTokenizer
from pearl.text.tokenizer import vocabulary_digest

VOCAB = 6
Texts = Sequence[Sequence[int]]


@cache
def described(vocab: int) -> dict[str, Any]:
    digest = vocabulary_digest(ToyTokenizer(vocab), vocab).hex()
    return {
        "tokenizer": f"toy:vocab={vocab}",
        "digest": digest,
        "vocab_size": vocab,
        "width": width_of(vocab),
    }


def make(directory: Path, texts: Texts, vocab: int = VOCAB, **options: Any) -> Datastore:
    """Write a datastore of these documents, and open it."""
    tokenizer = ToyTokenizer(vocab)
    tokens, count = datastore_build.pack(
        [tokenizer.decode(text) for text in texts], tokenizer, width_of(vocab)
    )
    datastore.write(directory, tokens, **described(vocab), documents=count, **options)
    return Datastore(directory)
