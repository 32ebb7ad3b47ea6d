"""Lookahead decoding: guesses from the target's own Jacobi iterations.

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

COLUMNS, LEVELS, KEPT = 15, 4, 15
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
        return Feed((*fed.tokens, *self.tokens), fed.rows + len(self.tokens), fed.slot, (*parents, *more))


class JacobiIndex(NgramIndex):
    """The pool of one text, and its window. Its guesses come from the pool alone."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._pool: dict[int, list[tuple[int, ...]]] = {}  # first token -> what may follow it, the latest last
        self._hits = [_PRIOR] * LEVELS
        self._guessed: tuple[int, list[tuple[int, ...]]] = (0, [])  # a position, and what was guessed from there on
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
            known = self._pool.setdefault(first, [])
            gram = (*rest, token)
            if gram in known:
                known.remove(gram)
            known.append(gram)
            del known[:-KEPT]
        self._levels = [*self._levels[1:], [*draws, *self._levels[-1][len(draws) :]]]

    def learn(self, committed: int) -> None:
        """Update how often guesses are right. The index of n-grams is not used."""
        start, grams = self._guessed
        text = self.tokens[start:committed]
        if text and grams:
            best = max(sum(a == b for a, b in zip(gram, text, strict=False)) for gram in grams)
            for place in range(min(len(text), LEVELS, best + 1)):
                self._hits[place] += RATE_WEIGHT * ((place < best) - self._hits[place])
            self._guessed = (0, [])

    def candidates(self, position: int) -> list[Candidate]:
        """The pool's continuations of the text's last token; none within pending tokens."""
        if position != len(self.tokens):
            return []
        grams = self._pool.get(self.tokens[-1], [])
        self._guessed = position, list(grams)
        return self._after((), grams)

    def following(self, candidate: Candidate) -> list[Candidate]:
        _, grams = self._guessed
        path = candidate.context
        return self._after(path, [gram for gram in grams if gram[: len(path)] == path])

    def _after(self, path: tuple[int, ...], grams: Sequence[tuple[int, ...]]) -> list[Candidate]:
        """Each continuation once, the latest first, sharing the chance that one of them is right."""
        place = len(path)
        if place == LEVELS:
            return []
        tokens = list(dict.fromkeys(gram[place] for gram in reversed(grams)))
        return [
            Candidate(token, self._hits[place] / len(tokens), 1, (), Source.JACOBI, context=(*path, token))
            for token in tokens
        ]
