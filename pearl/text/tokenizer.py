"""Tokenizers and generation settings of checkpoints, read from their files.

Checkpoints are directories here; `pearl.models.checkpoints.tokenizers` finds the directories by the
models' names. Importing transformers takes a second, so it is imported only to convert the
tokenizer of a checkpoint without tokenizer.json.
"""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pearl.config import RequestOptions
from pearl.errors import ConfigError, ModelError
from pearl.text.chat_template import chat_prompt, render
from pearl.text.stream import Tokenizer, Tools, check_characters
from pearl.text.vocabulary import BREAK, Vocabulary, read_vocabulary, vocabulary_of

FILES = (  # patterns of the files of a tokenizer, and of generation settings
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

# Options that change the text unless their value is in `_NEUTRAL`; the second list applies only under sampling.
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
_SETTINGS: dict[str, type[int] | type[float]] = {  # supported options, by their names in requests
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
    """The generation settings of a checkpoint, which are the defaults of a request.

    Attributes:
        temperature: 0 means greedy decoding.
        top_k, top_p, min_p, repetition_penalty: the values 0, 1, 0 and 1 turn them off.
        eos: the ids that end a text.
        ignored: options of generation_config.json that would change the text but are not supported,
            and options whose values are invalid, such as a top_k of -1.
        max_tokens: None means up to the end of the context.
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
        """Return the settings that a checkpoint changes, such as "temperature 0.6, top_k 20".

        If the settings are for greedy decoding, the result begins with "greedy", as in "greedy,
        max_tokens 99".
        """
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

    Further special tokens and the chat templates are read from the settings files of transformers.
    One of the templates may be for tools ("tool_use").

    Args:
        encodes: whether to read the merges at once. Otherwise they are read when the first text is
            encoded.

    Attributes:
        eos: id of the end token that the tokenizer's own files name; None if they name none.
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
        """Return the vocabulary, read from the file if possible.

        If the file does not determine all ids, the vocabulary is that of the library's tokenizer.
        """
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
        tokenizer.add_tokens([tokenizers.AddedToken(BREAK, normalized=False)])
        return tokenizer

    def encode(self, text: str, special: bool = True) -> list[int]:
        # As a batch of one, because `encode` would hold the interpreter lock, for seconds on a long prompt.
        (encoded,) = self._tokenizer.encode_batch_fast(
            [check_characters(text)], add_special_tokens=special
        )
        if BREAK not in text:
            return list(encoded.ids)
        no_token = self._tokenizer.token_to_id(BREAK)
        return [id for id in encoded.ids if id != no_token]

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
        # In what users and tools write, a control token is no token: `encode` reads its name as text.
        vocabulary = self._vocabulary
        tokens = _control_tokens(vocabulary.added, vocabulary.special, template)
        return chat_prompt(render_messages, messages, partial(tokens.sub, _with_break))

    def token(self, id: int) -> str | None:
        return self._vocabulary.entries[id] if 0 <= id < self.vocab_size else None

    def tokens(self) -> Sequence[str | None]:
        return self._vocabulary.entries


@cache
def _control_tokens(
    added: frozenset[str], special: frozenset[str], template: str
) -> re.Pattern[str]:
    """Return an expression that matches the name of any control token.

    Control tokens are the special tokens, and other added tokens that occur in the template, such
    as <think>. The HTML tags that some vocabularies have are no control tokens.
    """
    names = []
    for name in sorted(added, key=len, reverse=True):
        if name.strip() and (name in special or name in template):
            names.append(re.escape(name))
    return re.compile("|".join(names) or "(?!)")


def _with_break(name: re.Match[str]) -> str:
    """Return the matched name with a `BREAK` in it, so that it is no longer read as a token."""
    return f"{name[0][0]}{BREAK}{name[0][1:]}"


def _json(file: Path) -> dict[str, Any]:
    """Return the object in a checkpoint's JSON file; empty if there is no such file.

    Raises `ValueError` or `OSError` if the file cannot be read.
    """
    if not file.is_file():
        return {}
    return dict(json.loads(file.read_text(encoding="utf-8")))


def _added_tokens(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tokens that a tokenizer_config.json adds, in the order of their ids."""
    stated = settings.get("added_tokens_decoder", {})
    return [stated[id] for id in sorted(stated, key=int)]


def _special_tokens(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return {name: special token} for tokens with a name, and a list of the tokens without one.

    Templates may use the names. A token is given as its text, or as a mapping whose `content` is
    its text. A setting names a token if the setting's name ends in "_token", such as "bos_token".
    transformers 5 also writes the setting `extra_special_tokens`. This is either a mapping from any
    names to tokens, or a list of tokens without names.
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
    """Return a special token in the form that `tokenizers` takes.

    A token given as a mapping also says whether it includes adjacent spaces.
    """
    import tokenizers

    if isinstance(token, str):
        return token
    names = ("single_word", "lstrip", "rstrip", "normalized")
    flags = {name: token[name] for name in names if name in token}
    return tokenizers.AddedToken(token["content"], special=True, **flags)


def _templates(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name.

    Files with templates take precedence over tokenizer_config.json.
    """
    stated = settings.get("chat_template") or []
    if isinstance(stated, str):
        templates = {"default": stated}
    elif isinstance(stated, dict):
        templates = dict(stated)
    else:
        templates = {entry["name"]: entry["template"] for entry in stated}
    for file in directory.glob("additional_chat_templates/*.jinja"):
        templates[file.stem] = file.read_text("utf-8")
    file = directory / "chat_template.jinja"
    if file.is_file():
        templates["default"] = file.read_text("utf-8")
    else:  # the file of a model that also reads pictures
        of_processor = _json(directory / "chat_template.json").get("chat_template")
        if isinstance(of_processor, str):
            templates.setdefault("default", of_processor)
    return templates


def have_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> bool:
    """Return whether every id that both tokenizers have is the same token.

    Ids that only one of them has are taken for padding.
    """
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
    """Raise `ModelError` if the vocabularies differ in the sense of `have_same_vocabulary`."""
    id = _first_difference(target, draft)
    if id is not None:
        raise ModelError(
            f"{target_name!r} and {draft_name!r} have different vocabularies: token {id} is {target.token(id)!r} "
            f"in the target and {draft.token(id)!r} in the draft. Choose a draft of the target's own family."
        )


def vocabulary_digest(tokenizer: Tokenizer, size: int) -> bytes:
    """Return a BLAKE2b hash (16 bytes) of the tokens of the first `size` ids.

    With it, processes compare their vocabularies without sending them.
    """
    tokens = list(tokenizer.tokens()[:size])
    tokens += [None] * (size - len(tokens))
    return hashlib.blake2b(json.dumps(tokens).encode(), digest_size=16).digest()


def load(
    directory: Path, trust_remote_code: bool, encodes: bool = True
) -> tuple[Tokenizer, GenerationDefaults]:
    """Return a directory's tokenizer, and the checkpoint's generation settings.

    `encodes`: see `FileTokenizer`.
    """
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
    """Copy the files of a checkpoint's tokenizer and generation settings. Raises `OSError`."""
    for pattern in FILES:
        for file in source.glob(pattern):
            if file.is_file():
                copy = directory / file.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)


def _defaults(directory: Path, tokenizer_eos: int | None) -> GenerationDefaults:
    """Return the generation settings as transformers' generate() would read them.

    transformers' own default, top_k 50 (GenerationConfig._get_default_generation_params), applies
    only if the checkpoint samples. If the checkpoint decodes greedily, a request that sets a
    temperature is not limited to 50 tokens.
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
    ends: dict[int, None] = {}  # an ordered set
    for token in eos:
        # A 2.0 is 2, as in `generate`; no token has an id such as -1.
        is_whole = isinstance(token, int) or (isinstance(token, float) and token.is_integer())
        if is_whole and 0 <= token < 2**31:
            ends[int(token)] = None
        elif not is_whole and token is not None:
            ignored.append(f"eos_token_id {token!r}")
    return GenerationDefaults(**values, eos=tuple(ends), ignored=tuple(ignored))


def _eos(directory: Path, config: Mapping[str, Any]) -> Any:
    """Return the end tokens as a configuration file states them; None if no file states them.

    The files are searched in this order: generation_config.json, config.json, and text_config
    within config.json.
    """
    eos = config.get("eos_token_id")
    if eos is None:
        model = _json(directory / "config.json")
        eos = model.get("eos_token_id")
        if eos is None:
            eos = (model.get("text_config") or {}).get("eos_token_id")
    return eos


def _is_valid(name: str, value: Any) -> bool:
    """Return whether a request could have this value. Invalid values count as unset, so that requests still work.

    A temperature too small for float32 is valid here. If a checkpoint has such a temperature, each
    request that names no other temperature is refused.
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
