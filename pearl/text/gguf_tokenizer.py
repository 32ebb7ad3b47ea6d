"""Builds the tokenizer that a GGUF file describes, with the `tokenizers` library.

The names of `tokenizer.ggml.pre`, and the defaults of fields that a file lacks, mean what they mean
in llama.cpp. Some regular expressions of llama.cpp only approximate those of the published model;
in such cases we use the published ones.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize

import yaml
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from pearl.text.stream import REPLACEMENT

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = range(1, 5)  # values of `token_type`
_NEEDED = {"gpt2": ("tokens", "merges"), "llama": ("tokens", "scores")}  # `tokenizer.ggml.model`
_USUAL_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}  # defaults of a "llama"
_SPACE = "▁"  # sentencepiece's
_PRETOKENIZERS = Path(__file__).with_name("pretokenizers.yaml")


class _Pretokenizer(NamedTuple):
    """How a byte-level BPE splits texts before it merges; pretokenizers.yaml describes the fields."""

    names: str
    splits: Sequence[Sequence[str]]
    flags: str = ""


# Tokens that end a text wherever they are, whatever `eos_token_id` says.
_ENDS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> "
    "[e~[ <|ifm|im_end|> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> "
    "<reponame> <|file_sep|>"
)
# Tokens of `_ENDS` that end no text if the vocabulary has all tokens of one of these sets. In the
# format of gpt-oss and Solar, "<|end|>" closes the reasoning, and the answer follows. In Gemma 4's
# vocabulary, "</s>" is a word of HTML.
_CLOSES_REASONING = (
    "<|return|> <|call|>",
    "<|return|> <|calls|>",
    "<|call|> <|flush|>",
    "<|calls|> <|flush|>",
)
_NOT_ENDS = {"<|end|>": _CLOSES_REASONING, "</s>": ("<|tool_response>",)}
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Special tokens of Phi-3 that do not swallow the spaces after them; all its other special tokens do.
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")


def tokenizer_of(fields: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any], list[int]]:
    """Return a file's tokenizer, its tokenizer_config.json, and the ids that end a text.

    Raises `ValueError` if the tokenizer cannot be reproduced exactly.

    `fields`: the metadata of the GGUF file.
    """
    stated = _stated(fields)
    ends = _ends(stated)
    has_bos = True
    if stated["model"] == "gpt2":
        tokenizer, has_bos = _of_merges(stated)
    else:
        tokenizer = _of_scores(stated)
    _add_special(tokenizer, stated)
    _frame(tokenizer, stated, has_bos)
    _check(tokenizer, stated)
    added = tokenizer.get_added_tokens_decoder()
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        id = stated.get(f"{key}_token_id")
        if id in added:  # no ordinary word
            config[f"{name}_token"] = added[id].content
    config["chat_template"] = _templates(stated)
    return tokenizer, config, ends


def _templates(stated: dict[str, Any]) -> dict[str, str] | str | None:
    """Return the chat template; if there is another one for tools, return both by name.

    Any further templates are ignored.
    """
    default = stated.get("chat_template")
    tool_use = stated.get("chat_template.tool_use")
    if tool_use is None:
        return default
    if default is None:
        return {"tool_use": tool_use}
    return {"default": default, "tool_use": tool_use}


def _stated(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the tokenizer's fields by short names, such as "tokens" for "tokenizer.ggml.tokens".

    Special ids beyond the vocabulary are left out. Raises `ValueError` if the tokenizer is of an
    unknown kind, lacks a field, or has a token twice.
    """
    stated = {}
    for name, value in fields.items():
        if name.startswith("tokenizer."):
            stated[name.removeprefix("tokenizer.").removeprefix("ggml.")] = value
    model = stated.get("model")
    if model not in _NEEDED:
        raise ValueError(
            f"its tokenizer is of the kind {model!r}, which is not read. Take the model as safetensors"
        )
    for name in _NEEDED[model]:
        if name not in stated:
            raise ValueError(
                f"it does not say 'tokenizer.ggml.{name}', without which it has no tokenizer"
            )
    tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(stated["tokens"])]
    num_duplicates = len(tokens) - len(set(tokens))
    if num_duplicates:
        raise ValueError(f"{num_duplicates} of its tokens are there twice")
    stated["tokens"] = tokens
    for name, value in list(stated.items()):
        if name.endswith("_token_id") and not 0 <= value < len(tokens):
            del stated[name]
    if model == "llama":
        stated = _USUAL_IDS | stated
    stated["name"] = str(fields.get("general.name", ""))
    return stated


def _ends(stated: dict[str, Any]) -> list[int]:
    """Return the ids that end a text, `eos_token_id` first.

    The function also changes `stated`: these ids become control tokens, whatever type the file
    gives them.
    """
    tokens = stated["tokens"]
    kinds = list(stated.get("token_type", [_NORMAL] * len(tokens)))
    stated["token_type"] = kinds
    ids = []
    for key in _END_KEYS:
        if f"{key}_token_id" in stated:
            ids.append(stated[f"{key}_token_id"])
    names = set(_ENDS.split())
    for id, token in enumerate(tokens):
        # In some vocabularies "</s>" is a word of HTML.
        if token in names or (token == "</s>" and kinds[id] == _CONTROL):
            ids.append(id)
    end_ids = {}
    for id in ids:
        kinds[id] = _CONTROL
        end_ids[tokens[id]] = id
    for name, sets in _NOT_ENDS.items():
        if any(end_ids.keys() >= set(token_set.split()) for token_set in sets):
            end_ids.pop(name, None)
    return list(end_ids.values())


def _of_merges(stated: dict[str, Any]) -> tuple[Tokenizer, bool]:
    """Return a byte-level BPE, and whether texts begin with BOS by default.

    A setting in the file takes precedence over this default.
    """
    pretokenizer = _pretokenizer(stated.get("pre") or "default")
    ids = {token: id for id, token in enumerate(stated["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in stated["merges"]]
    try:
        bpe = models.BPE(ids, merges, ignore_merges="whole" in pretokenizer.flags)
        tokenizer = Tokenizer(bpe)
    except Exception as error:  # tokenizers raises no narrower class
        raise ValueError(f"its merges do not fit its tokens: {error}") from error
    if "nfc" in pretokenizer.flags:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    for alternatives in pretokenizer.splits:
        expression = "|".join(alternatives)
        steps.append(pre_tokenizers.Split(Regex(expression), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, "bos" in pretokenizer.flags


def _pretokenizer(name: str) -> _Pretokenizer:
    table = yaml.safe_load(_PRETOKENIZERS.read_text(encoding="utf-8"))
    for entry in table["pretokenizers"]:
        pretokenizer = _Pretokenizer(**entry)
        if name in pretokenizer.names.split():
            return pretokenizer
    raise ValueError(
        f"its pre-tokenizer is {name!r}, which is not read. Take the model as safetensors"
    )


def _of_scores(stated: dict[str, Any]) -> Tokenizer:
    """Return sentencepiece's BPE.

    In each step, this BPE merges the two neighbours that make the token of the highest score.
    """
    tokens = stated["tokens"]
    kinds = stated["token_type"]
    has_prefix = _has_prefix(stated)
    if not has_prefix:
        # Without a prefix, texts are searched for user-defined tokens after normalisation, when
        # spaces have become "▁".
        entries = set(tokens)
        for id, token in enumerate(tokens):
            name = token.replace(" ", _SPACE)
            if kinds[id] == _USER_DEFINED and name not in entries:
                tokens[id] = name
    ids = {token: id for id, token in enumerate(tokens)}
    unknown = None
    if "unknown_token_id" in stated:
        unknown = tokens[stated["unknown_token_id"]]
    bpe = models.BPE(
        ids, _merges(ids, stated), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(bpe)
    normal: list[Any] = [normalizers.Replace(" ", _SPACE)]
    decoding: list[Any] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if has_prefix:
        normal.insert(0, normalizers.Prepend(_SPACE))
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(normal)
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges(ids: dict[str, int], stated: dict[str, Any]) -> list[tuple[str, str]]:
    """Return all pairs of words that make a third word when they are joined.

    The pairs are sorted by the score of the third word, the highest score first. For example, if
    the words are "a", "c", "ab", "bc" and "abc", then the pairs are ("a", "bc") and ("ab", "c").
    """
    kinds = stated["token_type"]
    scores = stated["scores"]
    special = (_UNKNOWN, _CONTROL, _USER_DEFINED)
    words = {token for token, id in ids.items() if kinds[id] not in special}
    merges = []
    for token in sorted(words, key=lambda token: (-scores[ids[token]], ids[token])):
        for cut in range(1, len(token)):
            left = token[:cut]
            right = token[cut:]
            if left in words and right in words:
                merges.append((left, right))
    return merges


def _has_prefix(stated: dict[str, Any]) -> bool:
    """Return whether a space is put before each text, and before the text after a special token."""
    return bool(stated["model"] == "llama" and stated.get("add_space_prefix", True))


def _add_special(tokenizer: Tokenizer, stated: dict[str, Any]) -> None:
    """Add the unknown, control and user-defined tokens.

    Texts are searched for these tokens before they are split.
    """
    name = stated["name"].lower()
    strips = "phi-3" in name or "phi3" in name
    is_normalized = stated["model"] == "llama" and not _has_prefix(stated)
    special_tokens = []
    for token, kind in zip(stated["tokens"], stated["token_type"], strict=True):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            entry = AddedToken(
                token,
                rstrip=strips and token not in _NOT_STRIPPED,
                normalized=is_normalized and kind == _USER_DEFINED,
                special=kind != _USER_DEFINED,
            )
            special_tokens.append(entry)
    tokenizer.add_tokens(special_tokens)


def _frame(tokenizer: Tokenizer, stated: dict[str, Any], has_bos: bool) -> None:
    """Set the tokens that are put before and after each text.

    For example, in the template "bos $A eos", $A stands for the text.
    """
    template = "$A"
    pair = "$A $B"
    frame_tokens = []
    if stated.get("add_bos_token", has_bos):
        frame_tokens.append(_frame_token(stated, "bos"))
        template = f"bos {template}"
        pair = f"bos {pair}"
    if stated.get("add_eos_token", False):
        frame_tokens.append(_frame_token(stated, "eos"))
        template = f"{template} eos"
        pair = f"{pair} eos"
    tokenizer.post_processor = processors.TemplateProcessing(template, pair, frame_tokens)


def _frame_token(stated: dict[str, Any], name: str) -> dict[str, Any]:
    id = stated.get(f"{name}_token_id")
    if id is None:
        raise ValueError(
            f"it adds a token to each text and does not say which: 'tokenizer.ggml.{name}_token_id'"
        )
    return {"id": name, "ids": [id], "tokens": [stated["tokens"][id]]}


def _check(tokenizer: Tokenizer, stated: dict[str, Any]) -> None:
    """Raise `ValueError` if the tokenizer differs from the one in the file.

    The tokenizer must have as many tokens as the file, and encode each special token to its own id.
    The texts of about 500 tokens are encoded and decoded, and must stay the same (compared in NFC).
    """
    tokens = stated["tokens"]
    kinds = stated["token_type"]
    size = tokenizer.get_vocab_size()
    if size != len(tokens):
        raise ValueError(f"its tokenizer would have {size} tokens, and the file has {len(tokens)}")
    for id, kind in enumerate(kinds):
        if kind in (_CONTROL, _USER_DEFINED):
            encoding = tokenizer.encode(tokens[id], add_special_tokens=False)
            if encoding.ids != [id]:
                raise ValueError(f"its token {tokens[id]!r} is not read as itself")
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    for id in range(0, len(tokens), max(1, len(tokens) // 500)):
        if stated["model"] != "llama" and not alphabet.issuperset(tokens[id]):
            continue  # no text has it
        text = tokenizer.decode([id])
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if REPLACEMENT in text or any(kinds[read_id] == _USER_DEFINED for read_id in ids):
            continue
        decoded = tokenizer.decode(ids)
        if normalize("NFC", decoded) != normalize("NFC", text):
            raise ValueError(f"its token {id} is {text!r}, which is read as {decoded!r}")
