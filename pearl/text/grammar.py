"""Texts held to a grammar: a JSON schema, or a regular expression. By llguidance (extra `structured`).

Which tokens may follow is a function of the text alone, so both models are held alike, and what holds without a grammar
holds with one: every rule keeps its promise, and one seed gives one text whatever was proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from pearl.config.sampling import Schema
from pearl.document import parse_json
from pearl.errors import GrammarError, RequestError
from pearl.extras import installing
from pearl.text.grammar_limits import check_regex, check_schema
from pearl.text.stream import Tokenizer, token_bytes

if TYPE_CHECKING:  # a front checks what it is asked for, and starts sooner without NumPy
    import numpy as np
    import numpy.typing as npt
    from llguidance import LLMatcher, LLTokenizer

_T = TypeVar("_T")
_MISSING = "needs the package llguidance: "
_NO_TOKEN = "NoExtensionBias"  # begins what llguidance says where the vocabulary cannot write how a grammar goes on
_BESIDE = 2  # ids beyond the model's own: see `_Vocabulary`
_MOST_REVIVED = 8  # times that one text's parser is begun anew: it reads the whole text again
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"  # between the parts of JSON: small models may write nothing else for ever


def grammar_of(json_schema: Schema | None, regex: str | None) -> str:
    """What workers are told of what a user asks for: "json_schema" or "regex", a line feed, and the text of it.

    Empty where nothing is asked for. Raises `RequestError` where it is no schema or expression that can be kept to, or
    llguidance is not installed.
    """
    if json_schema is None and regex is None:
        return ""
    kind, text = ("regex", regex) if regex is not None else ("json_schema", json_schema)
    grammar = f"{kind}\n{text}"
    try:
        _checked(grammar)
    except ImportError:
        raise RequestError(f"{kind} {_MISSING}{installing('structured')}") from None
    except ValueError as error:
        raise RequestError(f"{kind} cannot be kept to: {_short(str(error))}") from None
    return grammar


@lru_cache(maxsize=64)
def _checked(grammar: str) -> str:
    """In the notation of llguidance. Raises `ImportError` and `ValueError`."""
    from llguidance import LLMatcher

    kind, _, text = grammar.partition("\n")
    if kind == "regex":
        check_regex(text)
        written: str = LLMatcher.grammar_from_regex(text)
    elif kind == "json_schema":
        check_schema(parse_json(text))
        written = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": _WHITESPACE})
    else:
        raise ValueError(f"unknown kind {kind[:20]!r}")
    failed, said = LLMatcher.validate_grammar_with_warnings(written, limits=_limits())
    if failed:
        raise ValueError(said[0])
    return written


def _limits() -> Any:
    from llguidance import LLParserLimits

    # A hostile schema is not to hold up the other texts. Its own bounds are two to ten times as high.
    return LLParserLimits(
        max_items_in_row=1000,
        initial_lexer_fuel=300_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=50_000,
        verbose_errors=False,
    )


def _short(problem: str) -> str:
    return " ".join(problem.split())[:300].rstrip(".")


class Guide:
    """Says which tokens may follow a text that is held to a grammar.

    A text may break it, for it may be made of guesses: nothing may follow such a text, and nothing has to, for what
    breaks the grammar has no probability.  For the same reason the parser may give up behind some text that is never
    written (where the grammar goes on with no token that there is, or asks for too much): what was before is not lost.
    """

    def __init__(self, make: Callable[[], LLMatcher], ends: Sequence[int]) -> None:
        self._make, self._ends = make, list(ends)
        self._matcher = make()
        self._kept: list[int] = []  # tokens within the grammar
        self._beyond = 0  # tokens after these
        self._gave_up = ""  # why the parser took the first of them neither for right nor for wrong
        self._revived = 0

    def check(self) -> None:
        """Raises `GrammarError` where the parser has given up, but for want of a token."""
        if self._matcher.is_error() and not self._matcher.get_error().startswith(_NO_TOKEN):
            raise GrammarError(self._why())

    def extend(self, token: int) -> None:
        """The next token of the text."""
        if self._beyond:
            self._beyond += 1
        elif self._tried(partial(_takes, token)):
            self._kept.append(token)
        else:
            self._beyond = 1
            if self._matcher.is_error():
                self._gave_up = self._why()

    def cut(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        self._beyond = max(0, min(self._beyond, length - len(self._kept)))
        if not self._beyond:
            self._gave_up = ""
        if length < len(self._kept):
            self._matcher.rollback(len(self._kept) - length)
            del self._kept[length:]

    def allowed(self) -> npt.NDArray[np.bool_] | None:
        """[vocab], of the tokens that may follow; None where the text has left the grammar, or ended.

        Raises `GrammarError` where the parser has given up, but for want of a token: then none may follow.
        """
        import numpy as np

        if self._gave_up:
            raise GrammarError(self._gave_up)
        if self._beyond:
            return None
        mask = np.frombuffer(self._tried(lambda matcher: matcher.compute_logit_bias()), np.uint8) > 0
        self.check()
        if self._matcher.is_error():
            mask = np.zeros_like(mask)
        mask[self._ends] = mask[-_BESIDE]
        return mask[:-_BESIDE]

    def _tried(self, ask: Callable[[LLMatcher], _T]) -> _T:
        """What the parser says. One that has given up, perhaps behind a text that is forgotten, has no way back, and
        its copies share what its limits count: then another one reads the text anew, and is asked once more.
        """
        said = ask(self._matcher)
        if self._matcher.is_error() and self._revived < _MOST_REVIVED:
            self._revived += 1
            self._matcher = self._make()
            self._matcher.consume_tokens(self._kept)
            said = ask(self._matcher)
        return said

    def _why(self) -> str:
        return f"the text's grammar: {_short(self._matcher.get_error())}"


def _takes(token: int, matcher: LLMatcher) -> bool:
    """Whether the text may go on with it. A lexer that has given up takes nothing, and tells only who asks for more."""
    takes = bool(matcher.try_consume_tokens([token]))
    if not takes and not matcher.is_error():
        matcher.compute_logit_bias()
    return takes


class Guides:
    """Makes the guides of one model's texts.

    Args:
        load: its tokenizer. What follows from it is made when a grammar first comes: it takes half a second.
        size: ids of the model.
    """

    def __init__(self, load: Callable[[], Tokenizer], size: int) -> None:
        self._tokens = cache(lambda: _tokens(load(), size))
        self._size = size

    def __call__(self, grammar: str, ends: Sequence[int]) -> Guide:
        """Of a text that the tokens `ends` end, which are no part of it. Raises `GrammarError`."""
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise GrammarError(f"a grammar {_MISSING}{installing('structured')}") from None
        try:
            written = _checked(grammar)
        except ValueError as error:
            raise GrammarError(f"the text's grammar: {_short(str(error))}") from None
        guide = Guide(
            lambda: LLMatcher(self._tokens(), written, log_level=0, limits=_limits()),
            [token for token in ends if token < self._size],
        )
        guide.check()
        return guide


def _tokens(tokenizer: Tokenizer, size: int) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, size)), n_vocab=size + _BESIDE, eos_token=size)


class _Vocabulary:
    """A tokenizer as llguidance asks for it, with two ids more.

    The first stands for all tokens that end a text: each text has its own of these. The second is what no token of the
    model writes. Tokens without a text are no part of any.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        known = range(min(size, tokenizer.vocab_size))
        beyond = range(len(known), size + _BESIDE)
        self._tokenizer = tokenizer
        self.eos_token_id, self._unwritten = size, size + 1
        self.tokens = [token_bytes(tokenizer, id) for id in known] + [b"<%d>" % id for id in beyond]
        # Decoded twice over, for a decoder may strip one leading space.
        self.special_token_ids = [id for id in known if not tokenizer.decode([id, id])] + [*beyond]

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = {*self.special_token_ids}
        return {text: id for id, text in enumerate(self.tokens) if text and id not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Tokens that write `text`, or its beginning and that what follows has none.

        It is what a grammar leaves no choice about, and its first token is the only one that may follow then. So tokens
        that write something else will not do: an unknown token, or one with the space that many tokenizers put first.
        """
        tokens = self._tokenizer.encode(text.decode("utf-8", "replace"), special=False)
        if b"".join(self.tokens[each] for each in tokens) == text:
            return tokens
        tokens, start = [], 0
        while start < len(text) and self._unwritten not in tokens:
            tokens.append(self._fitting(text, start))
            start += len(self.tokens[tokens[-1]])
        return tokens

    def _fitting(self, text: bytes, start: int) -> int:
        """The longest token with which `text` goes on at `start`."""
        ends = range(min(len(text), start + self._longest), start, -1)
        return next((self._ids[text[start:end]] for end in ends if text[start:end] in self._ids), self._unwritten)
