"""Tokenizers with few tokens.

One is byte-level like GPT-2's, one falls back to bytes like Llama 2's, and one has a token per
character.
"""

import functools
import re
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pearl.text.tokenizer import FileTokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CORPUS = ["hello world, hello there 😀😃", "the cat sat on the mat. 你好世界", "the end\n\n"]


def read(made: PreTrainedTokenizerFast) -> FileTokenizer:
    with TemporaryDirectory() as directory:
        made.save_pretrained(directory)
        return FileTokenizer(Path(directory))


@functools.cache
def byte_level() -> FileTokenizer:
    """Return a tokenizer like GPT-2's: tokens are byte strings, and an emoji takes several."""
    return read(byte_level_files())


@functools.cache
def byte_level_files() -> PreTrainedTokenizerFast:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = list(SPECIAL.values())
    backend.train_from_iterator(
        CORPUS * 3,
        trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=alphabet, special_tokens=names, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


@functools.cache
def byte_fallback() -> FileTokenizer:
    """Return a tokenizer like Llama 2's.

    A space is part of the word after it. Characters that are in no word become byte tokens.
    """
    return read(byte_fallback_files())


@functools.cache
def byte_fallback_files() -> PreTrainedTokenizerFast:
    words = sorted({"▁" + word for line in CORPUS for word in line.split() if word.isascii()})
    letters = sorted({letter for word in words for letter in word[1:]})
    pieces = [*SPECIAL.values(), *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *words, *letters]
    backend = Backend(
        models.Unigram([(piece, -1.0) for piece in pieces], unk_id=2, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


Messages = list[dict[str, str]]
NAMES = {id: name for name, id in SPECIAL.items()}


class Characters:
    """A tokenizer with a token for each character, and two special tokens."""

    vocab_size = 1 << 17
    chat_template = ""

    def __init__(self, template: Callable[[Messages], str] | None) -> None:
        self._template = template

    def encode(self, text: str, special: bool = True) -> list[int]:
        parts = re.split("(<s>|<e>)", text)
        ids = [[SPECIAL[part]] if part in SPECIAL else [ord(c) for c in part] for part in parts]
        return [ord("^")] * special + list(chain.from_iterable(ids))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(NAMES.get(id) or chr(id) for id in ids)

    def chat_text(self, messages: Messages, tools: object = None) -> str | None:
        return self._template(messages) if self._template else None

    def apply_chat(self, messages: Messages) -> list[int] | None:
        text = self.chat_text(messages)
        return None if text is None else self.encode(text, special=False)

    def token(self, id: int) -> str | None:
        return chr(id)

    def tokens(self) -> list[str | None]:
        return list(map(self.token, range(self.vocab_size)))
