"""The reasoning of thinking models, apart from the answer that follows: their tags, and a splitter of their texts.

A model thinks if its chat template has the tags. Some templates write the opening tag themselves, at the end of the
prompt. White space around tags is dropped. For example "<think>\nHm.\n</think>\n\nYes" is the reasoning "Hm." and the
answer "Yes".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pearl.text.stream import Tokenizer

_TAIL = 16  # tokens of a prompt that may hold an opening tag at its end


@dataclass(frozen=True)
class Tags:
    """The marks around the reasoning in a text.

    Attributes:
        plain: marks that begin an answer without reasoning.
        other_end: a mark that also ends the reasoning, before a call of a tool.
        marks: strings of which a model's chat template has one if the model writes these tags.
    """

    start: str
    end: str
    plain: tuple[str, ...] = ()
    other_end: str = ""
    marks: tuple[str, ...] = ()

    def are_open(self, prompt: str) -> bool:
        """Return whether the text after this prompt begins with reasoning."""
        return prompt.rstrip().endswith(self.start)


# Every kind of tags that is read; of several in one template the first.
TAGS = {
    "think": Tags("<think>", "</think>", marks=("</think>",)),
    # gpt-oss: its special tokens have no text.
    "harmony": Tags(
        "analysis",
        "assistantfinal",
        ("final", "commentary"),
        "assistantcommentary",
        marks=("<|channel|>analysis",),
    ),
}


def entry_for(template: str, registry: Mapping[str, Any]) -> Any:
    """Return the first entry of `TAGS` or `tools.FORMATS` of which a chat template has a mark; None if it has none."""
    for entry in registry.values():
        if any(mark in template for mark in entry.marks):
            return entry
    return None


def tags_of(template: str) -> Tags | None:
    """Return the tags that a chat template knows; None if its model does not think."""
    tags: Tags | None = entry_for(template, TAGS)
    return tags


def splitter_of(tokenizer: Tokenizer, prompt: Sequence[int]) -> Splitter | None:
    """Return a splitter of the text after a prompt that the chat template wrote; None if the model does not think."""
    tags = tags_of(tokenizer.chat_template)
    if tags is None:
        return None
    prompt_end = tokenizer.decode(prompt[-_TAIL:])
    return Splitter(tags, tags.are_open(prompt_end))


class Splitter:
    """Splits a text that comes in pieces of any size.

    Args:
        is_open: whether the prompt has opened the reasoning.
    """

    def __init__(self, tags: Tags, is_open: bool = False) -> None:
        self.tags = tags
        self.is_open = is_open
        # The part that the text is in; empty until it is known.
        self._part: Literal["", "reasoning", "answer"] = ""
        self._is_begun = False  # whether that part has more than the white space that is dropped
        self._text = ""  # not returned yet: it may be part of a tag, or white space beside one

    def feed(self, piece: str, is_last: bool = False) -> tuple[str, str]:
        """Take the next piece; return the reasoning and the answer that become final with it."""
        self._text += piece
        reasoning = ""
        answer = ""
        if not self._part:
            self._begin(is_last)
        if self._part == "reasoning":
            reasoning = self._reasoning(is_last)
        if self._part == "answer":
            self._strip()
            answer = self._text
            self._text = ""
        return reasoning, answer

    def _begin(self, is_last: bool) -> None:
        """Find the part with which the text begins, if that is known yet."""
        text = self._text.lstrip()
        marks: dict[str, Literal["reasoning", "answer"]] = {self.tags.start: "reasoning"}
        if not self.is_open:
            marks |= dict.fromkeys(self.tags.plain, "answer")
        for mark, part in marks.items():
            if text.startswith(mark):
                self._part = part
                self._text = text.removeprefix(mark)
                return
        if is_last or not any(mark.startswith(text) for mark in marks):
            self._part = "reasoning" if self.is_open else "answer"
            self._is_begun = not self.is_open  # an answer without tags is left as it is

    def _reasoning(self, is_last: bool) -> str:
        self._strip()
        text = self._text
        ends = [self.tags.end]
        if self.tags.other_end:
            ends.append(self.tags.other_end)
        end = min((end for end in ends if end in text), key=text.index, default=None)
        if end is not None:
            reasoning, _, self._text = text.partition(end)
            self._part = "answer"
            self._is_begun = False
            return reasoning.rstrip()
        length = len(text)
        if not is_last:
            length = min(decided(text, end) for end in ends)
        self._text = text[length:]
        return text[:length]

    def _strip(self) -> None:
        if not self._is_begun:
            self._text = self._text.lstrip()
            self._is_begun = bool(self._text)


def decided(text: str, tag: str) -> int:
    """Return the length of `text` without a beginning of `tag` at its end, and white space before that.

    For example 3 for "Yes </thi" and the tag "</think>".
    """
    for size in range(len(tag) - 1, 0, -1):
        if text.endswith(tag[:size]):
            return len(text[:-size].rstrip())
    return len(text.rstrip())


def split(text: str, tags: Tags, is_open: bool = False) -> tuple[str, str]:
    """Return the reasoning and the answer of a whole text."""
    return Splitter(tags, is_open).feed(text, is_last=True)
