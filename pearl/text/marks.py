"""Represents each special token in a text by one character that no text can contain.

A model that quotes "</think>" writes ordinary tokens, and a model that ends its reasoning writes
the special token "</think>". Once decoded, the two look the same. So the special token is replaced
by a lone surrogate, a character that UTF-8 never decodes to. Expressions that search for the token
are compiled to search for that character. If the vocabulary has no such token, expressions search
for the name, and find it wherever it is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import regex

if TYPE_CHECKING:
    from pearl.text.stream import Tokenizer

_FIRST = 0xDC00  # a surrogate
ANY = r"\ud800-\udfff"  # range of all characters that stand for tokens, for a character class


@lru_cache(maxsize=64)
def _ids_of(tokenizer: Any, names: tuple[str, ...]) -> dict[int, str]:
    """Return {id: name} of the names that are tokens of the vocabulary."""
    wanted = frozenset(names)
    ids = {}
    for id, entry in enumerate(tokenizer.tokens()):
        if entry in wanted:
            ids[id] = entry
    return ids


class Marks:
    """Maps the names of special tokens to the characters that stand for them, and back.

    Args:
        names: names of special tokens; names that are not in the vocabulary are ignored.
        tokenizer: None if the tokens of the text are not known; then no name has a character.
    """

    def __init__(self, names: Sequence[str], tokenizer: Tokenizer | None = None) -> None:
        self.ids: dict[int, str] = {}
        if tokenizer is not None and names:
            key: Any = tokenizer  # hashable, because it defines no equality
            self.ids = _ids_of(key, tuple(names))
        self._names: dict[str, str] = {}
        self._characters: dict[str, str] = {}
        for name in sorted(self.ids.values(), key=len, reverse=True):
            character = chr(_FIRST + len(self._names))
            self._names[character] = name
            self._characters[name] = character

    def has(self, name: str) -> bool:
        """Return whether the vocabulary has a token of this name."""
        return name in self._characters

    def character(self, name: str) -> str:
        return self._characters[name]

    def compiled(self, expression: str) -> regex.Pattern[str]:
        """Compile an expression in which the names are replaced by their characters.

        The names must be in the expression as `regex.escape` writes them.
        """
        for name, character in self._characters.items():
            expression = expression.replace(regex.escape(name), character)
        return regex.compile(expression, regex.DOTALL)

    def readable(self, text: str, hidden: Sequence[str] = ()) -> str:
        """Return the text with names in place of characters. The names in `hidden` are left out."""
        if text.isascii():
            return text
        for character, name in self._names.items():
            if character in text:
                text = text.replace(character, "" if name in hidden else name)
        return text


class MarkedText:
    """Replaces the names of special tokens by characters, in a text that comes token by token."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._due: deque[str] = deque()  # names of tokens that have come, while their text has not
        self._held = ""

    def push(self, text: str, token: int | None = None) -> str:
        """Take the next token and text; return the marked text that is certain now.

        Args:
            text: the text that became final with `token`. It may belong to earlier tokens, because
                text that could begin a stop string is held back.
        """
        if token in self._marks.ids:
            name = self._marks.ids[token]
            if not self._due and text.endswith(name):
                return text.removesuffix(name) + self._marks.character(name)
            self._due.append(name)
        if not self._due:
            return text
        self._held += text
        marked = ""
        while self._due and self._due[0] in self._held:
            name = self._due.popleft()
            before, _, self._held = self._held.partition(name)
            marked += before + self._marks.character(name)
        if not self._due:
            marked += self.finish()
        return marked

    def finish(self) -> str:
        """Return the text that was held back in case it became the name of a token."""
        text = self._held
        self._held = ""
        return text
