"""The reasoning of thinking models, apart from the answer behind it: their tags, and a splitter of their texts.

A template that knows the tags says that a model thinks. Some templates write the opening tag themselves, at the end of
the prompt. White space around tags is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pearl.text.stream import Tokenizer

_TAIL = 16  # tokens of a prompt that may hold an opening tag at its end


@dataclass(frozen=True)
class Tags:
    """What stands before and behind the reasoning in a text, and before an answer without any.

    Attributes:
        other_end: also ends the reasoning; what follows calls a tool.
        plain: what a text may begin with instead of `start`.
    """

    start: str
    end: str
    plain: tuple[str, ...] = ()
    other_end: str = ""

    def are_open(self, prompt: str) -> bool:
        """Whether the text behind this prompt begins with reasoning."""
        return prompt.rstrip().endswith(self.start)


_TAGS = {  # what a chat template has -> its tags
    "</think>": Tags("<think>", "</think>"),
    # gpt-oss: its special tokens have no text.
    "<|channel|>analysis": Tags("analysis", "assistantfinal", ("final", "commentary"), "assistantcommentary"),
}


def tags_of(template: str) -> Tags | None:
    """The tags that a chat template knows; None: its model does not think."""
    return next((tags for mark, tags in _TAGS.items() if mark in template), None)


def splitter_of(tokenizer: Tokenizer, prompt: Sequence[int]) -> Splitter | None:
    """For the text behind a prompt that the chat template wrote; None where the model does not think."""
    tags = tags_of(tokenizer.chat_template)
    return None if tags is None else Splitter(tags, tags.are_open(tokenizer.decode(prompt[-_TAIL:])))


class _Phase(Enum):
    START = auto()  # nothing so far but white space and a part of the opening tag
    OPENED = auto()  # nothing behind that tag
    THINKING = auto()
    CLOSED = auto()  # nothing behind the closing tag
    ANSWER = auto()


class Splitter:
    """Splits a text that comes in pieces of any size.

    Args:
        is_open: whether the prompt has opened the reasoning.
    """

    def __init__(self, tags: Tags, is_open: bool = False) -> None:
        self.tags, self.is_open = tags, is_open
        self._phase = _Phase.START
        self._pending = ""  # text that may be part of a tag, or white space beside one

    def feed(self, piece: str, is_last: bool = False) -> tuple[str, str]:
        """The reasoning and the answer that are known with this piece, and were not before."""
        self._pending += piece
        if self._phase is _Phase.START and not self._has_begun(is_last):
            return "", ""
        thought = self._thought(is_last) if self._phase in (_Phase.OPENED, _Phase.THINKING) else ""
        if self._phase is _Phase.CLOSED:
            self._pending = self._pending.lstrip()
            self._phase = _Phase.ANSWER if self._pending else _Phase.CLOSED
        if self._phase is not _Phase.ANSWER:
            return thought, ""
        answer, self._pending = self._pending, ""
        return thought, answer

    def _has_begun(self, is_last: bool) -> bool:
        """Whether what the text begins with is known."""
        start, text = self.tags.start, self._pending.lstrip()
        plain = () if self.is_open else self.tags.plain
        said = next((one for one in plain if text.startswith(one)), "")
        if text.startswith(start):
            self._phase, self._pending = _Phase.OPENED, text[len(start) :]
        elif said:
            self._phase, self._pending = _Phase.CLOSED, text[len(said) :]
        elif is_last or not any(one.startswith(text) for one in (start, *plain)):
            self._phase = _Phase.OPENED if self.is_open else _Phase.ANSWER
        return self._phase is not _Phase.START

    def _thought(self, is_last: bool) -> str:
        if self._phase is _Phase.OPENED:
            self._pending = self._pending.lstrip()
            self._phase = _Phase.THINKING if self._pending else _Phase.OPENED
        text, ends = self._pending, [end for end in (self.tags.end, self.tags.other_end) if end]
        found = [(text.index(end), len(end)) for end in ends if end in text]
        if found:
            at, size = min(found)
            self._phase, self._pending = _Phase.CLOSED, text[at + size :]
            return text[:at].rstrip()
        known = len(text) if is_last else min(decided(text, end) for end in ends)
        self._pending = text[known:]
        return text[:known]


def decided(text: str, tag: str) -> int:
    """The length of `text` without a part of `tag` at its end, and white space before that."""
    part = next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
    return len(text[: len(text) - part].rstrip())


def split(text: str, tags: Tags, is_open: bool = False) -> tuple[str, str]:
    """The reasoning and the answer of a whole text."""
    return Splitter(tags, is_open).feed(text, is_last=True)
