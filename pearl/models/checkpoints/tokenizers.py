"""Loads the tokenizer of a named model, which may be a toy.

This module must not load weights.
"""

import itertools
import logging
import string
from collections.abc import Iterator, Sequence
from typing import Any

from pearl.cache import Progress, silent
from pearl.config.option_values import MOST_EOS
from pearl.errors import ModelError
from pearl.models.checkpoints.checkpoint import is_toy, resolve_checkpoint, toy_options
from pearl.text.stream import REPLACEMENT, Tokenizer, Tools
from pearl.text.tokenizer import GenerationDefaults, have_same_vocabulary, load
from pearl.text.translation import Translation

log = logging.getLogger(__name__)

# Most tokens of a toy. There are more printable characters, and no vocabulary that we emulate is
# larger.
TOY_LIMIT = 140_000
_LEAST_SHARED = 0.05  # share of the target's tokens that a draft must have


class ToyTokenizer(Tokenizer):
    """The tokenizer of toy models, with one printable character for each token.

    The characters are 0-9, a-z and A-Z, and then those from U+0100 on.  A character outside of the
    vocabulary is encoded as its code point modulo vocab_size, so that every text can be a prompt.
    For texts of characters in the vocabulary, decode(encode(s)) == s.
    """

    chat_template = ""

    def __init__(self, vocab_size: int) -> None:
        if not 0 < vocab_size <= TOY_LIMIT:
            raise ModelError(f"A toy vocabulary has 1 to {TOY_LIMIT} tokens, not {vocab_size}.")
        self.vocab_size = vocab_size
        alphabet = itertools.chain(string.digits, string.ascii_letters, _beyond_latin())
        self._characters = "".join(itertools.islice(alphabet, vocab_size))
        self._ids = {character: id for id, character in enumerate(self._characters)}

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [self._ids.get(character, ord(character) % self.vocab_size) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.token(id) or "" for id in ids)

    def chat_text(
        self, messages: list[dict[str, Any]], tools: Tools = None, **variables: Any
    ) -> str | None:
        return None

    def token(self, id: int) -> str | None:
        if 0 <= id < self.vocab_size:
            return self._characters[id]
        return None


def _beyond_latin() -> Iterator[str]:
    """Yield the printable characters from U+0100 on."""
    for code in range(0x100, 0x110000):
        character = chr(code)
        if character.isprintable() and character != REPLACEMENT:
            yield character


def load_tokenizer(
    spec: str, *, trust_remote_code: bool = False, progress: Progress = silent, encodes: bool = True
) -> tuple[Tokenizer, GenerationDefaults]:
    """Return the tokenizer of the model named `spec`, and its generation defaults. Raises `ModelError`.

    Args:
        spec: a name as `resolve_checkpoint` takes it, or that of a toy, such as
            "toy:vocab=32,eos=5".
        encodes: False if the caller will only decode texts or compare vocabularies. The merges are
            then read only when they are needed.
    """
    if is_toy(spec):
        options = toy_options(spec)
        eos = () if options.eos < 0 else (options.eos,)
        return ToyTokenizer(options.vocab), GenerationDefaults(eos=eos)
    checkpoint = resolve_checkpoint(spec, progress, weights=False)
    try:
        tokenizer, defaults = load(checkpoint, trust_remote_code, encodes)
    except Exception as error:  # files, their readers and a model's own code raise anything
        cause = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(
            f"The tokenizer of {spec!r} could not be loaded: {cause.rstrip('.')}. A directory needs "
            "config.json and tokenizer.json (or what its tokenizer class reads: that of a sentencepiece model takes "
            "pip install sentencepiece protobuf), a hub id the network or a filled cache."
        ) from error
    if len(defaults.eos) > MOST_EOS:
        raise ModelError(
            f"Model {spec!r} cannot be used: {len(defaults.eos):,} tokens are said to end its texts (eos_token_id), "
            f"at most {MOST_EOS:,} may."
        )
    return tokenizer, defaults


def translation_of(
    target: str,
    draft: str,
    trust_remote_code: bool = False,
    known: tuple[Tokenizer, GenerationDefaults] | None = None,
) -> Translation | None:
    """Return the translation between the tokens of a draft and those of its target.

    Return None if both have the same vocabulary, or if the target's tokenizer cannot be loaded on
    this host. Raises `ModelError` if the two vocabularies have too few tokens in common.

    Args:
        known: the draft's tokenizer and generation defaults, if they are loaded already.
    """
    draft_tokenizer, draft_defaults = known or load_tokenizer(
        draft, trust_remote_code=trust_remote_code, encodes=False
    )
    try:
        tokenizer, defaults = load_tokenizer(
            target, trust_remote_code=trust_remote_code, encodes=False
        )
    except ModelError as error:
        # If the vocabularies do differ, the target will refuse the draft.
        log.info("taking the draft's tokens for the target's: %s", error)
        return None
    if have_same_vocabulary(tokenizer, draft_tokenizer):
        return None
    translation = Translation(tokenizer, draft_tokenizer, defaults.eos, draft_defaults.eos)
    if len(translation.shared) < _LEAST_SHARED * tokenizer.vocab_size:
        raise ModelError(
            f"{draft!r} cannot draft for {target!r}: {translation}, too few. Choose another draft."
        )
    return translation
