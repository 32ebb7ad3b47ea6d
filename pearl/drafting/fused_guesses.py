"""Guesses from the text itself, a datastore, habits and a head, fused.

A position has one candidate a token, even if several sources have it, so the tree that `guess_tree` grows has one node
for it.  Source: the fused tree of SSSD (Marzollo et al. 2024).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from functools import cache
from heapq import nlargest
from importlib import import_module
from typing import NamedTuple

from pearl.drafting.datastore import BINS, DAMPING, RATES, Datastore, Occurrence
from pearl.drafting.heads import HeadGuesses
from pearl.drafting.ngram import MOST_MATCHED, RANKS, Candidate, NgramIndex, learn_rate
from pearl.drafting.output_ngrams import CONTEXT, Habits
from pearl.protocol.messages import Source

MakeHead = Callable[[Sequence[int]], HeadGuesses]  # of a text that is only read
MakeIndex = Callable[[Sequence[int], Datastore | None, Habits | None, MakeHead | None], NgramIndex]

_LEARN = 64  # tokens at the end of a prompt that rates are learned from; each costs a lookup


def text_index(
    tokens: Sequence[int],
    store: Datastore | None,
    habits: Habits | None = None,
    head: MakeHead | None = None,
) -> NgramIndex:
    """Make the index of one text: its own n-grams and, if given, a datastore, habits and a head."""
    if store is None and habits is None and head is None:
        return NgramIndex(tokens)
    return Guesser(tokens, store, habits, head)


@cache
def index_factory(guesses: str) -> MakeIndex:
    """Return the factory that `Method.guesses` names; for the empty name, `text_index`."""
    if not guesses:
        return text_index
    module, _, name = guesses.partition(":")
    factory: MakeIndex = getattr(import_module(module), name)
    return factory


class RankedCandidate(NamedTuple):
    """A candidate, and the row of `RATES` that its share belongs to."""

    candidate: Candidate
    share: int


class StoreGuesses:
    """Candidates from a datastore for the positions of one text, with rates that are learned as the text grows.

    Args:
        text: only read; its owner calls `cut` when it rolls back.
        learn_from: the first position to learn from.
    """

    def __init__(self, store: Datastore, text: Sequence[int], learn_from: int) -> None:
        self._store = store
        self._text = text
        self._learned = learn_from
        self._powers = [DAMPING**matched for matched in range(MOST_MATCHED + 1)]
        self._rates = [list(rates) for rates in RATES]
        self._lookups: dict[int, list[Occurrence]] = {}  # by position; the longest match first

    def cut(self, length: int) -> None:
        """Forget lookups of positions after the first `length` tokens."""
        for position in list(self._lookups):
            if position > length:
                del self._lookups[position]

    def learn(self, committed: int) -> None:
        """Update the rates by the first `committed` tokens of the text, which are final."""
        for position in range(max(1, self._learned), committed):
            for candidate, share in self.ranked(position):
                hit = candidate.token == self._text[position]
                learn_rate(self._rates[share], candidate.matched - 1, hit)
        self._learned = max(self._learned, committed)
        for position in list(self._lookups):
            if position < committed:
                del self._lookups[position]

    def candidates(self, position: int) -> list[Candidate]:
        """Return candidates as `NgramIndex` does; their occurrences are places of the datastore, which decrease."""
        return [candidate for candidate, _ in self.ranked(position)]

    def ranked(self, position: int) -> list[RankedCandidate]:
        occurrences = self._lookups.get(position)
        if occurrences is None:
            context = self._text[max(0, position - MOST_MATCHED) : position]
            occurrences = self._lookup(context)
            self._lookups[position] = occurrences
        return self._ranked(occurrences)

    def following(self, candidate: Candidate) -> list[Candidate]:
        """Return candidates for the position after a candidate: what followed its occurrences."""
        occurrences = []
        for place, matched in candidate.occurrences:
            occurrences.append((place - 1, min(MOST_MATCHED, matched + 1)))
        return [child for child, _ in self._ranked(occurrences)]

    def _lookup(self, context: Sequence[int]) -> list[Occurrence]:
        return self._store.occurrences(context)

    def _ranked(self, occurrences: Sequence[Occurrence]) -> list[RankedCandidate]:
        """Return the `RANKS` candidates of the most weight."""
        if not occurrences:
            return []
        powers = self._powers
        _, longest = occurrences[0]
        by_token = self._store.followed(occurrences)
        weights: dict[int, float] = {}
        for token, places in by_token.items():
            weights[token] = sum([powers[matched] for _, matched in places])
        total = sum([powers[matched] for _, matched in occurrences])
        ranked = []
        for token in nlargest(RANKS, weights, weights.__getitem__):
            places = by_token[token]
            _, matched = places[0]
            share = bisect(BINS, weights[token] / (total + powers[longest]))
            chance = self._rates[share][matched - 1]
            candidate = Candidate(token, chance, matched, tuple(places), Source.DATASTORE)
            ranked.append(RankedCandidate(candidate, share))
        return ranked


class Guesser(NgramIndex):
    """The index of one text with further sources.

    Args:
        habits: of the target; they learn from tokens that are committed after `tokens`.
        head: makes the guesses of the target's head.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        store: Datastore | None = None,
        habits: Habits | None = None,
        head: MakeHead | None = None,
    ) -> None:
        self._store: StoreGuesses | None = None
        self._head: HeadGuesses | None = None
        self._habits = habits
        self._counted = len(tokens)
        super().__init__(tokens)
        if store is not None:
            self._store = self._make_store(store, max(0, len(tokens) - _LEARN))
            self._store.learn(len(tokens))
        if head is not None:
            self._head = head(self.tokens)

    def _make_store(self, store: Datastore, learn_from: int) -> StoreGuesses:
        return StoreGuesses(store, self.tokens, learn_from)

    def cut(self, length: int) -> None:
        super().cut(length)
        if self._store is not None:
            self._store.cut(length)

    def learn(self, committed: int) -> None:
        super().learn(committed)
        if self._store is not None:
            self._store.learn(committed)
        self._learn_habits(committed)
        if self._head is not None and self.has_head:
            self._head.learn(committed)

    def _learn_habits(self, committed: int) -> None:
        if self._habits is None:
            return
        for position in range(max(1, self._counted), committed):
            self._habits.learn(self._before(position), self.tokens[position])
        self._counted = max(self._counted, committed)

    def candidates(self, position: int) -> list[Candidate]:
        candidates = super().candidates(position)
        if self._store is not None:
            candidates += self._store.candidates(position)
        if self._habits is not None:
            candidates += self._habits.candidates(self._before(position))
        if self._head is not None and self.has_head:
            candidates += self._head.candidates(position)
        return fused(candidates)

    def following(self, candidate: Candidate) -> list[Candidate]:
        candidates: list[Candidate] = []
        for guess in (candidate, *candidate.also):
            candidates += self._following(guess)
        return fused(candidates)

    def _following(self, candidate: Candidate) -> list[Candidate]:
        """Return what the candidate's own source has for the position after it."""
        if candidate.context:
            assert self._habits is not None
            return self._habits.candidates(candidate.context)
        if candidate.source is Source.NGRAM:
            return super().following(candidate)
        if candidate.source is Source.HEAD:
            assert self._head is not None
            return self._head.following(candidate)
        assert self._store is not None
        return self._store.following(candidate)

    def _before(self, position: int) -> list[int]:
        return self.tokens[max(0, position - CONTEXT) : position]


def fused(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Merge candidates of several sources for one position: each token once, the likeliest first.

    A token of several sources has the highest of its chances, with that one's source. Chances sum to at most 1.
    """
    best: dict[int, Candidate] = {}
    for candidate in candidates:
        likelier = best.get(candidate.token)
        if likelier is None:
            best[candidate.token] = candidate
            continue
        if candidate.chance > likelier.chance:
            likelier, candidate = candidate, likelier
        also = (*likelier.also, candidate, *candidate.also)
        best[candidate.token] = likelier._replace(also=also)
    ranked = sorted(best.values(), key=lambda candidate: candidate.chance, reverse=True)
    total = sum([candidate.chance for candidate in ranked])
    if total <= 1:
        return ranked
    return [candidate._replace(chance=candidate.chance / total) for candidate in ranked]
