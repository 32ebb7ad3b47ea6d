"""Special tokens inside a text, each as one character that no text can hold.

A model that quotes "</think>" writes ordinary tokens, and one that ends its thought writes one token of that name.
Both read the same once they are text. So the token becomes a lone surrogate, which UTF-8 cannot decode to, and the
expressions that look for it are compiled for that character. A vocabulary without such a token has the name alone,
which then counts wherever it stands.
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
ANY = r"\ud800-\udfff"  # all characters of marks, within a class of an expression


@lru_cache(maxsize=64)
def _ids_of(tokenizer: Any, names: tuple[str, ...]) -> dict[int, str]:
    """Return the names that are tokens, by their ids."""
    wanted = frozenset(names)
    ids = {}
    for id, entry in enumerate(tokenizer.tokens()):
        if entry in wanted:
            ids[id] = entry
    return ids


class Marks:
    """The names that the vocabulary has as tokens, and the characters in their place.

    Args:
        tokenizer: None if only text is known, and no tokens.
    """

    def __init__(self, names: Sequence[str], tokenizer: Tokenizer | None = None) -> None:
        self.ids: dict[int, str] = {}
        if tokenizer is not None and names:
            key: Any = tokenizer  # hashable, as every object without an equality of its own
            self.ids = _ids_of(key, tuple(names))
        self._names: dict[str, str] = {}
        self._characters: dict[str, str] = {}
        for name in sorted(self.ids.values(), key=len, reverse=True):
            character = chr(_FIRST + len(self._names))
            self._names[character] = name
            self._characters[name] = character

    def are_all_tokens(self, names: Sequence[str]) -> bool:
        return set(names) <= self._characters.keys()

    def character(self, name: str) -> str:
        return self._characters[name]

    def compiled(self, expression: str) -> regex.Pattern[str]:
        """Compile an expression in which names are written as `re.escape` writes them."""
        for name, character in self._characters.items():
            expression = expression.replace(regex.escape(name), character)
        return regex.compile(expression, regex.DOTALL)

    def readable(self, text: str, hidden: Sequence[str] = ()) -> str:
        """Return the text with names in place of characters; those of `hidden` names are left out."""
        if text.isascii():
            return text
        for character, name in self._names.items():
            if character in text:
                text = text.replace(character, "" if name in hidden else name)
        return text


class MarkedText:
    """Puts marks in place of the names of tokens, in a text that comes token by token."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._due: deque[str] = deque()  # names of tokens whose text is not there yet
        self._held = ""

    def push(self, text: str, token: int | None = None) -> str:
        """Take the text that became final with a token, which stop strings may have held back."""
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
        """Return the text that waited for the name of a token."""
        text = self._held
        self._held = ""
        return text
