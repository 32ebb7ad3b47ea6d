"""The tags around a thinking model's reasoning, and whether a prompt has opened the reasoning.

A model thinks if its chat template has the tags. Some templates write the opening tag themselves,
at the end of the prompt. For example, "<think>\\nHm.\\n</think>\\n\\nYes" is the reasoning "Hm."
and the answer "Yes". `pearl.text.reply` splits replies at the tags.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import regex
from msgspec import toml

from pearl.errors import ConfigError, RequestError
from pearl.text.marks import Marks

if TYPE_CHECKING:
    from pearl.text.stream import Tokenizer

log = logging.getLogger(__name__)

_TAIL = 16  # tokens of a prompt that may hold an opening tag at its end


@dataclass(frozen=True)
class Tags:
    """The tags around the reasoning in a text; tags.toml has those of all models.

    Attributes:
        start, end: expressions that match the opening and the closing tag.
        tokens: names in the tags that may be special tokens of a vocabulary; the first is in the
            opening tag.
        marks: a model writes these tags if its chat template contains one of these strings.
        dropped: names of tokens that are left out of all texts, such as the tokens around the
            answer.
        opening, closing: the opening and the closing tag as text, for prompts that contain them.
        turn: the text between reasoning and answer that begins a new message of the assistant;
            empty if both are in the same message.
        answer: the text that begins an answer; empty if the format has none.
    """

    start: str
    end: str
    tokens: tuple[str, ...]
    marks: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    opening: str = ""
    closing: str = ""
    turn: str = ""
    answer: str = ""

    def are_open(self, prompt: str) -> bool:
        """Return whether this prompt ends with the opening tag, so that reasoning follows."""
        return regex.search(rf"(?:{self.start})\s*$", prompt) is not None

    def are_closed(self, prompt: str) -> bool:
        """Return whether this prompt ends with the closing tag."""
        return regex.search(rf"(?:{self.end})\s*$", prompt) is not None

    def are_open_within(self, text: str) -> bool:
        """Return whether `text`, the beginning of a reply, ends within reasoning."""
        is_open = False
        for tag in regex.finditer(rf"(?P<start>{self.start})|{self.end}", text):
            is_open = tag.group("start") is not None
        return is_open

    def begun(self, thought: str, content: str) -> str:
        """Return the beginning of a reply: reasoning in its tags, and then `content`.

        If `content` is empty, the reasoning is left open, so that the model continues it.
        """
        if self.answer:
            end = self.closing + self.turn + self.answer
            reply = self.opening + thought
        else:
            end = f"\n{self.closing}\n\n"
            reply = f"{self.opening}\n{thought}"
        return reply + end + content if content else reply

    def continued(self, prompt: str, reply: str) -> str:
        """Return the prompt with `reply`, the beginning of a reply, appended.

        The model continues the reply. If `reply` has no reasoning, tags put before `reply` tell the
        model so. For example, if the prompt has opened the reasoning, a closing tag is put before
        `reply`.
        """
        if self.are_open(prompt):
            if regex.search(rf"{self.start}|{self.end}", reply) is None:
                return f"{prompt}\n{self.closing}\n\n{reply}"
            return prompt + regex.sub(rf"^\s*(?:{self.start})\s*", "", reply)
        if regex.match(rf"\s*(?:{'|'.join(map(regex.escape, self.tokens))})", reply) is None:
            return prompt + self.answer + reply
        return prompt + reply


def tag_pair(start: str, end: str) -> Tags:
    """Return tags whose beginning and end are fixed strings."""
    return Tags(
        regex.escape(start),
        regex.escape(end),
        tokens=(start, end),
        marks=(end,),
        opening=start,
        closing=end,
    )


_TABLES = Path(__file__).with_name("tags.toml")
# All kinds of tags, by their names in `--reasoning-tags`. If a template has marks of several, the first one counts.
TAGS = toml.decode(_TABLES.read_bytes(), type=dict[str, Tags])
HARMONY = TAGS["harmony"]


def entries_for(template: str, registry: Mapping[str, Any]) -> dict[str, Any]:
    """Return those entries of a registry that have a mark which occurs in a chat template.

    `registry`: `TAGS` or `tools.FORMATS`. It maps a name to an entry with the attribute `marks`, as
    the result does.
    """
    entries = {}
    for name, entry in registry.items():
        if any(mark in template for mark in entry.marks):
            entries[name] = entry
    return entries


def tags_of(template: str) -> Tags | None:
    """Return the first of `TAGS` that a chat template contains; None if it contains none."""
    return next(iter(entries_for(template, TAGS).values()), None)


def check_tags(choice: str) -> str:
    """Return `choice` if it is valid; otherwise raise `ConfigError`.

    A choice is valid if it is auto, none, a name in `TAGS`, or two tags with white space between
    them.
    """
    if choice in ("auto", "none", *TAGS) or len(choice.split()) == 2:
        return choice
    names = ", ".join(TAGS)
    raise ConfigError(
        f"reasoning tags {choice!r}: give auto, none, one of {names}, or the two tags with a space between, "
        'such as "<reason> </reason>"'
    )


def tags_for(tokenizer: Tokenizer) -> Tags | None:
    """Return the tags that a model writes; None if it writes no reasoning.

    The user's choice takes precedence over the tags in the chat template.
    """
    choice = getattr(tokenizer, "reasoning_tags", "auto")
    if choice == "none":
        return None
    if choice in TAGS:
        return TAGS[choice]
    if choice != "auto":
        start, end = choice.split()
        return tag_pair(start, end)
    return tags_of(tokenizer.chat_template)


def warn_of_unknown_tags(tokenizer: Tokenizer) -> None:
    """Log a warning if the chat template writes reasoning between tags that are not known here."""
    if tokenizer.reasoning_tags == "none" or tags_for(tokenizer) is not None:
        return
    thought = "They ask for a word."
    reply = {"role": "assistant", "content": "Red.", "reasoning_content": thought}
    try:
        text = tokenizer.chat_text([{"role": "user", "content": "?"}, reply]) or ""
    except RequestError:  # the template takes no such conversation
        return
    if thought in text:
        log.warning(
            "the chat template writes reasoning between tags that are not known here: it stays in the content; "
            "--reasoning-tags names them"
        )


def tags_after(
    tokenizer: Tokenizer, prompt: Sequence[int], has_grammar: bool, prefix: str = ""
) -> Tags | None:
    """Return the tags in the text after a prompt; None if the text has no reasoning.

    A text with a grammar has reasoning only if the prompt has opened it; otherwise the grammar
    applies from the first token on.

    Args:
        prefix: the beginning of the reply, if the prompt ends with one.
    """
    tags = tags_for(tokenizer)
    if tags is not None and has_grammar and not is_open_after(tokenizer, tags, prompt, prefix):
        return None
    return tags


def is_open_after(
    tokenizer: Tokenizer, tags: Tags, prompt: Sequence[int], prefix: str = ""
) -> bool:
    """Return whether the text after a prompt begins within reasoning.

    Args:
        prefix: the beginning of the reply, if the prompt ends with one.
    """
    end = end_of(tokenizer, tags, prompt)
    if prefix:
        return tags.are_open_within(prefix) and not tags.are_closed(end)
    return tags.are_open(end)


def end_of(tokenizer: Tokenizer, tags: Tags, prompt: Sequence[int]) -> str:
    """Return the end of a prompt as text.

    `decode` leaves out special tokens, so the special tokens of the tags are written by name here.
    """
    names = Marks(tags.tokens, tokenizer).ids
    end = ""
    ordinary: list[int] = []
    for token in prompt[-_TAIL:]:
        if token in names:
            end += tokenizer.decode(ordinary) + names[token]
            ordinary = []
        else:
            ordinary.append(token)
    return end + tokenizer.decode(ordinary)
