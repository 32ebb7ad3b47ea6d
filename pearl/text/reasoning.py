"""The reasoning of thinking models, apart from the answer behind it: their tags, and a splitter of their texts.

A template that knows the tags says that a model thinks. Some templates write the opening tag themselves, at the end of
the prompt. White space around tags is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

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
    "<|channel|>analysis": Tags(
        "analysis", "assistantfinal", ("final", "commentary"), "assistantcommentary"
    ),
}


def tags_of(template: str) -> Tags | None:
    """The tags that a chat template knows; None: its model does not think."""
    return next((tags for mark, tags in _TAGS.items() if mark in template), None)


def splitter_of(tokenizer: Tokenizer, prompt: Sequence[int]) -> Splitter | None:
    """For the text behind a prompt that the chat template wrote; None where the model does not think."""
    tags = tags_of(tokenizer.chat_template)
    return (
        None if tags is None else Splitter(tags, tags.are_open(tokenizer.decode(prompt[-_TAIL:])))
    )


class Splitter:
    """Splits a text that comes in pieces of any size.

    Args:
        is_open: whether the prompt has opened the reasoning.
    """

    def __init__(self, tags: Tags, is_open: bool = False) -> None:
        self.tags, self.is_open = tags, is_open
        self._part: Literal["", "reasoning", "answer"] = (
            ""  # that the text is in; empty: not known yet
        )
        self._is_begun = False  # whether that part has more than the white space that is dropped
        self._text = ""  # not returned yet: it may be part of a tag, or white space beside one

    def feed(self, piece: str, is_last: bool = False) -> tuple[str, str]:
        """The reasoning and the answer that are known with this piece, and were not before."""
        self._text += piece
        thought = answer = ""
        if not self._part:
            self._begin(is_last)
        if self._part == "reasoning":
            thought = self._reasoning(is_last)
        if self._part == "answer":
            self._strip()
            answer, self._text = self._text, ""
        return thought, answer

    def _begin(self, is_last: bool) -> None:
        """Find what the text begins with, if that is known yet."""
        start, text = self.tags.start, self._text.lstrip()
        plain = () if self.is_open else self.tags.plain
        if begun := next((one for one in plain if text.startswith(one)), ""):
            self._part, self._text = "answer", text[len(begun) :]
        elif text.startswith(start):
            self._part, self._text = "reasoning", text[len(start) :]
        elif is_last or not any(one.startswith(text) for one in (start, *plain)):
            self._part = "reasoning" if self.is_open else "answer"
            self._is_begun = not self.is_open  # an answer without tags is left as it is

    def _reasoning(self, is_last: bool) -> str:
        self._strip()
        text, ends = self._text, [end for end in (self.tags.end, self.tags.other_end) if end]
        if found := [(text.index(end), len(end)) for end in ends if end in text]:
            at, size = min(found)
            self._part, self._is_begun, self._text = "answer", False, text[at + size :]
            return text[:at].rstrip()
        known = len(text) if is_last else min(decided(text, end) for end in ends)
        self._text = text[known:]
        return text[:known]

    def _strip(self) -> None:
        if not self._is_begun:
            self._text = self._text.lstrip()
            self._is_begun = bool(self._text)


def decided(text: str, tag: str) -> int:
    """The length of `text` without a part of `tag` at its end, and white space before that."""
    part = next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
    return len(text[: len(text) - part].rstrip())


def split(text: str, tags: Tags, is_open: bool = False) -> tuple[str, str]:
    """The reasoning and the answer of a whole text."""
    return Splitter(tags, is_open).feed(text, is_last=True)
