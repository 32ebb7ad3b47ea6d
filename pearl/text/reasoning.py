"""The tags around a thinking model's reasoning, and whether a prompt has opened it.

A model thinks if its chat template has the tags. Some templates write the opening tag themselves, at the end of the
prompt. For example "<think>\nHm.\n</think>\n\nYes" is the reasoning "Hm." and the answer "Yes". `pearl.text.reply`
takes replies apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import regex

from pearl.errors import ConfigError
from pearl.text.marks import Marks

if TYPE_CHECKING:
    from pearl.text.stream import Tokenizer

_TAIL = 16  # tokens of a prompt that may hold an opening tag at its end


@dataclass(frozen=True)
class Tags:
    """The tags around the reasoning in a text.

    Attributes:
        start, end: expressions that match the tags.
        tokens: names that may be special tokens of a vocabulary: those in the tags, the opening tag's first.
        marks: a model writes these tags if its chat template contains one of these strings.
        dropped: names of tokens that are left out of all texts, such as the tokens around the answer.
        opening, closing: the texts that begin and end reasoning.
        answer: the text that begins an answer, if the format has such.
    """

    start: str
    end: str
    tokens: tuple[str, ...]
    marks: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    opening: str = ""
    closing: str = ""
    answer: str = ""

    def are_open(self, prompt: str) -> bool:
        """Return whether the text after this prompt begins with reasoning."""
        return regex.search(rf"(?:{self.start})\s*$", prompt) is not None

    def are_open_within(self, text: str) -> bool:
        """Return whether `text`, the beginning of a reply, ends within reasoning."""
        is_open = False
        for tag in regex.finditer(rf"(?P<start>{self.start})|{self.end}", text):
            is_open = tag.group("start") is not None
        return is_open

    def continued(self, prompt: str, reply: str) -> str:
        """Return the prompt with the beginning of the reply, `reply`, appended, so that the model continues it.

        If `reply` does not begin with reasoning, the prompt says that there is none.
        """
        if self.are_open(prompt):
            if regex.search(rf"{self.start}|{self.end}", reply) is None:
                return f"{prompt}\n{self.closing}\n\n{reply}"
            return prompt + regex.sub(rf"^\s*(?:{self.start})\s*", "", reply)
        if regex.match(rf"\s*(?:{'|'.join(map(regex.escape, self.tokens))})", reply) is None:
            return prompt + self.answer + reply
        return prompt + reply


def tag_pair(
    start: str, end: str, marks: tuple[str, ...] = (), dropped: tuple[str, ...] = ()
) -> Tags:
    """Return tags whose beginning and end are fixed strings."""
    return Tags(
        regex.escape(start),
        regex.escape(end),
        tokens=(start, end, *dropped),
        marks=marks or (end,),
        dropped=dropped,
        opening=start,
        closing=end,
    )


HARMONY = Tags(
    regex.escape("<|channel|>analysis<|message|>"),
    regex.escape("<|end|>"),
    tokens=(
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
        "<|constrain|>",
    ),
    marks=("<|channel|>analysis",),
    opening="<|channel|>analysis<|message|>",
    closing="<|end|>",
    answer="<|channel|>final<|message|>",
)

# All kinds of tags, by their names in `--reasoning-tags`. If a template has marks of several, the first one counts.
TAGS = {
    "harmony": HARMONY,  # gpt-oss
    "gemma": Tags(  # Gemma 4
        regex.escape("<|channel>") + r"\w*\n",
        regex.escape("<channel|>"),
        tokens=("<|channel>", "<channel|>"),
        marks=("<|channel>",),
        opening="<|channel>thought",
        closing="<channel|>",
    ),
    "seed": tag_pair("<seed:think>", "</seed:think>"),
    "cohere": tag_pair(  # Command A and R7B
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "mistral": tag_pair("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    "think": tag_pair("<think>", "</think>"),
}


def entry_for(template: str, registry: Mapping[str, Any]) -> Any:
    """Return the first entry that has a mark in a chat template; None if none has.

    `registry`: `TAGS` or `tools.FORMATS`.
    """
    for entry in registry.values():
        if any(mark in template for mark in entry.marks):
            return entry
    return None


def tags_of(template: str) -> Tags | None:
    """Return the tags that a chat template contains; None if it contains none, as its model does not think."""
    tags: Tags | None = entry_for(template, TAGS)
    return tags


def check_tags(choice: str) -> str:
    """Return `choice` if it is valid: auto, none, a name in `TAGS`, or two tags with white space between them.

    Raises `ConfigError` for any other choice.
    """
    if choice in ("auto", "none", *TAGS) or len(choice.split()) == 2:
        return choice
    names = ", ".join(TAGS)
    raise ConfigError(
        f"reasoning tags {choice!r}: give auto, none, one of {names}, or the two tags with a space between, "
        'such as "<reason> </reason>"'
    )


def tags_for(tokenizer: Tokenizer) -> Tags | None:
    """Return the tags that a model writes: those that the user chose, else those in the chat template; None if none."""
    choice = getattr(tokenizer, "reasoning_tags", "auto")
    if choice == "none":
        return None
    if choice in TAGS:
        return TAGS[choice]
    if choice != "auto":
        start, end = choice.split()
        return tag_pair(start, end)
    return tags_of(tokenizer.chat_template)


def tags_after(tokenizer: Tokenizer, prompt: Sequence[int], has_grammar: bool) -> Tags | None:
    """Return the tags in the text after a prompt; None if the text has no reasoning.

    A text with a grammar has reasoning only if the prompt has opened it. Otherwise the grammar applies from the first
    token on.
    """
    tags = tags_for(tokenizer)
    if tags is not None and has_grammar and not is_open_after(tokenizer, tags, prompt):
        return None
    return tags


def is_open_after(
    tokenizer: Tokenizer, tags: Tags, prompt: Sequence[int], prefix: str = ""
) -> bool:
    """Return whether the text after a prompt begins with reasoning.

    Args:
        prefix: the beginning of the reply, if the prompt ends with one.
    """
    if prefix:
        return tags.are_open_within(prefix)
    names = Marks(tags.tokens, tokenizer).ids
    end = ""
    ordinary: list[int] = []
    for token in prompt[-_TAIL:]:
        if token in names:
            end += tokenizer.decode(ordinary) + names[token]
            ordinary = []
        else:
            ordinary.append(token)
    return tags.are_open(end + tokenizer.decode(ordinary))
