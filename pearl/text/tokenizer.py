"""Tokenizers of checkpoints, and how a checkpoint wants to be sampled: tokenizer files and generation_config.json.

Takes directories; `pearl.models.checkpoints.tokenizers` finds them by name.  Imports transformers, which takes a
process a second, only for a checkpoint without tokenizer.json, whose tokenizer it converts.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pearl.config import RequestOptions
from pearl.errors import ConfigError, ModelError
from pearl.text.chat_template import chat_prompt, render
from pearl.text.stream import Tokenizer, Tools, check_characters
from pearl.text.vocabulary import Vocabulary, read_vocabulary, vocabulary_of

FILES = (  # patterns of the files of a tokenizer, and of how to sample
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
)

# Options that change which tokens come out, if not one of `_NEUTRAL`; and those that do so under sampling.
_UNSUPPORTED = (
    "encoder_repetition_penalty",
    "num_beams",
    "guidance_scale",
    "no_repeat_ngram_size",
    "min_length",
    "encoder_no_repeat_ngram_size",
    "min_new_tokens",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "stop_strings",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "dola_layers",
    "watermarking_config",
    "penalty_alpha",
    "token_healing",
    "sequence_bias",
)
_UNSUPPORTED_SAMPLING = ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
_NEUTRAL: tuple[object, ...] = (None, 0, 1, [], {})
_SETTINGS: dict[str, type[int] | type[float]] = {  # supported ones, by their names in requests
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "max_tokens": int,
}
_NAMES_IN_FILE = {"max_tokens": "max_new_tokens"}
_TOP_K = 50  # transformers' default for a checkpoint that samples


@dataclass(frozen=True)
class GenerationDefaults:
    """The generation settings of a checkpoint, the defaults of a request.

    temperature 0: greedy. top_k 0, top_p 1, min_p 0, repetition_penalty 1: off. max_tokens None: up to the context.
    `ignored` names options of its generation_config.json that would change the text but are not supported, and those
    whose values are invalid, such as a top_k of -1.
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
        """The defaults of a request's sampling fields, by their names."""
        return {name: getattr(self, name) for name in _SETTINGS if name != "max_tokens"}

    def __str__(self) -> str:
        """Return for example "temperature 0.6, top_k 20"; it begins with "greedy" if nothing is drawn."""
        parts = []
        if not self.temperature:
            parts.append("greedy")
        for name in _SETTINGS:
            value = getattr(self, name)
            if value != getattr(GenerationDefaults, name):
                parts.append(f"{name} {value}")
        return ", ".join(parts)


class FileTokenizer(Tokenizer):
    """The tokenizer of a directory with tokenizer.json, as the `tokenizers` library reads it.

    transformers' settings add special tokens and chat templates, one of which may be for tools ("tool_use").

    Args:
        encodes: whether the merges are read now; otherwise with the first text that is encoded.

    Attributes:
        eos: the end token that the tokenizer itself names.
    """

    def __init__(self, directory: Path, encodes: bool = True) -> None:
        self._file = directory / "tokenizer.json"
        settings = _json(directory / "tokenizer_config.json")
        named, listed = _special_tokens(_json(directory / "special_tokens_map.json") | settings)
        self._named = named
        self._listed = listed
        self._special = {name: _content(token) for name, token in named.items()}
        self._added = _added_tokens(settings)
        templates = _templates(directory, settings)
        self.chat_template = templates.get("default", "")
        self.tool_template = templates.get("tool_use", "")
        if encodes:
            self.encode("")  # loads the merges
        self._vocabulary = self._read_vocabulary()
        self.vocab_size = len(self._vocabulary.entries)
        self.eos: int | None = self._vocabulary.ids.get(self._special.get("eos_token", ""))

    def _read_vocabulary(self) -> Vocabulary:
        """Return the file's vocabulary; the library's if the settings add tokens."""
        vocabulary = read_vocabulary(self._file)
        if vocabulary is None:
            return vocabulary_of(self._tokenizer)
        added = {token["content"] for token in self._added}
        special = frozenset(map(_content, self._special_tokens()))
        if not added <= vocabulary.added or not special <= vocabulary.ids.keys():
            return vocabulary_of(self._tokenizer)
        return replace(vocabulary, special=vocabulary.special | special)

    def _special_tokens(self) -> list[Any]:
        return [*self._named.values(), *self._listed]

    @cached_property
    def _tokenizer(self) -> Any:
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(str(self._file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        entries = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
        for token in self._added:
            if token["content"] not in entries:
                tokenizer.add_tokens([tokenizers.AddedToken(**token)])
        for token in self._special_tokens():
            entry = entries.get(_content(token))
            if entry is None or not entry.special:
                tokenizer.add_special_tokens([_as_special(token)])
        return tokenizer

    def encode(self, text: str, special: bool = True) -> list[int]:
        # As a batch of one: `encode` would hold the interpreter lock, for seconds on a long prompt.
        (encoded,) = self._tokenizer.encode_batch_fast(
            [check_characters(text)], add_special_tokens=special
        )
        return list(encoded.ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self._vocabulary.decode(ids)

    def chat_text(
        self, messages: list[dict[str, Any]], tools: Tools = None, **variables: Any
    ) -> str | None:
        template = self.chat_template
        if tools is not None and self.tool_template:
            template = self.tool_template
        if not template:
            return None
        render_messages = partial(render, template, tools, self._special, variables=variables)
        return chat_prompt(render_messages, messages)

    def token(self, id: int) -> str | None:
        return self._vocabulary.entries[id] if 0 <= id < self.vocab_size else None

    def tokens(self) -> Sequence[str | None]:
        return self._vocabulary.entries


def _json(file: Path) -> dict[str, Any]:
    """Return the object in a checkpoint's file; empty if there is none. Raises `ValueError`, `OSError`."""
    if not file.is_file():
        return {}
    return dict(json.loads(file.read_text(encoding="utf-8")))


def _added_tokens(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tokens that a tokenizer_config.json adds, in the order of their ids."""
    stated = settings.get("added_tokens_decoder", {})
    return [stated[id] for id in sorted(stated, key=int)]


def _special_tokens(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return the special tokens that settings name, which templates may use, and those that they only list.

    A token is its text, or a mapping whose `content` is its text. Only names in "_token" are of tokens, except in
    `extra_special_tokens`, which transformers 5 writes as a mapping of any names, or as a list.
    """
    additional = settings.get("additional_special_tokens") or []
    extra = settings.get("extra_special_tokens") or additional
    candidates = {}
    for name, token in settings.items():
        if name.endswith("_token"):
            candidates[name] = token
    listed = extra
    if not isinstance(extra, list):
        listed = additional
    if isinstance(extra, dict):
        candidates |= extra
    candidates |= settings.get("model_specific_special_tokens") or {}
    named = {}
    for name, token in candidates.items():
        if _content(token):
            named[name] = token
    return named, list(filter(_content, listed))


def _content(token: Any) -> str:
    """Return the text of a token; empty for a value that is no token."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _as_special(token: Any) -> Any:
    """Return the token as `tokenizers` takes it: a mapping also states whether spaces around it belong to it."""
    import tokenizers

    if isinstance(token, str):
        return token
    names = ("single_word", "lstrip", "rstrip", "normalized")
    flags = {}
    for name in names:
        if name in token:
            flags[name] = token[name]
    return tokenizers.AddedToken(token["content"], special=True, **flags)


def _templates(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; files win over tokenizer_config.json."""
    stated = settings.get("chat_template") or []
    if isinstance(stated, str):
        templates = {"default": stated}
    else:
        templates = {entry["name"]: entry["template"] for entry in stated}
    for file in directory.glob("additional_chat_templates/*.jinja"):
        templates[file.stem] = file.read_text("utf-8")
    file = directory / "chat_template.jinja"
    if file.is_file():
        templates["default"] = file.read_text("utf-8")
    else:  # of a model that reads pictures too
        of_processor = _json(directory / "chat_template.json").get("chat_template")
        if isinstance(of_processor, str):
            templates.setdefault("default", of_processor)
    return templates


def have_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> bool:
    """Return whether every id that both have is the same token. Ids that only one has are padding."""
    return _first_difference(target, draft) is None


def _first_difference(target: Tokenizer, draft: Tokenizer) -> int | None:
    """Return the first id that means two different tokens; None if there is none."""
    size = min(target.vocab_size, draft.vocab_size)
    draft_tokens = draft.tokens()[:size]
    target_tokens = target.tokens()[:size]
    if (
        target_tokens == draft_tokens
    ):  # as lists: a loop over 262,144 tokens would take half a second
        return None
    return next(id for id in range(size) if target_tokens[id] != draft_tokens[id])


def check_same_vocabulary(
    target: Tokenizer, draft: Tokenizer, target_name: str, draft_name: str
) -> None:
    """Raise `ModelError` unless `have_same_vocabulary`."""
    id = _first_difference(target, draft)
    if id is not None:
        raise ModelError(
            f"{target_name!r} and {draft_name!r} have different vocabularies: token {id} is {target.token(id)!r} "
            f"in the target and {draft.token(id)!r} in the draft. Choose a draft of the target's own family."
        )


def vocabulary_digest(tokenizer: Tokenizer, size: int) -> bytes:
    """Return BLAKE2b, 16 bytes, of the first `size` ids' tokens: for `check_same_vocabulary` between processes."""
    tokens = list(tokenizer.tokens()[:size])
    tokens += [None] * (size - len(tokens))
    return hashlib.blake2b(json.dumps(tokens).encode(), digest_size=16).digest()


def load(
    directory: Path, trust_remote_code: bool, encodes: bool = True
) -> tuple[Tokenizer, GenerationDefaults]:
    """Return a directory's tokenizer, and how the checkpoint wants to be sampled. `encodes`: see `FileTokenizer`."""
    if (directory / "tokenizer.json").is_file():
        tokenizer = FileTokenizer(directory, encodes)
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
    """Copy the files of a checkpoint's tokenizer, and of its generation settings. Raises `OSError`."""
    for pattern in FILES:
        for file in source.glob(pattern):
            if file.is_file():
                copy = directory / file.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)


def _defaults(directory: Path, tokenizer_eos: int | None) -> GenerationDefaults:
    """Return the settings as transformers' generate() reads them.

    transformers' own defaults (GenerationConfig._get_default_generation_params: top_k 50) apply only where the
    checkpoint samples. On a greedy one a request with a temperature gets no such filter.
    """
    config = _json(directory / "generation_config.json")
    samples = bool(config.get("do_sample"))
    if samples and config.get("top_k") is None:
        config["top_k"] = _TOP_K
    values: dict[str, Any] = {"temperature": 1.0}
    ignored = list(unsupported_options(config, samples))
    for option in config.get("general.sampling", ()):  # of a GGUF file
        ignored.append(f"general.sampling.{option}")
    for name, number in _SETTINGS.items():
        value = config.get(_NAMES_IN_FILE.get(name, name))
        if value is None:
            continue
        if _is_valid(name, value):
            values[name] = number(value)
        else:
            ignored.append(f"{name} {value}")
    if not samples:
        values["temperature"] = 0.0
    eos = _eos(directory, config)
    if eos is None:
        eos = tokenizer_eos
    if not isinstance(eos, list):
        eos = [eos]
    ends: dict[int, None] = {}  # each once
    for token in eos:
        # A 2.0 is 2, as in `generate`; no token has an id such as -1.
        is_whole = isinstance(token, int) or (isinstance(token, float) and token.is_integer())
        if is_whole and 0 <= token < 2**31:
            ends[int(token)] = None
        elif not is_whole and token is not None:
            ignored.append(f"eos_token_id {token!r}")
    return GenerationDefaults(**values, eos=tuple(ends), ignored=tuple(ignored))


def _eos(directory: Path, config: Mapping[str, Any]) -> Any:
    """Return the end tokens of generation_config.json, else those of config.json or of its text model."""
    eos = config.get("eos_token_id")
    if eos is None:
        model = _json(directory / "config.json")
        eos = model.get("eos_token_id")
        if eos is None:
            eos = (model.get("text_config") or {}).get("eos_token_id")
    return eos


def _is_valid(name: str, value: Any) -> bool:
    """Return whether a request could have this value; an invalid one counts as unset, so that requests still work.

    A temperature too small for float32 is valid here, and refused with each request that names no other.
    """
    if name == "temperature":
        return 0 <= float(value) < math.inf
    try:
        RequestOptions(**{name: value})
    except ConfigError:
        return False
    return True


def unsupported_options(config: Mapping[str, Any], samples: bool) -> tuple[str, ...]:
    options: tuple[str, ...] = _UNSUPPORTED
    if samples:
        options += _UNSUPPORTED_SAMPLING
    return tuple(name for name in options if config.get(name) not in _NEUTRAL)
