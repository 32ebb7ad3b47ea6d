"""Grammars: llguidance (extra `structured`) keeps texts to a JSON schema or a regular expression.

Which tokens may follow depends on the text alone, so target and draft allow the same tokens. Every
acceptance rule therefore keeps its guarantee. For example, under `coupled` one seed still gives one
text, whatever the draft proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, TypeVar

from pearl.config.option_values import Schema
from pearl.errors import GrammarError, RequestError, installing
from pearl.text.parser import checked, limits
from pearl.text.schema import place_of
from pearl.text.stream import Tokenizer, token_bytes

if TYPE_CHECKING:  # a front only checks a request's grammar, and starts sooner without NumPy
    import numpy as np
    import numpy.typing as npt
    from llguidance import LLMatcher, LLTokenizer

_T = TypeVar("_T")
_MISSING = "needs the package llguidance: "
_NO_TOKEN = "NoExtensionBias"  # llguidance's message begins so if no token of the model fits
_EXTRA_IDS = 2  # ids after the model's own, see `_Vocabulary`
_MOST_RESTARTS = 8  # of one text's parser: each restart reads the whole text again


def grammar_of(json_schema: Schema | None, regex: str | None) -> str:
    """Return a request's grammar in the form that workers take; empty if there is no grammar.

    The form is a kind, a line feed and a text: for example "regex\\n[a-z]+", or "json_schema\\n"
    and a schema. Raises `RequestError` for a schema or expression that cannot be used, or if
    llguidance is not installed.
    """
    if json_schema is None and regex is None:
        return ""
    if regex is not None:
        kind = "regex"
        text = regex
    else:
        kind = "json_schema"
        text = str(json_schema)
    grammar = f"{kind}\n{text}"
    try:
        checked(grammar)
    except ImportError:
        raise RequestError(f"{kind} {_MISSING}{installing('structured')}") from None
    except ValueError as error:
        problem = f"{kind} cannot be kept to: {_short(str(error))}"
        place = ""
        if kind == "json_schema":
            place = place_of(text, str(error))
        if place:
            problem += f", at {place}"
        raise RequestError(problem) from None
    return grammar


def _short(problem: str) -> str:
    return " ".join(problem.split())[:300].rstrip(".")


class Guide:
    """Knows which tokens may follow one text.

    The text may end with guessed tokens, which the target has not verified yet. A guessed token
    that violates the grammar gets probability 0, and no guess after it can be accepted. The parser
    may also fail on guessed text that is never committed: the model may have no token that fits, or
    the text may exceed a limit. The tokens before the failure remain valid.

    Args:
        make: returns a parser at the beginning of the text.
        ends: tokens that end the text.
    """

    def __init__(self, make: Callable[[], LLMatcher], ends: Sequence[int]) -> None:
        self._make = make
        self._ends = list(ends)
        self._matcher = make()
        self._valid: list[int] = []  # the text's tokens within the grammar
        self._beyond = 0  # number of the text's tokens after `_valid`
        self._failure = ""  # why the parser could not judge the first token after `_valid`
        self._restarts = 0

    def check(self) -> None:
        """Raise `GrammarError` if the parser has failed, unless the cause is that no token of the model fits."""
        if self._matcher.is_error() and not self._matcher.get_error().startswith(_NO_TOKEN):
            raise GrammarError(self._error())

    def extend(self, token: int) -> None:
        """Append a token to the text."""
        if self._beyond:
            self._beyond += 1
        elif self._try(partial(_takes, token)):
            self._valid.append(token)
        else:
            self._beyond = 1
            if self._matcher.is_error():
                self._failure = self._error()

    def cut(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        self._beyond = max(0, min(self._beyond, length - len(self._valid)))
        if not self._beyond:
            self._failure = ""
        if length < len(self._valid):
            self._matcher.rollback(len(self._valid) - length)
            del self._valid[length:]

    def allowed(self) -> npt.NDArray[np.bool_] | None:
        """Return whether each token may follow, [vocab]; None after the text's end or a violation.

        If the parser has failed because no token of the model fits, the result is all False. Raises
        `GrammarError` if the parser has failed for another reason.
        """
        import numpy as np

        if self._failure:
            raise GrammarError(self._failure)
        if self._beyond:
            return None
        biases = self._try(lambda matcher: matcher.compute_logit_bias())
        mask = np.frombuffer(biases, np.uint8) > 0
        self.check()
        if self._matcher.is_error():
            mask = np.zeros_like(mask)
        mask[self._ends] = mask[-_EXTRA_IDS]
        return mask[:-_EXTRA_IDS]

    def _try(self, step: Callable[[LLMatcher], _T]) -> _T:
        """Return the result of `step`; if the parser fails, try again with a new parser.

        The new parser has read the valid tokens. A parser that has failed cannot recover, even if
        the text on which it failed has been rolled back. A copy made before the failure would not
        help, because a parser and its copies share the counters to which the limits apply.
        """
        result = step(self._matcher)
        if self._matcher.is_error() and self._restarts < _MOST_RESTARTS:
            self._restarts += 1
            self._matcher = self._make()
            self._matcher.consume_tokens(self._valid)
            result = step(self._matcher)
        return result

    def _error(self) -> str:
        return f"the text's grammar: {_short(self._matcher.get_error())}"


def _takes(token: int, matcher: LLMatcher) -> bool:
    """Return whether the text may continue with `token`.

    If the parser refuses the token without an error, the mask of allowed tokens is computed as
    well, because only then does a lexer report that it has failed.
    """
    takes = bool(matcher.try_consume_tokens([token]))
    if not takes and not matcher.is_error():
        matcher.compute_logit_bias()
    return takes


class Guides:
    """Makes the guides of one model's texts.

    Args:
        load: returns the model's tokenizer. It is called for the first grammar only, and then takes half a second.
        size: number of the model's token ids.
    """

    def __init__(self, load: Callable[[], Tokenizer], size: int) -> None:
        self._tokens = cache(lambda: _tokens(load(), size))
        self._size = size

    def __call__(self, grammar: str, ends: Sequence[int]) -> Guide:
        """Make a guide for a text.

        The first token that is in `ends` ends the text, and is not part of the text. Raises
        `GrammarError` if the grammar cannot be used.
        """
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise GrammarError(f"a grammar {_MISSING}{installing('structured')}") from None
        try:
            notation = checked(grammar)
        except ValueError as error:
            raise GrammarError(f"the text's grammar: {_short(str(error))}") from None

        def make() -> LLMatcher:
            return LLMatcher(self._tokens(), notation, log_level=0, limits=limits())

        guide = Guide(make, [token for token in ends if token < self._size])
        guide.check()
        return guide


def _tokens(tokenizer: Tokenizer, size: int) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    vocabulary = TokenizerWrapper(_Vocabulary(tokenizer, size))
    return LLTokenizer(vocabulary, n_vocab=size + _EXTRA_IDS, eos_token=size)


class _Vocabulary:
    """A tokenizer as llguidance reads it, with two extra ids.

    The first extra id stands for all tokens that end a text, because these differ between texts. The second stands for
    text that no token of the model writes. Tokens without text are never part of a text.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = size
        self._unwritten = size + 1
        self.tokens: list[bytes] = []
        self.special_token_ids: list[int] = []
        for id in range(size + _EXTRA_IDS):
            is_entry = id < min(size, tokenizer.vocab_size)
            self.tokens.append(token_bytes(tokenizer, id) if is_entry else b"<%d>" % id)
            # Decoded twice in a row, because a decoder may strip one leading space.
            if not is_entry or not tokenizer.decode([id, id]):
                self.special_token_ids.append(id)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {text: id for id, text in enumerate(self.tokens) if text and id not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Return tokens that write exactly `text`.

        If no token fits the rest of the text, the result ends with `_unwritten`, which stands for
        this rest. llguidance calls this for text that a grammar forces, and then allows only the
        first of the tokens. Tokens that write something else would be wrong, such as an unknown
        token or the space that many tokenizers put first.
        """
        tokens = self._tokenizer.encode(text.decode("utf-8", "replace"), special=False)
        if b"".join(self.tokens[token] for token in tokens) == text:
            return tokens
        tokens = []
        start = 0
        while start < len(text) and self._unwritten not in tokens:
            token = self._fitting(text, start)
            tokens.append(token)
            start += len(self.tokens[token])
        return tokens

    def _fitting(self, text: bytes, start: int) -> int:
        """Return the longest token with which `text` goes on at `start`, or `_unwritten`."""
        for end in range(min(len(text), start + self._longest), start, -1):
            token = self._ids.get(text[start:end])
            if token is not None:
                return token
        return self._unwritten
