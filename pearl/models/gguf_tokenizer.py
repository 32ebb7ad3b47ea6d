"""The tokenizer that a GGUF file describes, as one of the `tokenizers` library: by a table of how texts are cut.

The names of `tokenizer.ggml.pre` and what follows from each are llama.cpp's. Where its expression only comes near the
one that the model was published with, the published one stands here.  Knows nothing of weights.
"""

from __future__ import annotations

import sys
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # of the `token_type`
_SPACE = "▁"

_ENGLISH, _END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGIT, _THREE, _NUMBER = r"\p{N}", "[0-9][0-9][0-9]", r"\p{N}{1,3}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
# Of each pre-tokenizer: its expressions, each of which cuts what the ones before have left; and, of "bos" (it is added
# where the file does not say), "whole" (a word that is a token is not merged) and "nfc", what else it does.
_CUTS: dict[str, tuple[tuple[str, ...], str]] = {
    "smollm": ((_DIGIT, _GPT2), ""),
    "qwen2": ((_QWEN2,), "nfc"),
    "default": ((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", _THREE), ""),
}


def tokenizer_of(reader: Any) -> Any:
    """The tokenizer of transformers that the file of a `GGUFReader` describes. Exits where it cannot be made."""
    from transformers import PreTrainedTokenizerFast

    said = {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    said = {name.removeprefix("tokenizer.").removeprefix("ggml."): value for name, value in said.items()}
    tokens = said["tokens"]
    kinds = said.get("token_type") or [_NORMAL] * len(tokens)
    expressions, _ = _CUTS[said.get("pre", "default")]
    merges = [tuple(merge.split(" ")) for merge in said["merges"]]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    cuts = [pre_tokenizers.Split(Regex(each), "isolated") for each in expressions]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {f"{name}_token": tokens[said[f"{key}_token_id"]] for name, key in names.items() if f"{key}_token_id" in said}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=said.get("chat_template"), **special)
