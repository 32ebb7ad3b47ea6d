"""The tokenizer that a GGUF file describes, as one of the `tokenizers` library.

What follows from each name of `tokenizer.ggml.pre`, and from what a file leaves open, is as in llama.cpp.  Where an
expression of its only approximates the one that the model was published with, the published one stands here.
"""

from __future__ import annotations

import sys
from typing import Any
from unicodedata import normalize

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pearl.text.stream import REPLACEMENT
from pearl.text.tokenizer import OF_GGUF

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = range(1, 5)  # of the `token_type`
_NEEDED = {"gpt2": ("tokens", "merges"), "llama": ("tokens", "scores")}  # of each `tokenizer.ggml.model`
_USUAL_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}  # of a "llama"
_SPACE = "▁"  # sentencepiece's

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD, _DIGIT, _THREE = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}", r"\p{N}{1,3}"
_SIGNS, _PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = [rf"[^\r\n\p{{L}}\p{{N}}]?{each}" for each in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")]
_CJK, _KANA, _THREE_ASCII = "[一-龥\u0800-一\uac00-\ud7ff]+", "[一-龥\u3040-\u309f\u30a0-\u30ff]+", "[0-9][0-9][0-9]"
_WITH_CASE = (  # the letters that DeepSeek LLM puts together
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7d"
    "ᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_LLAMA3 = "|".join((_ENGLISH, _WORD, _THREE, _SIGNS, _SPACES))
_QWEN2 = "|".join((_ENGLISH, _WORD, _DIGIT, _SIGNS, _SPACES))

# Pre-tokenizers: names, expressions (each splits the pieces that those before it leave), and what else a name implies:
# "whole" (a word that is a token is not made by merges), "bos" (added where the file does not say), "nfc".
_SPLITS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 jais trillion granite-docling", (_GPT2,), ""),
    ("mpt olmo", (_GPT2,), "nfc"),
    ("starcoder refact smollm codeshell exaone minerva-7b mellum2", (_DIGIT, _GPT2), ""),
    ("command-r", (_DIGIT, _GPT2), "nfc"),
    ("falcon", (r"[\p{P}$+<=>^~|`]+", _GPT2, _THREE_ASCII), ""),
    ("default", (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", _THREE_ASCII), ""),
    ("bloom poro-chat gpt3-finnish", (_BLOOM,), ""),
    ("viking", (_BLOOM, _DIGIT), ""),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", (_LLAMA3,), "whole bos"),
    ("glm4 glm5", (_LLAMA3,), "whole"),
    ("dbrx smaug-bpe chatglm-bpe", (_LLAMA3,), ""),
    ("minicpm5", (_THREE, "|".join((_ENGLISH, _WORD, r"\p{N}+", _SIGNS, _SPACES))), "whole"),
    ("qwen2", (_QWEN2,), "nfc"),
    ("stablelm2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan solar-open grok-2", (_QWEN2,), ""),
    ("bailingmoe bailingmoe2 llada-moe", (_QWEN2,), ""),
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
        (r"[\r\n]", rf"\s?[{_WITH_CASE}]+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _CJK, r"\p{N}+"),
        "",
    ),
    ("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT), ""),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", (_THREE, _KANA, f"{_PUNCTUATED}|{_SPACES}"), ""),
)
# Tokens that end a text wherever they are, whatever `eos_token_id` says.
_ENDS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> "
    "[e~[ <|fim_pad|> <fim-pad> <fim_pad> <|fim_repo|> <|repo_name|> <fim-repo> <reponame> <|file_sep|>"
)
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3: spaces behind its other special tokens are not read


def tokenizer_of(reader: Any) -> tuple[Any, list[int]]:
    """The tokenizer of transformers that the file of a `GGUFReader` describes, and the tokens that end a text.

    Exits where it cannot be had exactly.
    """
    from transformers import PreTrainedTokenizerFast

    said = _said(reader)
    ends = _ends(said)
    tokenizer, has_bos = _of_merges(said) if said["model"] == "gpt2" else (_of_scores(said), True)
    _add_special(tokenizer, said)
    _frame(tokenizer, said, has_bos)
    _check(tokenizer, said)
    added = tokenizer.get_added_tokens_decoder()
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: said.get(f"{key}_token_id") for name, key in named.items()}
    about: dict[str, Any] = {f"{name}_token": added[id] for name, id in ids.items() if id in added}  # no ordinary word
    about |= {"chat_template": said.get("chat_template"), OF_GGUF: True}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **about), ends


def _said(reader: Any) -> dict[str, Any]:
    """What the file says of its tokenizer. An id that no token has is as if it were not there."""
    said = {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    said = {name.removeprefix("tokenizer.").removeprefix("ggml."): value for name, value in said.items()}
    model = said.get("model")
    if model not in _NEEDED:
        sys.exit(f"its tokenizer is of the kind {model!r}, which is not read. Take the model as safetensors")
    for name in _NEEDED[model]:
        if name not in said:
            sys.exit(f"it does not say 'tokenizer.ggml.{name}', without which it has no tokenizer")
    tokens = said["tokens"] = [token or f"[EMPTY_{id}]" for id, token in enumerate(said["tokens"])]
    if len(set(tokens)) < len(tokens):
        sys.exit(f"{len(tokens) - len(set(tokens))} of its tokens are there twice")
    size = len(tokens)
    ids = {name: id for name, id in said.items() if name.endswith("_token_id")}
    kept = {name: value for name, value in said.items() if name not in ids or 0 <= value < size}
    usual = _USUAL_IDS if model == "llama" else {}
    general = reader.fields.get("general.name")
    return usual | kept | {"name": str(general.contents()) if general else ""}


def _ends(said: dict[str, Any]) -> list[int]:
    """The ids that end a text, that of `eos_token_id` first. These are control tokens, whatever the file says."""
    tokens, names = said["tokens"], {*_ENDS.split()}
    kinds = said["token_type"] = [*said.get("token_type", [_NORMAL] * len(tokens))]
    found = [said[f"{key}_token_id"] for key in _END_KEYS if f"{key}_token_id" in said]
    for id, token in enumerate(tokens):
        if token in names or (token == "</s>" and kinds[id] == _CONTROL):  # in some vocabularies a word of HTML
            found.append(id)
    for id in found:
        kinds[id] = _CONTROL
    return list(dict.fromkeys(found))


def _of_merges(said: dict[str, Any]) -> tuple[Tokenizer, bool]:
    """A byte-level BPE, and whether texts begin with BOS where the file does not say."""
    name = said.get("pre") or "default"
    found = next(((splits, implied) for names, splits, implied in _SPLITS if name in names.split()), None)
    if found is None:
        sys.exit(f"its pre-tokenizer is {name!r}, which is not read. Take the model as safetensors")
    expressions, implied = found
    ids = {token: id for id, token in enumerate(said["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in said["merges"]]
    try:
        tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges="whole" in implied))
    except Exception as error:  # of no other class
        sys.exit(f"its merges do not fit its tokens: {error}")
    if "nfc" in implied:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in expressions]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, "bos" in implied


def _of_scores(said: dict[str, Any]) -> Tokenizer:
    """Sentencepiece's BPE: of two neighbours that are a token, those with the highest score are merged first."""
    tokens, kinds, scores = said["tokens"], said["token_type"], said["scores"]
    if not (has_prefix := _has_prefix(said)):
        # Tokens of spaces are then found in what the normalizer leaves, and have the names that they have elsewhere.
        known = {*tokens}
        for id, token in enumerate(tokens):
            if kinds[id] == _USER_DEFINED and (name := token.replace(" ", _SPACE)) not in known:
                tokens[id] = name
    ids = {token: id for id, token in enumerate(tokens)}
    found = {token for token, id in ids.items() if kinds[id] not in (_UNKNOWN, _CONTROL, _USER_DEFINED)}
    ranked = sorted(found, key=lambda token: (-scores[ids[token]], ids[token]))
    merges = [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in found and token[cut:] in found
    ]
    unknown = tokens[said["unknown_token_id"]] if "unknown_token_id" in said else None
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend(_SPACE)] * has_prefix
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] * has_prefix
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _has_prefix(said: dict[str, Any]) -> bool:
    """Whether a space is put before each text, and before what follows a special token."""
    return bool(said["model"] == "llama" and said.get("add_space_prefix", True))


def _add_special(tokenizer: Tokenizer, said: dict[str, Any]) -> None:
    """Makes each control and user-defined token one that is found in texts before they are split."""
    strips = "phi-3" in (name := said["name"].lower()) or "phi3" in name
    is_normalized = said["model"] == "llama" and not _has_prefix(said)
    added = [
        AddedToken(
            token,
            rstrip=strips and token not in _NOT_STRIPPED,
            normalized=is_normalized and kind == _USER_DEFINED,
            special=kind != _USER_DEFINED,
        )
        for token, kind in zip(said["tokens"], said["token_type"], strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _frame(tokenizer: Tokenizer, said: dict[str, Any], has_bos: bool) -> None:
    """What stands before and behind each text."""
    adds = {"bos": said.get("add_bos_token", has_bos), "eos": said.get("add_eos_token", False)}
    ends = {name: said.get(f"{name}_token_id") for name in adds if adds[name]}
    if missing := [name for name, id in ends.items() if id is None]:
        sys.exit(f"it adds a token to each text and does not say which: 'tokenizer.ggml.{missing[0]}_token_id'")
    around = [{"id": name, "ids": [id], "tokens": [said["tokens"][id]]} for name, id in ends.items()]
    first, last = "bos " * ("bos" in ends), " eos" * ("eos" in ends)
    tokenizer.post_processor = processors.TemplateProcessing(f"{first}$A{last}", f"{first}$A $B{last}", around)


def _check(tokenizer: Tokenizer, said: dict[str, Any]) -> None:
    """Exits unless special tokens are their own ids, no id is made up, and tokens read back give their text."""
    tokens, kinds = said["tokens"], said["token_type"]
    alphabet = {*pre_tokenizers.ByteLevel.alphabet()}
    if tokenizer.get_vocab_size() != len(tokens):
        sys.exit(f"its tokenizer would have {tokenizer.get_vocab_size()} tokens, and the file has {len(tokens)}")
    for id, kind in enumerate(kinds):
        if kind in (_CONTROL, _USER_DEFINED) and tokenizer.encode(tokens[id], add_special_tokens=False).ids != [id]:
            sys.exit(f"its token {tokens[id]!r} is not read as itself")
    for id in range(0, len(tokens), max(1, len(tokens) // 500)):
        text = tokenizer.decode([id])
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        is_read = said["model"] == "llama" or alphabet.issuperset(tokens[id])  # else no text has it
        if not is_read or REPLACEMENT in text or any(kinds[each] == _USER_DEFINED for each in ids):
            continue
        if normalize("NFC", again := tokenizer.decode(ids)) != normalize("NFC", text):
            sys.exit(f"its token {id} is {text!r}, which is read as {again!r}")
