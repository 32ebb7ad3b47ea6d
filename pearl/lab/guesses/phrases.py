"""Pools of phrases: Lookahead decoding, whose guesses come from the target's own Jacobi iterations, and Ouroboros.

Beside the text the target is fed a window of guessed tokens, `LEVELS` deep and `COLUMNS` wide.  Level 0 is a chain
after the text; a token of a later level follows the one above it.  What the target draws after the last level is a
new level, and the first is dropped.  Each column, with its new token, is an n-gram that the target itself has written
from a wrong beginning; such n-grams are kept in a pool by their first token, and verified when the text comes to it.

Example with 3 columns and 2 levels, after the text's last token t::

    level 0   a b c     a follows t, b follows a, c follows b
    level 1   d e f     d follows a, e follows b, f follows c
    draws     x y z     the pool learns (a: d x), (b: e y) and (c: f z); level 1 is the next level 0

Source: "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", Fu et al. 2024, section 3; its W, N
and G are `COLUMNS`, `LEVELS` + 1 and `KEPT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pearl.drafting.ngram import Candidate, GuessWindow, NgramIndex, learn_rate
from pearl.protocol.messages import Source
from pearl.protocol.sequence import common_prefix

COLUMNS = 15
LEVELS = 4
KEPT = 15  # phrases for a first token
LONGEST = LEVELS  # tokens of a phrase after its first
_PRIOR = 0.4  # how often a guess of the pool is right, until it is measured; by place in its n-gram


class Pool(NgramIndex):
    """Phrases of one text, by the token that they follow. Guesses come from these alone, not from `sources`."""

    def __init__(self, tokens: Sequence[int], *sources: Any) -> None:
        #: first token -> the phrases that may follow it, the latest last
        self._pool: dict[int, list[tuple[int, ...]]] = {}
        self._hits = [_PRIOR] * LONGEST
        #: The position of the last guesses, and the phrases that were guessed from there on.
        self._guess_position = 0
        self._guessed_phrases: list[tuple[int, ...]] = []
        super().__init__(tokens)

    def add(self, first: int, phrase: tuple[int, ...]) -> None:
        """Add `phrase` of up to `LONGEST` tokens to the pool of `first`, which keeps the `KEPT` newest."""
        phrases = self._pool.setdefault(first, [])
        if phrase in phrases:
            phrases.remove(phrase)
        phrases.append(phrase)
        del phrases[:-KEPT]

    def learn(self, committed: int) -> None:
        """Update how often guesses are right. The index of n-grams is not used."""
        phrases = self._guessed_phrases
        text = self.tokens[self._guess_position : committed]
        if not text or not phrases:
            return
        longest = max(common_prefix(phrase, text) for phrase in phrases)
        for place in range(min(len(text), LONGEST, longest + 1)):
            learn_rate(self._hits, place, place < longest)
        self._guess_position = 0
        self._guessed_phrases = []

    def candidates(self, position: int) -> list[Candidate]:
        """Return the pool's continuations of the text's last token; none within pending tokens."""
        if position != len(self.tokens):
            return []
        phrases = self._pool.get(self.tokens[-1], [])
        self._guess_position = position
        self._guessed_phrases = list(phrases)
        return self._after((), phrases)

    def following(self, candidate: Candidate) -> list[Candidate]:
        path = candidate.context
        phrases = [phrase for phrase in self._guessed_phrases if phrase[: len(path)] == path]
        return self._after(path, phrases)

    def _after(self, path: tuple[int, ...], phrases: Sequence[tuple[int, ...]]) -> list[Candidate]:
        """Return each continuation once, the latest first; they share the chance that one of them is right."""
        place = len(path)
        tokens: dict[int, None] = {}  # in this order
        for phrase in reversed(phrases):
            if len(phrase) > place:
                tokens[phrase[place]] = None
        candidates = []
        for token in tokens:
            chance = self._hits[place] / len(tokens)
            context = (*path, token)
            candidates.append(Candidate(token, chance, (), Source.JACOBI, context=context))
        return candidates


class JacobiIndex(Pool):
    """The pool of one text, and the window of its Jacobi iterations."""

    def __init__(self, tokens: Sequence[int], *sources: Any) -> None:
        self._levels: list[list[int]] = []
        for level in range(LEVELS):
            places = range(level * COLUMNS, (level + 1) * COLUMNS)
            self._levels.append([tokens[-1 - place % len(tokens)] for place in places])
        super().__init__(tokens)

    def window(self, most: int, room: int) -> GuessWindow | None:
        """Return as many columns as fit into `most` nodes; None if none does, or at the context's end."""
        columns = min(COLUMNS, most // LEVELS)
        if columns < 1 or room <= COLUMNS + LEVELS:
            return None
        tokens: list[int] = []
        for level in self._levels:
            tokens += level[:columns]
        parents = [*range(-1, columns - 1), *range((LEVELS - 1) * columns)]
        return GuessWindow(tuple(tokens), tuple(parents), columns, LEVELS)

    def take(self, draws: Sequence[int]) -> None:
        for column, token in enumerate(draws):
            first, *rest = (level[column] for level in self._levels)
            self.add(first, (*rest, token))
        undrawn = self._levels[-1][len(draws) :]
        self._levels.append([*draws, *undrawn])
        del self._levels[0]


class PhraseIndex(Pool):
    """The pool of Ouroboros: phrases of the text, and what the target drew after tokens that were discarded.

    Its guesses lengthen a window after its last token.  The draft's own phrases, which the paper makes by Jacobi
    iterations, are here the n-grams of the text that it verifies (`draft_lookup`).  Source: "Ouroboros: Generating
    Longer Drafts Phrase by Phrase for Faster Speculative Decoding", Zhao et al. 2024, section 3.
    """

    reads_discarded = True

    def __init__(self, tokens: Sequence[int], *sources: Any) -> None:
        self._next_end = 0  # phrases of the text that end before it are in the pool
        super().__init__(tokens)

    def learn(self, committed: int) -> None:
        super().learn(committed)
        for end in range(max(self._next_end, LONGEST + 1), committed + 1):
            first, *phrase = self.tokens[end - LONGEST - 1 : end]
            self.add(first, tuple(phrase))
        self._next_end = max(self._next_end, committed + 1)

    def discarded(self, tokens: Sequence[int], draws: Sequence[int]) -> None:
        """Add a phrase for each discarded token.

        It is what the target drew after the token and, while the draft had drawn the same, after the next.
        """
        for start, first in enumerate(tokens):
            end = start + 1
            while end < len(tokens) and end - start < LONGEST and tokens[end] == draws[end - 1]:
                end += 1
            self.add(first, tuple(draws[start:end]))
