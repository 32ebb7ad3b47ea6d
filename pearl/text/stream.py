"""Turns tokens into text as they come: incremental detokenisation and stop strings.

The front uses this file to show text while it is generated. The target worker uses it to find the
token that completes a stop string. Both get the same result from the same tokens, because
everything here is pure. This file must not import torch or transformers, nor know where tokens come
from.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

from pearl.config.options import Reasoning
from pearl.errors import RequestError
from pearl.printable import is_unicode
from pearl.text.reasoning_end import ReasoningState

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not, or not yet, a character

CONTEXT = 16  # tokens decoded before the new tokens, so that the new ones read as in the whole text
PATIENCE = 16  # tokens held back before their text is released unfinished
_LONGEST_CHARACTER = 4  # in bytes, and so at most this many tokens
_UNFINISHED = _LONGEST_CHARACTER - 1

# Byte tokens of sentencepiece, and the byte tokens with which no UTF-8 character begins.
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_CONTINUATION_PIECE = re.compile(r"<0x[89ABab][0-9A-Fa-f]>")
_SPACE = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """Return a mapping {character: byte}, as in GPT-2's byte-level BPE.

    Printable bytes are written as themselves, all other bytes as U+0100, U+0101, ... in their
    order: "A" is 0x41, and "\u0120" is 0x20, the space. Source: Radford et al. 2019,
    `bytes_to_unicode`.
    """
    alphabet = {}
    num_hidden = 0
    for byte in range(256):
        if 0x21 <= byte < 0x7F or (byte >= 0xA1 and byte != 0xAD):
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(256 + num_hidden)] = byte
            num_hidden += 1
    return alphabet


_BYTES = _byte_alphabet()


def check_characters(text: str) -> str:
    """Return `text`; raise `RequestError` if it has half a surrogate pair, which is no text."""
    if not is_unicode(text):
        raise RequestError(
            "the prompt holds half a surrogate pair, which is no character: it must be UTF-8"
        )
    return text


Tools = Sequence[dict[str, Any]] | None  # functions that the model may call, in OpenAI's notation


class Tokenizer(Protocol):
    """Turns text into tokens and back.

    Attributes:
        vocab_size: the number of ids; some may have no token.
        chat_template: the template's source; empty if there is none.
        tool_template: the template for requests with tools; empty if these requests use
            `chat_template`, too.
        reasoning_tags: the user's choice of the tags around the model's reasoning; see
            `pearl.text.reasoning`.
    """

    vocab_size: int
    chat_template: str
    tool_template: str = ""
    reasoning_tags: str = "auto"

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of `text`.

        `special`: whether to include the tokens that the tokenizer adds to a prompt, such as BOS.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`.

        Special and unknown tokens are skipped, and spaces are not cleaned up.
        """
        ...

    def apply_chat(self, messages: list[dict[str, Any]], tools: Tools = None) -> list[int] | None:
        """Return the tokens of the prompt for the reply to `messages`.

        Returns None if there is no chat template. Raises `RequestError` if the template refuses
        these messages.
        """
        text = self.chat_text(messages, tools)
        if text is None:
            return None
        return self.encode(text, special=False)  # the template writes special tokens

    def chat_text(
        self, messages: list[dict[str, Any]], tools: Tools = None, **variables: Any
    ) -> str | None:
        """Return the prompt of `apply_chat` as text.

        `variables`: further variables of the template, such as enable_thinking.
        """
        ...

    def token(self, id: int) -> str | None:
        """Return the vocabulary's entry for an id, for comparison; None if there is none."""
        ...

    def tokens(self) -> Sequence[str | None]:
        """Return the vocabulary's entries by id, `vocab_size` of them."""
        return list(map(self.token, range(self.vocab_size)))


def is_byte_piece(piece: str) -> bool:
    """Return whether an entry of a vocabulary stands for a byte, as in sentencepiece ("<0xE4>")."""
    return _BYTE_PIECE.fullmatch(piece) is not None


def token_bytes(tokenizer: Tokenizer, id: int) -> bytes:
    """Return the bytes of a token's text, which may be part of a UTF-8 character.

    For a special token, these are the bytes of its name. Vocabularies write a byte as one of 256
    characters (GPT-2) or as "<0xE4>", and a space as U+2581 (sentencepiece).
    """
    piece = tokenizer.token(id)
    if piece is None:
        return b""
    if is_byte_piece(piece):
        return bytes([int(piece[3:5], 16)])
    text = tokenizer.decode([id])
    if not text or _SPACE in piece:
        return piece.replace(_SPACE, " ").encode("utf-8", "replace")
    if REPLACEMENT in text and _BYTES.keys() >= set(piece):
        return bytes(_BYTES[character] for character in piece)
    return text.encode("utf-8", "replace")


# `tokenizers.DecodeStream` (0.23) is not used, for two reasons. After a prompt that ends within a
# character, it returns the prompt's text again. And it does not show the text that it holds back,
# which may complete a stop.
class Detokenizer:
    """Turns tokens into text as they come, with bounded work for each token.

    The text that `push` returns is final. An incomplete character is held back, for at most
    `PATIENCE` tokens. All pieces joined are what decode(prompt + tokens) adds to decode(prompt),
    except near bytes that are no valid UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._special: dict[int, bool] = {}
        # Context, then tokens whose text is held back.
        self._ids = self._context(prompt)
        self._held_from = len(self._ids)
        self._decoded = self._context_text()
        self._pending = ""

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """Return the last `CONTEXT` tokens of the prompt that have text.

        If the first of these tokens only continue a character, they are left out.
        """
        context = []
        for token in reversed(prompt):
            if not self.is_special(token):
                context.append(token)
                if len(context) == CONTEXT:
                    break
        context.reverse()
        for start, token in enumerate(context):
            piece = self._tokenizer.token(token) or ""
            if not _CONTINUATION_PIECE.fullmatch(piece):  # decoders mark such bytes as invalid
                return context[start:]
        return []

    def _context_text(self) -> str:
        """Return the context's text, without a character that the prompt's end has cut in two."""
        for num_cut in range(_LONGEST_CHARACTER):
            text = self._tokenizer.decode(self._ids[: max(0, self._held_from - num_cut)])
            if not text.endswith(REPLACEMENT):
                return text
        return self._tokenizer.decode(self._ids)

    def is_special(self, token: int) -> bool:
        """Return whether a token has no text.

        The token is decoded twice in a row, because a decoder may strip one leading space.
        """
        if token not in self._special:
            self._special[token] = not self._tokenizer.decode([token, token])
        return self._special[token]

    @property
    def held(self) -> str:
        """The text held back, without an incomplete character at its end."""
        return self._pending.rstrip(REPLACEMENT)

    def push(self, token: int) -> str:
        """Take the next token; return the text that becomes final with it."""
        if self.is_special(token):
            return ""
        self._ids.append(token)
        self._pending = self._tokenizer.decode(self._ids)[len(self._decoded) :]
        if self._pending and not self._pending.endswith(REPLACEMENT):
            return self.flush()
        if len(self._ids) - self._held_from <= PATIENCE:
            return ""
        # So many incomplete bytes are no UTF-8: release all but the last, which may still become a character.
        piece = self._pending[:-_UNFINISHED]
        self._pending = self._pending[-_UNFINISHED:]
        self._ids = self._ids[-CONTEXT:]
        self._decoded = self._tokenizer.decode(self._ids)[:-_UNFINISHED]
        self._held_from = len(self._ids) - _UNFINISHED
        return piece

    def flush(self) -> str:
        """Return the text still held back, with incomplete characters as U+FFFD."""
        piece = self._pending
        self._pending = ""
        # This piece suffices as the context of the next, because it starts with a whole character.
        self._ids = self._ids[self._held_from :]
        self._decoded = self._tokenizer.decode(self._ids)
        self._held_from = len(self._ids)
        return piece


class _Stop(NamedTuple):
    start: int
    text: str


class StopMatcher:
    """Finds stop strings in text that comes in pieces.

    Text that may be the beginning of a stop is held back. `matched` is the stop that was found, or
    None. The returned text ends before that stop; if a piece completes several stops, the stop that
    starts first is taken. Raises `RequestError` for an empty stop.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise RequestError(
                "A stop string is empty, and would end every text at once. Leave it out."
            )
        self.matched: str | None = None
        self._stops = tuple(stops)
        self._initials = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._tail = ""

    def push(self, text: str) -> str:
        """Take more text; return the text that cannot become part of a stop any more."""
        if self.matched is not None:
            return ""
        text = self._tail + text
        stop = self._find(text)
        if stop is not None:
            self.matched = stop.text
            self._tail = ""
            return text[: stop.start]
        start = self._beginning(text)
        self._tail = text[start:]
        return text[:start]

    def end(self, text: str, stop: str) -> str:
        """End the text at a token that is a stop; return the rest of the text before the stop.

        Args:
            text: the last piece of text before the token.
            stop: the token's text. It becomes `matched`, unless an earlier stop is found in `text`.
        """
        shown = self.push(text)
        if self.matched is None:
            shown += self.flush()
            self.matched = stop
        return shown

    def completes(self, text: str) -> bool:
        """Return whether a stop would match if `text` came next; changes nothing."""
        return self.matched is None and bool(text) and self._find(self._tail + text) is not None

    def flush(self) -> str:
        """Return the text held back, at the end of the text; empty if a stop has matched."""
        text = self._tail
        self._tail = ""
        return text

    def _find(self, text: str) -> _Stop | None:
        """Return the stop that starts first; None if there is none."""
        stops = []
        for stop in self._stops:
            if stop in text:
                stops.append(_Stop(text.index(stop), stop))
        return min(stops, default=None)

    def _beginning(self, text: str) -> int:
        """Return the index in `text` from which the rest may be the beginning of a stop.

        If there are several such indices, the first is returned; if there is none, len(text).
        """
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._initials:
                end = text[start:]
                if any(stop.startswith(end) for stop in self._stops):
                    return start
        return len(text)


class TextStream:
    """The text of one request: the results of `push` and `finish`, joined.

    `stopped` becomes true with the first token after which the text contains a stop. Characters
    that the detokenizer still holds back are searched as well, so that each stop is found with the
    token that completes it. An incomplete character at the end is not searched.

    Args:
        show: special tokens whose names are part of the text; these names are not searched for
            stops.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        show: Collection[str] = (),
        reasoning: Reasoning | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = frozenset(stops)
        self._show = frozenset(show)
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._matcher = StopMatcher(stops)
        if reasoning is not None and _have_mark(stops, reasoning.ends):
            reasoning = None
        self._reasoning = ReasoningState(reasoning)

    @property
    def stopped(self) -> bool:
        return self._matcher.matched is not None

    def push(self, token: int) -> str:
        """Take the next committed token; return the text that is final with it."""
        if self.stopped:
            return ""
        if (self._stops or self._show) and self._detokenizer.is_special(token):
            name = self._tokenizer.token(token) or ""
            if name in self._stops:
                lead = self._reasoning.flush()
                return self._matcher.end(lead + self._detokenizer.flush(), name)
            if name in self._show:
                shown = self._push(token, self._detokenizer.flush())
                return shown + self._reasoning.flush() + self._matcher.flush() + name
            return self._push(token, "")
        shown = self._push(token, self._detokenizer.push(token))
        held = self._detokenizer.held
        if self._reasoning.is_blank:
            held = held.lstrip()
        if self._reasoning.is_over and self._matcher.completes(held):
            shown += self._matcher.push(held)
        return shown

    def _push(self, token: int, text: str) -> str:
        """Take a token's text; return the part of it that is final.

        Reasoning is final. In the answer, text that may be the beginning of a stop is held back.
        """
        reasoning, answer = self._reasoning.feed(token, text)
        return reasoning + self._matcher.push(answer)

    def finish(self) -> str:
        """Return the text still held back, when the request ends without a stop.

        A request ends without a stop at EOS, at a limit, or when it is cancelled. An incomplete
        character becomes U+FFFD; if U+FFFD is a stop string, this character matches it.
        """
        if self.stopped:
            return ""
        text = self._reasoning.flush() + self._detokenizer.flush()
        if not self._reasoning.is_over and self._reasoning.is_begun:
            return text
        return self._matcher.push(text) + self._matcher.flush()


def _have_mark(stops: Sequence[str], marks: Sequence[str]) -> bool:
    """Return whether any stop contains a mark.

    If one does, all stops are searched in the reasoning, too.
    """
    return any(mark in stop for stop in stops for mark in marks)
