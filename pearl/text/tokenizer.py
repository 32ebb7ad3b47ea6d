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

FILES = (  # of a tokenizer, and of how to sample
    *(
        "tokenizer*",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.*",
        "merges.txt",
        "*.model",
        "*.tiktoken",
    ),
    *("chat_template*", "additional_chat_templates/*", "generation_config.json"),
)

# Options that change which tokens come out, if not one of `_NEUTRAL`; and those that do so under sampling.
_UNSUPPORTED = (
    *(
        "encoder_repetition_penalty",
        "num_beams",
        "guidance_scale",
        "no_repeat_ngram_size",
        "min_length",
    ),
    *(
        "encoder_no_repeat_ngram_size",
        "min_new_tokens",
        "bad_words_ids",
        "suppress_tokens",
        "begin_suppress_tokens",
    ),
    *(
        "stop_strings",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "exponential_decay_length_penalty",
    ),
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
        stated = [
            f"{name} {getattr(self, name)}"
            for name in names
            if getattr(self, name) != getattr(usual, name)
        ]
        return ", ".join(stated if self.temperature else ["greedy", *stated])


class FileTokenizer(Tokenizer):
    """The tokenizer of a directory with tokenizer.json, as the `tokenizers` library reads it.

    transformers' settings add special tokens and chat templates, one of which may be for tools ("tool_use").

    Args:
        encodes: whether the merges are read at once; otherwise with the first text that is encoded.

    Attributes:
        eos: its own end token.
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
            self.read_merges()
        self._vocabulary = self._read_vocabulary()
        self.vocab_size = len(self._vocabulary.entries)
        self.eos: int | None = self._vocabulary.ids.get(self._special.get("eos_token", ""))

    def _read_vocabulary(self) -> Vocabulary:
        """The file's vocabulary if it has all tokens that the settings name, else the library's, which adds them."""
        vocabulary = read_vocabulary(self._file)
        if vocabulary is None or not vocabulary.added.issuperset(
            token["content"] for token in self._added
        ):
            return vocabulary_of(self._tokenizer)
        special = frozenset(map(_content, (*self._named.values(), *self._listed)))
        if not special <= vocabulary.ids.keys():
            return vocabulary_of(self._tokenizer)
        return replace(vocabulary, special=vocabulary.special | special)

    @cached_property
    def _tokenizer(self) -> Any:
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(str(self._file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
        for given in self._added:
            if given["content"] not in known:
                tokenizer.add_tokens([tokenizers.AddedToken(**given)])
        for token in (*self._named.values(), *self._listed):
            content = _content(token)
            if content not in known or not known[content].special:
                tokenizer.add_special_tokens([_as_special(token)])
        return tokenizer

    def read_merges(self) -> None:
        """Load all that encoding needs, which takes a second for 262,144 tokens. Raises what the library raises."""
        self.encode("")

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
        return chat_prompt(
            partial(render, template, tools, self._special, variables=variables), messages
        )

    def token(self, id: int) -> str | None:
        return self._vocabulary.entries[id] if 0 <= id < self.vocab_size else None

    def tokens(self) -> Sequence[str | None]:
        return self._vocabulary.entries


def _json(file: Path) -> dict[str, Any]:
    """What a checkpoint's file holds; nothing where it is missing. Raises `ValueError`, `OSError`."""
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _added_tokens(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tokens that a tokenizer_config.json adds, in the order of their ids."""
    stated = settings.get("added_tokens_decoder", {})
    return [stated[id] for id in sorted(stated, key=int)]


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
    flags = {
        name: flag
        for name, flag in token.items()
        if name in ("single_word", "lstrip", "rstrip", "normalized")
    }
    return tokenizers.AddedToken(token["content"], special=True, **flags)


def _templates(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name; files win over tokenizer_config.json."""
    given = settings.get("chat_template") or []
    found = (
        {"default": given}
        if isinstance(given, str)
        else {one["name"]: one["template"] for one in given}
    )
    found |= {
        file.stem: file.read_text("utf-8")
        for file in directory.glob("additional_chat_templates/*.jinja")
    }
    if (file := directory / "chat_template.jinja").is_file():
        found["default"] = file.read_text("utf-8")
    elif isinstance(
        of_processor := _json(directory / "chat_template.json").get("chat_template"), str
    ):
        found.setdefault("default", of_processor)  # of a model that reads pictures too
    return found


def have_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> bool:
    """Whether every id that both have is the same token. Ids of only one are padding."""
    return _first_difference(target, draft) is None


def _first_difference(target: Tokenizer, draft: Tokenizer) -> int | None:
    """The first id that is another token in each; None where there is none."""
    size = min(target.vocab_size, draft.vocab_size)
    theirs = draft.tokens()[:size]
    ours = target.tokens()[:size]
    if ours == theirs:  # as lists: a loop over 262,144 tokens would take half a second
        return None
    return next(id for id in range(size) if ours[id] != theirs[id])


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
    """BLAKE2b, 16 bytes, of the first `size` ids' tokens: for `check_same_vocabulary` between processes."""
    tokens = [*tokenizer.tokens()[:size]]
    tokens += [None] * (size - len(tokens))
    return hashlib.blake2b(json.dumps(tokens).encode(), digest_size=16).digest()


def load(
    directory: Path, trust_remote_code: bool, encodes: bool = True
) -> tuple[Tokenizer, GenerationDefaults]:
    """The tokenizer in a directory, and how the checkpoint wants to be sampled. `encodes`: see `FileTokenizer`."""
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
    named = {name: config.get(name) for name in _SUPPORTED} | {
        "max_tokens": config.get("max_new_tokens")
    }
    given = {name: value for name, value in named.items() if value is not None}
    invalid = {name: value for name, value in given.items() if not _is_valid(name, value)}
    unset = {"temperature": 1.0, "top_k": 0 if "top_k" in given else 50} if samples else {}
    taken = {name: value for name, value in given.items() if name not in invalid}
    numbers: dict[str, Any] = {
        name: int(value) if name in ("top_k", "max_tokens") else float(value)
        for name, value in (unset | taken).items()
    }
    ignored = (
        *unsupported_options(config, samples),
        *(
            f"general.sampling.{option}" for option in config.get("general.sampling", ())
        ),  # of a GGUF file
        *(f"{name} {value}" for name, value in invalid.items()),
        *(
            f"eos_token_id {token!r}"
            for token in _listed(config["eos_token_id"])
            if not _is_whole(token)
        ),
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
