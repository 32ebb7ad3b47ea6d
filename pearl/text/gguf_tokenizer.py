"""The tokenizer that a GGUF file describes, as one of the `tokenizers` library.

The meaning of each name of `tokenizer.ggml.pre`, and of what a file leaves open, is llama.cpp's.  Where one of its
expressions only approximates the one that the model was published with, we use the published one.
"""

from __future__ import annotations

from typing import Any
from unicodedata import normalize

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

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = range(1, 5)  # of the `token_type`
_NEEDED = {
    "gpt2": ("tokens", "merges"),
    "llama": ("tokens", "scores"),
}  # of each `tokenizer.ggml.model`
_USUAL_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}  # of a "llama"
_SPACE = "▁"  # sentencepiece's

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD, _DIGIT, _THREE = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}", r"\p{N}{1,3}"
_SIGNS, _PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = [
    rf"[^\r\n\p{{L}}\p{{N}}]?{each}" for each in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
]
_CJK, _THREE_ASCII = "[一-龥\u0800-一\uac00-\ud7ff]+", "[0-9][0-9][0-9]"
_WITH_CASE = (  # the letters that DeepSeek LLM puts together
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7d"
    "ᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = "|".join((_ENGLISH, _WORD, _THREE, _SIGNS, _SPACES))
_QWEN2 = "|".join((_ENGLISH, _WORD, _DIGIT, _SIGNS, _SPACES))

# Pre-tokenizers: names, expressions (each splits the pieces of those before it), and what else a name implies:
# "whole" (a word that is a token is not made by merges), "bos" (added unless the file states otherwise), "nfc".
_SPLITS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 jais trillion granite-docling", (_GPT2,), ""),
    ("starcoder refact smollm codeshell exaone minerva-7b mellum2", (_DIGIT, _GPT2), ""),
    ("default", (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", _THREE_ASCII), ""),
    ("viking", (r" ?[^(\s|.,!?…。，、।۔،)]+", _DIGIT), ""),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", (_LLAMA3,), "whole bos"),
    ("glm4 glm5", (_LLAMA3,), "whole"),
    ("dbrx smaug-bpe chatglm-bpe", (_LLAMA3,), ""),
    ("qwen2", (_QWEN2,), "nfc"),
    ("stablelm2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan solar-open grok-2", (_QWEN2,), ""),
    ("seed-coder", ("|".join((_ENGLISH, _WORD, _DIGIT, r" ?[^\s\p{L}\p{N}]+", _SPACES)),), ""),
    ("ufakzeka", ("|".join((_WORD, _DIGIT, _SIGNS, _SPACES)),), ""),
    ("tekken", ("|".join((*_CASED, _DIGIT, _PATHS, _SPACES)),), "whole bos"),
    (
        "gpt-4o llama4 kanana2 talkie minimax-m2",
        ("|".join((*(f"{each}{_ENGLISH}?" for each in _CASED), _THREE, _PATHS, _SPACES)),),
        "",
    ),
    (
        "deepseek-llm",
        (
            r"[\r\n]",
            rf"\s?[{_WITH_CASE}]+",
            r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        ),
        "",
    ),
    ("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT), ""),
)
# Tokens that end a text wherever they are, whatever `eos_token_id` says.
_ENDS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> "
    "[e~[ <|ifm|im_end|> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> "
    "<reponame> <|file_sep|>"
)
# Tokens of `_ENDS` that end no text where the vocabulary has all tokens of a set: in the format of gpt-oss and Solar
# "<|end|>" closes the reasoning, and the answer follows; in Gemma 4's vocabulary "</s>" is a word of HTML.
_CLOSES_REASONING = (
    "<|return|> <|call|>",
    "<|return|> <|calls|>",
    "<|call|> <|flush|>",
    "<|calls|> <|flush|>",
)
_NOT_ENDS = {"<|end|>": _CLOSES_REASONING, "</s>": ("<|tool_response>",)}
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_NOT_STRIPPED = (
    "<unk>",
    "<s>",
    "<|endoftext|>",
)  # of Phi-3: spaces behind its other special tokens are not read


def tokenizer_of(fields: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any], list[int]]:
    """The tokenizer that a file with these fields describes, its tokenizer_config.json, and the tokens that end a text.

    Raises `ValueError` where it cannot be reproduced exactly.
    """
    stated = _stated(fields)
    ends = _ends(stated)
    tokenizer, has_bos = (
        _of_merges(stated) if stated["model"] == "gpt2" else (_of_scores(stated), True)
    )
    _add_special(tokenizer, stated)
    _frame(tokenizer, stated, has_bos)
    _check(tokenizer, stated)
    added = tokenizer.get_added_tokens_decoder()
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: stated.get(f"{key}_token_id") for name, key in named.items()}
    about: dict[str, Any] = {}
    for name, id in ids.items():
        if id in added:  # no ordinary word
            about[f"{name}_token"] = added[id].content
    about["chat_template"] = _templates(stated)
    return tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", **about}, ends


def _templates(stated: dict[str, Any]) -> dict[str, str] | str | None:
    """The chat template, or templates by name. Of those with names only "tool_use" is ever taken."""
    templates = {
        "default": stated.get("chat_template"),
        "tool_use": stated.get("chat_template.tool_use"),
    }
    if templates["tool_use"] is None:
        return templates["default"]
    return {name: template for name, template in templates.items() if template is not None}


def _stated(fields: dict[str, Any]) -> dict[str, Any]:
    """What the file states of its tokenizer, without ids that no token has."""
    stated = {name: value for name, value in fields.items() if name.startswith("tokenizer.")}
    stated = {
        name.removeprefix("tokenizer.").removeprefix("ggml."): value
        for name, value in stated.items()
    }
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
    tokens = stated["tokens"] = [
        token or f"[EMPTY_{id}]" for id, token in enumerate(stated["tokens"])
    ]
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"{len(tokens) - len(set(tokens))} of its tokens are there twice")
    size = len(tokens)
    ids = {name: id for name, id in stated.items() if name.endswith("_token_id")}
    kept = {name: value for name, value in stated.items() if name not in ids or 0 <= value < size}
    usual = _USUAL_IDS if model == "llama" else {}
    return usual | kept | {"name": str(fields.get("general.name", ""))}


def _ends(stated: dict[str, Any]) -> list[int]:
    """The ids that end a text, that of `eos_token_id` first; made control tokens, whatever the file states."""
    tokens, names = stated["tokens"], {*_ENDS.split()}
    kinds = stated["token_type"] = [*stated.get("token_type", [_NORMAL] * len(tokens))]
    found = [stated[f"{key}_token_id"] for key in _END_KEYS if f"{key}_token_id" in stated]
    for id, token in enumerate(tokens):
        if token in names or (
            token == "</s>" and kinds[id] == _CONTROL
        ):  # in some vocabularies a word of HTML
            found.append(id)
    for id in found:
        kinds[id] = _CONTROL
    ends = {tokens[id]: id for id in found}
    for name, sets in _NOT_ENDS.items():
        if any(ends.keys() >= {*names.split()} for names in sets):
            ends.pop(name, None)
    return list(ends.values())


def _of_merges(stated: dict[str, Any]) -> tuple[Tokenizer, bool]:
    """A byte-level BPE, and whether texts begin with BOS unless the file states otherwise."""
    name = stated.get("pre") or "default"
    found = next(
        ((splits, implied) for names, splits, implied in _SPLITS if name in names.split()), None
    )
    if found is None:
        raise ValueError(
            f"its pre-tokenizer is {name!r}, which is not read. Take the model as safetensors"
        )
    expressions, implied = found
    ids = {token: id for id, token in enumerate(stated["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in stated["merges"]]
    try:
        tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges="whole" in implied))
    except Exception as error:  # of no other class
        raise ValueError(f"its merges do not fit its tokens: {error}") from error
    if "nfc" in implied:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in expressions]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, "bos" in implied


def _of_scores(stated: dict[str, Any]) -> Tokenizer:
    """Sentencepiece's BPE: merges the neighbours first whose token has the highest score."""
    tokens, kinds, scores = stated["tokens"], stated["token_type"], stated["scores"]
    if not (has_prefix := _has_prefix(stated)):
        # Tokens of spaces are then found in normalised text, and have the names of other files.
        known = {*tokens}
        for id, token in enumerate(tokens):
            if kinds[id] == _USER_DEFINED and (name := token.replace(" ", _SPACE)) not in known:
                tokens[id] = name
    ids = {token: id for id, token in enumerate(tokens)}
    found = {
        token for token, id in ids.items() if kinds[id] not in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    }
    ranked = sorted(found, key=lambda token: (-scores[ids[token]], ids[token]))
    merges = [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in found and token[cut:] in found
    ]
    unknown = tokens[stated["unknown_token_id"]] if "unknown_token_id" in stated else None
    tokenizer = Tokenizer(
        models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = [normalizers.Prepend(_SPACE)] * has_prefix
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] * has_prefix
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _has_prefix(stated: dict[str, Any]) -> bool:
    """Whether a space is put before each text, and before what follows a special token."""
    return bool(stated["model"] == "llama" and stated.get("add_space_prefix", True))


def _add_special(tokenizer: Tokenizer, stated: dict[str, Any]) -> None:
    """Add each control and user-defined token as one that is found in texts before they are split."""
    strips = "phi-3" in (name := stated["name"].lower()) or "phi3" in name
    is_normalized = stated["model"] == "llama" and not _has_prefix(stated)
    added = [
        AddedToken(
            token,
            rstrip=strips and token not in _NOT_STRIPPED,
            normalized=is_normalized and kind == _USER_DEFINED,
            special=kind != _USER_DEFINED,
        )
        for token, kind in zip(stated["tokens"], stated["token_type"], strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _frame(tokenizer: Tokenizer, stated: dict[str, Any], has_bos: bool) -> None:
    """Set what is put before and after each text."""
    adds = {"bos": stated.get("add_bos_token", has_bos), "eos": stated.get("add_eos_token", False)}
    ends = {name: stated.get(f"{name}_token_id") for name in adds if adds[name]}
    if missing := [name for name, id in ends.items() if id is None]:
        raise ValueError(
            f"it adds a token to each text and does not say which: 'tokenizer.ggml.{missing[0]}_token_id'"
        )
    around = [
        {"id": name, "ids": [id], "tokens": [stated["tokens"][id]]} for name, id in ends.items()
    ]
    first, last = "bos " * ("bos" in ends), " eos" * ("eos" in ends)
    tokenizer.post_processor = processors.TemplateProcessing(
        f"{first}$A{last}", f"{first}$A $B{last}", around
    )


def _check(tokenizer: Tokenizer, stated: dict[str, Any]) -> None:
    """Raise unless special tokens encode to their own ids, no id is invented, and a token's text encodes to itself."""
    tokens, kinds = stated["tokens"], stated["token_type"]
    alphabet = {*pre_tokenizers.ByteLevel.alphabet()}
    if (size := tokenizer.get_vocab_size()) != len(tokens):
        raise ValueError(f"its tokenizer would have {size} tokens, and the file has {len(tokens)}")
    for id, kind in enumerate(kinds):
        if kind in (_CONTROL, _USER_DEFINED) and tokenizer.encode(
            tokens[id], add_special_tokens=False
        ).ids != [id]:
            raise ValueError(f"its token {tokens[id]!r} is not read as itself")
    for id in range(0, len(tokens), max(1, len(tokens) // 500)):
        text = tokenizer.decode([id])
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        is_read = stated["model"] == "llama" or alphabet.issuperset(
            tokens[id]
        )  # else no text has it
        if not is_read or REPLACEMENT in text or any(kinds[each] == _USER_DEFINED for each in ids):
            continue
        if normalize("NFC", again := tokenizer.decode(ids)) != normalize("NFC", text):
            raise ValueError(f"its token {id} is {text!r}, which is read as {again!r}")
