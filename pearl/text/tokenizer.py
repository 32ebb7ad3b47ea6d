"""Tokenizers of checkpoints, and how a checkpoint wants to be sampled: tokenizer files and generation_config.json.

Takes directories; `pearl.models.checkpoints.tokenizers` finds them by name.  Imports transformers, which takes a
process a second, only for a checkpoint without tokenizer.json, whose tokenizer it converts.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pearl.config import RequestOptions
from pearl.errors import ConfigError, ModelError
from pearl.text.chat_template import chat_prompt, render
from pearl.text.stream import Tokenizer, Tools, check_characters

FILES = (  # of a tokenizer, and of how to sample
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken"),
    *("chat_template*", "additional_chat_templates/*", "generation_config.json"),
)

# Options that change which tokens come out, if not one of `_NEUTRAL`; and those that do so under sampling.
_UNSUPPORTED = (
    *("encoder_repetition_penalty", "num_beams", "guidance_scale", "no_repeat_ngram_size", "min_length"),
    *("encoder_no_repeat_ngram_size", "min_new_tokens", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"),
    *("stop_strings", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
    *("dola_layers", "watermarking_config", "penalty_alpha", "token_healing", "sequence_bias"),
)
_UNSUPPORTED_SAMPLING = ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
_NEUTRAL: tuple[object, ...] = (None, 0, 1, [], {})
_SUPPORTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class GenerationDefaults:
    """The generation settings of a checkpoint, the defaults of a request.

    temperature 0: greedy. top_k 0, top_p 1, min_p 0, repetition_penalty 1: off. max_tokens None: up to the context.
    `ignored` names options of its generation_config.json that would change the text but are not supported, or whose
    values are invalid, such as a top_k of -1.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    eos: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()
    repetition_penalty: float = 1.0
    max_tokens: int | None = None

    @property
    def sampling(self) -> dict[str, float]:
        """The defaults of a request's fields, by their names."""
        return {name: getattr(self, name) for name in _SUPPORTED}

    def __str__(self) -> str:
        """For example "temperature 0.6, top_k 20"; "greedy" where nothing is drawn."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
        usual = GenerationDefaults()
        stated = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) != getattr(usual, name)]
        return ", ".join(stated if self.temperature else ["greedy", *stated])


class FileTokenizer(Tokenizer):
    """The tokenizer of a directory with tokenizer.json, as the `tokenizers` library reads it.

    transformers' settings add special tokens and chat templates, one of which may be for tools ("tool_use").

    Attributes:
        eos: its own end token.
    """

    def __init__(self, directory: Path) -> None:
        import tokenizers

        settings = _json(directory / "tokenizer_config.json")
        self._tokenizer = tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        named, listed = _special_tokens(_json(directory / "special_tokens_map.json") | settings)
        self._special = {name: _content(token) for name, token in named.items()}
        known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
        for _, given in sorted(settings.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
            if given["content"] not in known:
                tokenizer.add_tokens([tokenizers.AddedToken(**given)])
        for token in (*named.values(), *listed):
            content = _content(token)
            if content not in known or not known[content].special:
                tokenizer.add_special_tokens([_as_special(token)])
        self.eos: int | None = tokenizer.token_to_id(self._special.get("eos_token", ""))
        templates = _templates(directory, settings)
        self.chat_template = templates.get("default", "")
        self.tool_template = templates.get("tool_use", "")
        pieces = {id: piece for piece, id in tokenizer.get_vocab(with_added_tokens=True).items()}
        self.vocab_size = max(pieces) + 1  # added tokens may lie beyond a gap
        self._pieces = [pieces.get(id) for id in range(self.vocab_size)]

    def encode(self, text: str, special: bool = True) -> list[int]:
        # As a batch of one: `encode` would hold the interpreter lock, for seconds on a long prompt.
        (encoded,) = self._tokenizer.encode_batch_fast([check_characters(text)], add_special_tokens=special)
        return list(encoded.ids)

    def decode(self, ids: Sequence[int]) -> str:
        known = [id for id in ids if self.token(id) is not None]  # a model's padding ids mean nothing
        return str(self._tokenizer.decode(known, skip_special_tokens=True))

    def chat_text(self, messages: list[dict[str, Any]], tools: Tools = None, **variables: Any) -> str | None:
        template = self.chat_template
        if tools is not None and self.tool_template:
            template = self.tool_template
        if not template:
            return None
        return chat_prompt(partial(render, template, tools, self._special, variables=variables), messages)

    def token(self, id: int) -> str | None:
        return self._pieces[id] if 0 <= id < self.vocab_size else None


def _json(file: Path) -> dict[str, Any]:
    """What a checkpoint's file holds; nothing where it is missing. Raises `ValueError`, `OSError`."""
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _special_tokens(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The special tokens that settings name, which templates may use, and those that they only list.

    A token is its text, or a mapping whose `content` is its text. Only names in "_token" are of tokens, except in
    `extra_special_tokens`, which transformers 5 writes as a mapping of any names, or as a list.
    """
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    listed = extra if isinstance(extra, list) else settings.get("additional_special_tokens") or []
    named = {name: token for name, token in settings.items() if name.endswith("_token")}
    if isinstance(extra, dict):
        named |= extra
    named |= settings.get("model_specific_special_tokens") or {}
    tokens = {name: token for name, token in named.items() if _content(token)}
    return tokens, [token for token in listed if _content(token)]


def _content(token: Any) -> str:
    """The text of a token; empty for what is no token."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _as_special(token: Any) -> Any:
    """The token as `tokenizers` has it: a mapping also states whether spaces beside it belong to it."""
    import tokenizers

    if isinstance(token, str):
        return token
    flags = {name: flag for name, flag in token.items() if name in ("single_word", "lstrip", "rstrip", "normalized")}
    return tokenizers.AddedToken(token["content"], special=True, **flags)


def _templates(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name; files win over tokenizer_config.json."""
    given = settings.get("chat_template") or []
    found = {"default": given} if isinstance(given, str) else {one["name"]: one["template"] for one in given}
    found |= {file.stem: file.read_text("utf-8") for file in directory.glob("additional_chat_templates/*.jinja")}
    if (file := directory / "chat_template.jinja").is_file():
        found["default"] = file.read_text("utf-8")
    elif isinstance(of_processor := _json(directory / "chat_template.json").get("chat_template"), str):
        found.setdefault("default", of_processor)  # of a model that reads pictures too
    return found


def have_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> bool:
    """Whether every id that both have is the same token. Ids of only one are padding."""
    return next(_different(target, draft), None) is None


def _different(target: Tokenizer, draft: Tokenizer) -> Iterator[int]:
    ids = range(min(target.vocab_size, draft.vocab_size))
    return (id for id in ids if target.token(id) != draft.token(id))


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer, target_name: str, draft_name: str) -> None:
    """Raise `ModelError` unless `have_same_vocabulary`."""
    for id in _different(target, draft):
        raise ModelError(
            f"{target_name!r} and {draft_name!r} have different vocabularies: token {id} is {target.token(id)!r} "
            f"in the target and {draft.token(id)!r} in the draft. Choose a draft of the target's own family."
        )


def vocabulary_digest(tokenizer: Tokenizer, size: int) -> bytes:
    """BLAKE2b, 16 bytes, of the first `size` ids' tokens: for `check_same_vocabulary` between processes."""
    return hashlib.blake2b(json.dumps([tokenizer.token(id) for id in range(size)]).encode(), digest_size=16).digest()


def load(directory: Path, trust_remote_code: bool) -> tuple[Tokenizer, GenerationDefaults]:
    """The tokenizer in a directory, and how the checkpoint wants to be sampled."""
    if (directory / "tokenizer.json").is_file():
        tokenizer = FileTokenizer(directory)
    else:
        from transformers import AutoTokenizer

        converted = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
        if not converted.is_fast:
            raise ValueError(f"{type(converted).__name__} has no fast version")
        with TemporaryDirectory() as scratch:
            converted.save_pretrained(scratch)
            tokenizer = FileTokenizer(Path(scratch))
    return tokenizer, _defaults(directory, tokenizer.eos)


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy what a checkpoint says of its tokenizer and of how to sample it. Raises `OSError`."""
    for file in (file for pattern in FILES for file in source.glob(pattern) if file.is_file()):
        (copy := directory / file.relative_to(source)).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def _defaults(directory: Path, tokenizer_eos: int | None) -> GenerationDefaults:
    """The settings as transformers' generate() reads them. The EOS may be in config.json instead.

    transformers' own defaults (GenerationConfig._get_default_generation_params: top_k 50) apply only where the
    checkpoint samples. On a greedy one a request with a temperature gets no such filter.
    """
    config = _json(directory / "generation_config.json")
    if config.get("eos_token_id") is None:
        model = _json(directory / "config.json")
        found = (one.get("eos_token_id") for one in (model, model.get("text_config") or {}))
        config["eos_token_id"] = next((eos for eos in found if eos is not None), None)
    samples = bool(config.get("do_sample"))
    named = {name: config.get(name) for name in _SUPPORTED} | {"max_tokens": config.get("max_new_tokens")}
    given = {name: value for name, value in named.items() if value is not None}
    invalid = {name: value for name, value in given.items() if not _is_valid(name, value)}
    unset = {"temperature": 1.0, "top_k": 0 if "top_k" in given else 50} if samples else {}
    taken = {name: value for name, value in given.items() if name not in invalid}
    numbers: dict[str, Any] = {
        name: int(value) if name in ("top_k", "max_tokens") else float(value) for name, value in (unset | taken).items()
    }
    ignored = (
        *unsupported_options(config, samples),
        *(f"general.sampling.{option}" for option in config.get("general.sampling", ())),  # of a GGUF file
        *(f"{name} {value}" for name, value in invalid.items()),
        *(f"eos_token_id {token!r}" for token in _listed(config["eos_token_id"]) if not _is_whole(token)),
    )
    eos = tokenizer_eos if config["eos_token_id"] is None else config["eos_token_id"]
    greedy = {} if samples else {"temperature": 0.0}
    return GenerationDefaults(**numbers | greedy, eos=_ids(eos), ignored=ignored)


def _is_valid(name: str, value: Any) -> bool:
    """Whether a request could have this value; an invalid one counts as unset, so that requests still work.

    A temperature too small for float32 is valid here, and refused with each request that names no other.
    """
    if name == "temperature":
        return 0 <= float(value) < math.inf
    try:
        RequestOptions(**{name: value})
    except ConfigError:
        return False
    return True


def _ids(eos: Any) -> tuple[int, ...]:
    """The ids that end a text, each once, without those that no token has (such as -1). 2.0 is 2, as in `generate`."""
    given = [int(token) for token in _listed(eos) if _is_whole(token)]
    return tuple(dict.fromkeys(token for token in given if 0 <= token < 2**31))


def _listed(eos: Any) -> list[Any]:
    return [token for token in (eos if isinstance(eos, list) else [eos]) if token is not None]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def unsupported_options(config: Mapping[str, Any], samples: bool) -> tuple[str, ...]:
    known = (*_UNSUPPORTED, *(_UNSUPPORTED_SAMPLING if samples else ()))
    return tuple(name for name in known if config.get(name) not in _NEUTRAL)
