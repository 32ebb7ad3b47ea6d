"""Guesses from the text itself, a datastore, habits and a head, fused.

A place has one candidate a token, even if several sources have it, so the tree that `guess_tree` grows has one node for
it.  Source: the fused tree of SSSD (Marzollo et al. 2024).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from heapq import nlargest
from itertools import chain

from pearl.drafting.datastore import BINS, DAMPING, RATES, Datastore, Occurrence
from pearl.drafting.heads import HeadGuesses
from pearl.drafting.ngram import MOST_MATCHED, RANKS, RATE_WEIGHT, Candidate, NgramIndex
from pearl.drafting.output_ngrams import CONTEXT, Habits
from pearl.protocol.messages import Source

MakeHead = Callable[[Sequence[int]], HeadGuesses]  # of a text that is only read

_LEARN = 64  # tokens at the end of a prompt that rates are learned from; each costs a lookup


def text_index(
    tokens: Sequence[int],
    store: Datastore | None,
    habits: Habits | None = None,
    head: MakeHead | None = None,
) -> NgramIndex:
    """The index that guesses for one text come from: its own n-grams and, if given, a datastore, habits and a head."""
    if store is None and habits is None and head is None:
        return NgramIndex(tokens)
    return Guesser(tokens, store, habits, head)


class StoreGuesses:
    """Candidates from a datastore for the places of one text, with rates that are learned as the text grows.

    Args:
        text: only read; its owner calls `cut` when it rolls back.
        learn_from: the first position to learn from.
    """

    def __init__(self, store: Datastore, text: Sequence[int], learn_from: int) -> None:
        self._store, self._text, self._learned = store, text, learn_from
        self._powers = [DAMPING**matched for matched in range(MOST_MATCHED + 1)]
        self._rates = [list(rates) for rates in RATES]
        self._found: dict[int, list[Occurrence]] = {}  # by place; the longest match first

    def cut(self, length: int) -> None:
        """Forget lookups of places after the first `length` tokens."""
        for position in [one for one in self._found if one > length]:
            del self._found[position]

    def learn(self, committed: int) -> None:
        """Update the rates by the first `committed` tokens of the text, which are final."""
        for position in range(max(1, self._learned), committed):
            for candidate, share in self.shares(position):
                rates, hit = self._rates[share], candidate.token == self._text[position]
                rates[candidate.matched - 1] += RATE_WEIGHT * (hit - rates[candidate.matched - 1])
        self._learned = max(self._learned, committed)
        for position in [one for one in self._found if one < committed]:
            del self._found[position]

    def candidates(self, position: int) -> list[Candidate]:
        """As `NgramIndex.candidates`; occurrences are places of the datastore, which decrease along the text."""
        return [candidate for candidate, _ in self.shares(position)]

    def shares(self, position: int) -> list[tuple[Candidate, int]]:
        """The candidates, each with the row of `RATES` that its share belongs to."""
        if (found := self._found.get(position)) is None:
            found = self._found[position] = self._lookup(
                self._text[max(0, position - MOST_MATCHED) : position]
            )
        return self._ranked(found)

    def following(self, candidate: Candidate) -> list[Candidate]:
        """Candidates for the place behind a candidate: what followed its occurrences."""
        ends = [
            (place - 1, min(MOST_MATCHED, matched + 1)) for place, matched in candidate.occurrences
        ]
        return [below for below, _ in self._ranked(ends)]

    def _lookup(self, last: Sequence[int]) -> list[Occurrence]:
        return self._store.occurrences(last)

    def _ranked(self, occurrences: Sequence[Occurrence]) -> list[tuple[Candidate, int]]:
        """The candidates of the most weight; see `shares`."""
        if not occurrences:
            return []
        powers, longest = self._powers, occurrences[0][1]
        found = self._store.followed(occurrences)
        weights = {
            token: sum([powers[matched] for _, matched in seen]) for token, seen in found.items()
        }
        total = sum([powers[matched] for _, matched in occurrences])
        result = []
        for token in nlargest(RANKS, weights, weights.__getitem__):
            seen = found[token]
            matched, share = seen[0][1], bisect(BINS, weights[token] / (total + powers[longest]))
            chance = self._rates[share][matched - 1]
            result.append((Candidate(token, chance, matched, tuple(seen), Source.DATASTORE), share))
        return result


class Guesser(NgramIndex):
    """The index of one text with further sources.

    Args:
        habits: of the target; they learn from tokens that are committed behind `tokens`.
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
        self._habits, self._counted = habits, len(tokens)
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
        if self._habits is not None:
            for position in range(max(1, self._counted), committed):
                self._habits.learn(self._before(position), self.tokens[position])
            self._counted = max(self._counted, committed)

    def candidates(self, position: int) -> list[Candidate]:
        found = [super().candidates(position)]
        if self._store is not None:
            found.append(self._store.candidates(position))
        if self._habits is not None:
            found.append(self._habits.candidates(self._before(position)))
        if self._head is not None and self.has_head:
            found.append(self._head.candidates(position))
        return fused(*found)

    def following(self, candidate: Candidate) -> list[Candidate]:
        return fused(*[self._following(side) for side in (candidate, *candidate.also)])

    def _following(self, candidate: Candidate) -> list[Candidate]:
        """As `following`, by the candidate's own source."""
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


def fused(*lists: Sequence[Candidate]) -> list[Candidate]:
    """Candidates of several sources for one place, the likeliest first, each token once.

    A token of several sources has the highest of its chances, with that one's source. Chances sum to at most 1.
    """
    best: dict[int, Candidate] = {}
    for candidate in chain(*lists):
        known = best.get(candidate.token)
        if known is None:
            best[candidate.token] = candidate
            continue
        first, second = (
            (known, candidate) if known.chance >= candidate.chance else (candidate, known)
        )
        best[candidate.token] = first._replace(also=(*first.also, second, *second.also))
    ranked = sorted(best.values(), key=lambda candidate: candidate.chance, reverse=True)
    total = sum([candidate.chance for candidate in ranked])
    if total <= 1:
        return ranked
    return [candidate._replace(chance=candidate.chance / total) for candidate in ranked]
