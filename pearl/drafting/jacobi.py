"""Pools of phrases: Lookahead decoding, whose guesses come from the target's own Jacobi iterations, and Ouroboros.

Beside the text the target is fed a window of guessed tokens, `LEVELS` deep and `COLUMNS` wide.  Level 0 is a chain
behind the text; a token of a later level follows the one above it.  What the target draws behind the last level is a
new level, and the first is dropped.  Each column, with its new token, is an n-gram that the target itself has written
from a wrong beginning; such n-grams are kept in a pool by their first token, and verified when the text comes to it.

Source: "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", Fu et al. 2024, section 3; its W, N
and G are `COLUMNS`, `LEVELS` + 1 and `KEPT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pearl.drafting.ngram import RATE_WEIGHT, Candidate, NgramIndex
from pearl.models.feeds import Feed
from pearl.protocol.messages import Source
from pearl.protocol.sequence import common_prefix

COLUMNS, LEVELS, KEPT = 15, 4, 15
LONGEST = LEVELS  # tokens of a phrase behind its first
_PRIOR = 0.4  # how often a guess of the pool is right, until it is known; by place in its n-gram


@dataclass(frozen=True)
class Window:
    """The window's tokens as nodes of a tree, level by level. A parent is another node; -1: the text's last token."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    columns: int

    def behind(self, fed: Feed) -> Feed:
        """A feed whose first token is the text's last, and this window, as one tree."""
        own = len(fed.tokens)
        parents = tuple(range(-1, own - 1)) if fed.parents is None else fed.parents
        more = tuple(0 if parent < 0 else own + parent for parent in self.parents)
        return Feed(
            (*fed.tokens, *self.tokens), fed.rows + len(self.tokens), fed.slot, (*parents, *more)
        )


class Pool(NgramIndex):
    """Phrases of one text, by the token that they follow. Its guesses come from these alone."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._pool: dict[
            int, list[tuple[int, ...]]
        ] = {}  # first token -> what may follow it, the latest last
        self._hits = [_PRIOR] * LONGEST
        self._guessed: tuple[int, list[tuple[int, ...]]] = (
            0,
            [],
        )  # a position, and what was guessed from there on
        super().__init__(tokens)

    def add(self, first: int, phrase: tuple[int, ...]) -> None:
        """Keep that `phrase`, of up to `LONGEST` tokens, may follow `first`; only the latest `KEPT` are."""
        known = self._pool.setdefault(first, [])
        if phrase in known:
            known.remove(phrase)
        known.append(phrase)
        del known[:-KEPT]

    def learn(self, committed: int) -> None:
        """Update how often guesses are right. The index of n-grams is not used."""
        start, phrases = self._guessed
        text = self.tokens[start:committed]
        if text and phrases:
            best = max(common_prefix(phrase, text) for phrase in phrases)
            for place in range(min(len(text), LONGEST, best + 1)):
                self._hits[place] += RATE_WEIGHT * ((place < best) - self._hits[place])
            self._guessed = (0, [])

    def candidates(self, position: int) -> list[Candidate]:
        """The pool's continuations of the text's last token; none within pending tokens."""
        if position != len(self.tokens):
            return []
        phrases = self._pool.get(self.tokens[-1], [])
        self._guessed = position, list(phrases)
        return self._after((), phrases)

    def following(self, candidate: Candidate) -> list[Candidate]:
        _, phrases = self._guessed
        path = candidate.context
        return self._after(path, [phrase for phrase in phrases if phrase[: len(path)] == path])

    def _after(self, path: tuple[int, ...], phrases: Sequence[tuple[int, ...]]) -> list[Candidate]:
        """Each continuation once, the latest first, sharing the chance that one of them is right."""
        place = len(path)
        tokens = list(
            dict.fromkeys(phrase[place] for phrase in reversed(phrases) if len(phrase) > place)
        )
        return [
            Candidate(
                token, self._hits[place] / len(tokens), 1, (), Source.JACOBI, context=(*path, token)
            )
            for token in tokens
        ]


class JacobiIndex(Pool):
    """The pool of one text, and its window."""

    def __init__(self, tokens: Sequence[int]) -> None:
        begun = [tokens[-1 - at % len(tokens)] for at in range(LEVELS * COLUMNS)]
        self._levels = [begun[at : at + COLUMNS] for at in range(0, len(begun), COLUMNS)]
        super().__init__(tokens)

    def window(self, most: int) -> Window | None:
        """As many columns as fit into `most` nodes; None if none does."""
        columns = min(COLUMNS, most // LEVELS)
        if columns < 1:
            return None
        tokens = [token for level in self._levels for token in level[:columns]]
        parents = [*range(-1, columns - 1), *range((LEVELS - 1) * columns)]
        return Window(tuple(tokens), tuple(parents), columns)

    def take(self, draws: Sequence[int]) -> None:
        """Take in what the target drew behind the last level, of each column."""
        for column, token in enumerate(draws):
            first, *rest = (level[column] for level in self._levels)
            self.add(first, (*rest, token))
        self._levels = [*self._levels[1:], [*draws, *self._levels[-1][len(draws) :]]]


class PhraseIndex(Pool):
    """The pool of Ouroboros: phrases of the text, and what the target drew behind tokens that were discarded.

    Its guesses lengthen a window behind its last token.  The draft's own phrases, which the paper makes by Jacobi
    iterations, are here the n-grams of the text that it verifies (`draft_lookup`).  Source: "Ouroboros: Generating
    Longer Drafts Phrase by Phrase for Faster Speculative Decoding", Zhao et al. 2024, section 3.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._taken = 0  # tokens of the text whose phrases are in the pool
        super().__init__(tokens)

    def learn(self, committed: int) -> None:
        super().learn(committed)
        for end in range(max(self._taken, LONGEST + 1), committed + 1):
            first, *phrase = self.tokens[end - LONGEST - 1 : end]
            self.add(first, tuple(phrase))
        self._taken = max(self._taken, committed + 1)

    def discarded(self, tokens: Sequence[int], draws: Sequence[int]) -> None:
        """Take in discarded tokens of the draft, and the target's draw behind each of them.

        A phrase is what the target drew behind one token and, while the draft had drawn the same, behind the next.
        """
        for start, first in enumerate(tokens):
            end = start + 1
            while end < len(tokens) and end - start < LONGEST and tokens[end] == draws[end - 1]:
                end += 1
            self.add(first, tuple(draws[start:end]))
