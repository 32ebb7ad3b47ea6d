"""Tokenizers of checkpoints, and how a checkpoint wants to be sampled: tokenizer files and generation_config.json.

Takes directories; `pearl.models.tokenizers` finds them by name.  Imports transformers only when a checkpoint is read
for the first time.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pearl.config import SamplingParams
from pearl.errors import ConfigError, ModelError
from pearl.text import tokenizer_cache
from pearl.text.chat_template import chat_prompt
from pearl.text.stream import Tokenizer, Tools, check_characters
from pearl.text.tokenizer_cache import CachedTokenizer

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

OF_GGUF = "of_gguf"  # in a tokenizer_config.json that we made of a GGUF file

# Options that change which tokens come out, and the value at which each does nothing, as None always does.
_UNSUPPORTED: Mapping[str, object] = {
    **dict.fromkeys(("encoder_repetition_penalty", "num_beams", "guidance_scale"), 1.0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **{name: [] for name in ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "stop_strings")},
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), None),
    **dict.fromkeys(("dola_layers", "watermarking_config"), None),
    **dict.fromkeys(("penalty_alpha", "token_healing"), 0),
    "sequence_bias": {},
}
_UNSUPPORTED_SAMPLING: Mapping[str, object] = {
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
}
# Supported options, and their values where they are not set.
_SETTINGS: Mapping[str, float] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


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


class HFTokenizer:
    """A tokenizer of transformers behind our interface."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        last_added = max(tokenizer.get_added_vocab().values(), default=-1)
        self.vocab_size = max(len(tokenizer), last_added + 1)  # added tokens may lie beyond a gap
        pieces = tokenizer.convert_ids_to_tokens(list(range(self.vocab_size)))
        self._pieces: list[str | None] = list(pieces)

    @property
    def eos(self) -> int | None:
        """The tokenizer's own end token."""
        return self._tokenizer.eos_token_id

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(self._tokenizer(check_characters(text), add_special_tokens=special, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        known = [id for id in ids if self.token(id) is not None]  # a model's padding ids mean nothing
        text = self._tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def apply_chat(self, messages: list[dict[str, Any]], tools: Tools = None) -> list[int] | None:
        text = self.chat_text(messages, tools)
        return None if text is None else self.encode(text, special=False)  # the template writes its own

    def chat_text(self, messages: list[dict[str, Any]], tools: Tools = None) -> str | None:
        if self._tokenizer.chat_template is None:
            return None
        listed: Any = None if tools is None else [*tools]

        def render(given: list[dict[str, Any]]) -> str:
            of = self._tokenizer
            return str(of.apply_chat_template(given, tools=listed, add_generation_prompt=True, tokenize=False))

        return chat_prompt(render, messages)

    def token(self, id: int) -> str | None:
        return self._pieces[id] if 0 <= id < self.vocab_size else None


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer, target_name: str, draft_name: str) -> None:
    """Raise `ModelError` unless every id that both have is the same token. Ids of only one are padding."""
    size = min(target.vocab_size, draft.vocab_size)
    if isinstance(target, CachedTokenizer) and isinstance(draft, CachedTokenizer) and target.digest == draft.digest:
        return  # without reading either's tokens
    if (wanted := _pieces(target, size)) == (found := _pieces(draft, size)):
        return
    id = next(id for id in range(size) if wanted[id] != found[id])
    raise ModelError(
        f"{target_name!r} and {draft_name!r} have different vocabularies: token {id} is {wanted[id]!r} "
        f"in the target and {found[id]!r} in the draft. Choose a draft of the target's own family."
    )


def vocabulary_digest(tokenizer: Tokenizer, size: int) -> bytes:
    """BLAKE2b, 16 bytes, of the first `size` ids' tokens: for `check_same_vocabulary` between processes."""
    if isinstance(tokenizer, CachedTokenizer) and size == tokenizer.vocab_size:
        return tokenizer.digest
    return hashlib.blake2b(json.dumps(_pieces(tokenizer, size)).encode(), digest_size=16).digest()


def _pieces(tokenizer: Tokenizer, size: int) -> list[str | None]:
    return [tokenizer.token(id) for id in range(size)]


def load(path: str, trust_remote_code: bool) -> tuple[Tokenizer, GenerationDefaults]:
    """The tokenizer in a directory (or a hub id), and how the checkpoint wants to be sampled."""
    directory = None if trust_remote_code or not Path(path).is_dir() else Path(path)
    if directory is not None and (cached := tokenizer_cache.read(directory)) is not None:
        return cached, GenerationDefaults(**{name: _hashable(value) for name, value in cached.settings.items()})
    of_transformers = read_tokenizer(path, trust_remote_code)
    tokenizer = HFTokenizer(of_transformers)
    defaults = _defaults(_generation_config(path, trust_remote_code), tokenizer.eos)
    if directory is not None:
        digest = vocabulary_digest(tokenizer, tokenizer.vocab_size)
        tokenizer_cache.save(directory, of_transformers, tokenizer, asdict(defaults), digest)
    return tokenizer, defaults


def read_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """transformers' tokenizer of a checkpoint.

    One that we made of a GGUF file is read as it is: AutoTokenizer splits texts of any Qwen 2 by a rule of its own.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    about = Path(path) / "tokenizer_config.json"
    is_of_gguf = about.is_file() and json.loads(about.read_text()).get(OF_GGUF)
    kind: Any = PreTrainedTokenizerFast if is_of_gguf else AutoTokenizer
    tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(path, trust_remote_code=trust_remote_code)
    return tokenizer


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _generation_config(path: str, trust_remote_code: bool) -> GenerationConfig:
    """generation_config.json; its EOS, or all of it where the file is missing, is taken from config.json."""
    from transformers import AutoConfig, GenerationConfig

    try:
        given: GenerationConfig | None = GenerationConfig.from_pretrained(path)
    except OSError:
        if (Path(path) / "generation_config.json").is_file():
            raise  # it is damaged
        given = None
    if given is not None and given.eos_token_id is not None:
        return given
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    derived = GenerationConfig.from_model_config(config)
    if given is not None:
        given.eos_token_id = derived.eos_token_id
    return given or derived


def _defaults(config: GenerationConfig, tokenizer_eos: int | None) -> GenerationDefaults:
    """The settings as transformers' generate() reads them.

    Unset options are None from transformers 5.0 on; its own defaults (GenerationConfig._get_default_generation_params:
    top_k 50) apply only where the checkpoint samples. On a greedy one a request with a temperature gets no such filter.
    """
    samples = bool(config.do_sample)
    given = {name: getattr(config, name) for name in _SETTINGS}
    unset = {**_SETTINGS, "top_k": 50 if samples and given["top_k"] is None else 0}
    given["max_tokens"] = config.max_new_tokens
    invalid = {name: value for name, value in given.items() if value is not None and not _is_valid(name, value)}
    taken = {name: _first(value, unset.get(name)) for name, value in (given | dict.fromkeys(invalid)).items()}
    return GenerationDefaults(
        temperature=float(taken["temperature"]) if samples else 0.0,
        top_k=int(taken["top_k"]),
        top_p=float(taken["top_p"]),
        min_p=float(taken["min_p"]),
        repetition_penalty=float(taken["repetition_penalty"]),
        max_tokens=taken["max_tokens"] and int(taken["max_tokens"]),
        eos=_ids(_first(config.eos_token_id, tokenizer_eos)),
        ignored=(
            *_ignored(config, samples),
            *(f"{name} {value}" for name, value in invalid.items()),
            *(f"eos_token_id {token!r}" for token in _listed(config.eos_token_id) if not _is_whole(token)),
        ),
    )


def _is_valid(name: str, value: Any) -> bool:
    """Whether a request could have this value; an invalid one counts as unset, so that requests still work.

    A temperature too small for float32 is valid here, and refused with each request that names no other.
    """
    if name == "temperature":
        return 0 <= float(value) < math.inf
    try:
        SamplingParams(**{name: value})
    except ConfigError:
        return False
    return True


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _ids(eos: Any) -> tuple[int, ...]:
    """The ids that end a text, each once, without those that no token has (such as -1). 2.0 is 2, as in `generate`."""
    given = [int(token) for token in _listed(eos) if _is_whole(token)]
    return tuple(dict.fromkeys(token for token in given if 0 <= token < 2**31))


def _listed(eos: Any) -> list[Any]:
    return [token for token in (eos if isinstance(eos, list) else [eos]) if token is not None]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def _ignored(config: GenerationConfig, samples: bool) -> tuple[str, ...]:
    known = {**_UNSUPPORTED, **(_UNSUPPORTED_SAMPLING if samples else {})}
    given = {name: getattr(config, name, None) for name in known}
    return tuple(name for name in known if given[name] not in (None, known[name]))
