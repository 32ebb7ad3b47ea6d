"""The reasoning of thinking models, apart from the answer behind it: their tags, and a splitter of their texts.

A template that knows the tags says that a model thinks. Some templates write the opening tag themselves, at the end of
the prompt. White space around tags is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


class Splitter:
    """Splits a text that comes in pieces of any size.

    Args:
        is_open: whether the prompt has opened the reasoning.
    """

    def __init__(self, tags: Tags, is_open: bool = False) -> None:
        self.tags, self.is_open = tags, is_open
        self._text = ""  # so far
        self._known = 0, 0  # lengths of what was returned of reasoning and answer

    def feed(self, piece: str, is_last: bool = False) -> tuple[str, str]:
        """The reasoning and the answer that are known with this piece, and were not before."""
        self._text += piece
        before, (thought, answer) = self._known, self._split(is_last)
        self._known = len(thought), len(answer)
        return thought[before[0] :], answer[before[1] :]

    def _split(self, is_last: bool) -> tuple[str, str]:
        """Both as far as they are known: text that may be part of a tag waits, and white space beside one."""
        start, text = self.tags.start, self._text.lstrip()
        plain = () if self.is_open else self.tags.plain
        if begun := next((one for one in plain if text.startswith(one)), ""):
            return "", text[len(begun) :].lstrip()
        if not text.startswith(start):
            if not is_last and any(one.startswith(text) for one in (start, *plain)):
                return "", ""
            if not self.is_open:
                return "", self._text
        thought = text.removeprefix(start).lstrip()
        ends = [end for end in (self.tags.end, self.tags.other_end) if end]
        if found := [(thought.index(end), len(end)) for end in ends if end in thought]:
            at, size = min(found)
            return thought[:at].rstrip(), thought[at + size :].lstrip()
        known = len(thought) if is_last else min(decided(thought, end) for end in ends)
        return thought[:known], ""


def decided(text: str, tag: str) -> int:
    """The length of `text` without a part of `tag` at its end, and white space before that."""
    part = next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
    return len(text[: len(text) - part].rstrip())


def split(text: str, tags: Tags, is_open: bool = False) -> tuple[str, str]:
    """The reasoning and the answer of a whole text."""
    return Splitter(tags, is_open).feed(text, is_last=True)
