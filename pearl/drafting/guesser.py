"""Guesses from the text itself, from a datastore and from habits, as one.

A place has one candidate a token, whoever names it; so the tree that `guess_tree` grows of them has one node for what
several sources say.  Source: SSSD (Marzollo et al. 2024), whose fused tree this is.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from heapq import nlargest
from itertools import chain

from pearl.drafting.datastore import BINS, Datastore, Occurrence
from pearl.drafting.habits import CONTEXT, Habits
from pearl.drafting.ngram import MOST_MATCHED, RANKS, RATE_WEIGHT, Candidate, NgramIndex, TextIndex
from pearl.protocol.messages import Source

_LEARN = 64  # tokens at the end of a prompt that the rates are learned from: each takes a lookup


def text_index(tokens: Sequence[int], store: Datastore | None, habits: Habits | None = None) -> TextIndex:
    """What guesses for one text are made from: its own n-grams, and a datastore's and habits where there are such."""
    return NgramIndex(tokens) if store is None and habits is None else Guesser(tokens, store, habits)


class StoreGuesses:
    """Candidates from a datastore for the places of one text, with rates that are learned as the text grows.

    Args:
        text: read, never written: whoever owns it says by `cut` what it has taken back.
        learn_from: position before which nothing is learned.
    """

    def __init__(self, store: Datastore, text: Sequence[int], learn_from: int) -> None:
        self._store, self._text, self._learned = store, text, learn_from
        weights = store.weights
        self._fade = weights.fade
        self._powers = [weights.damping**matched for matched in range(MOST_MATCHED + 1)]
        self._rates = [list(rates) for rates in weights.rates]
        self._found: dict[int, list[Occurrence]] = {}  # by place; those that match longest come first

    def cut(self, length: int) -> None:
        """Forget what was looked up for places after the first `length` tokens."""
        for position in [one for one in self._found if one > length]:
            del self._found[position]

    def learn(self, committed: int) -> None:
        """Correct the rates by the tokens that are now known to be right: the first `committed` of the text."""
        for position in range(max(1, self._learned), committed):
            for candidate, share in self.shares(position):
                rates, hit = self._rates[share], candidate.token == self._text[position]
                rates[candidate.matched - 1] += RATE_WEIGHT * (hit - rates[candidate.matched - 1])
        self._learned = max(self._learned, committed)
        for position in [one for one in self._found if one < committed]:
            del self._found[position]

    def candidates(self, position: int) -> list[Candidate]:
        """As `NgramIndex.candidates`; occurrences are places of the datastore, which go down as the text goes on."""
        return [candidate for candidate, _ in self.shares(position)]

    def shares(self, position: int) -> list[tuple[Candidate, int]]:
        """The candidates with the rows of `Weights.rates` that their shares belong to."""
        return self._ranked(self._occurrences(position))

    def following(self, candidate: Candidate) -> list[Candidate]:
        """What may follow a candidate: what followed it where it stood."""
        ends = [(place - 1, min(MOST_MATCHED, matched + 1)) for place, matched in candidate.occurrences]
        return [below for below, _ in self._ranked(ends, self._fade)]

    def _occurrences(self, position: int) -> list[Occurrence]:
        if (found := self._found.get(position)) is None:
            last = self._text[max(0, position - MOST_MATCHED) : position]
            found = self._found[position] = self._store.occurrences(last)
        return found

    def _ranked(self, occurrences: Sequence[Occurrence], factor: float = 1.0) -> list[tuple[Candidate, int]]:
        """Those of most weight; see `shares`."""
        if not occurrences:
            return []
        powers, longest = self._powers, occurrences[0][1]
        found = self._store.followed(occurrences)
        if occurrences[-1][1] == longest:
            weights = {token: powers[longest] * len(seen) for token, seen in found.items()}
            total = powers[longest] * len(occurrences)
        else:
            weights = {token: sum([powers[matched] for _, matched in seen]) for token, seen in found.items()}
            total = sum([powers[matched] for _, matched in occurrences])
        result = []
        for token in nlargest(RANKS, weights, weights.__getitem__):
            seen = found[token]
            matched, share = seen[0][1], bisect(BINS, weights[token] / (total + powers[longest]))
            chance = factor * self._rates[share][matched - 1]
            result.append((Candidate(token, chance, matched, tuple(seen), Source.DATASTORE), share))
        return result


class Guesser:
    """A `TextIndex` of one text that asks others too.

    Args:
        store: a datastore, where there is one.
        habits: of the target, where they are kept; they take in what is committed behind `tokens`.
    """

    def __init__(self, tokens: Sequence[int], store: Datastore | None, habits: Habits | None = None) -> None:
        self._own = NgramIndex(tokens)
        self._store = None
        if store is not None:
            self._store = StoreGuesses(store, self._own.tokens, max(0, len(tokens) - _LEARN))
            self._store.learn(len(tokens))
        self._habits, self._counted = habits, len(tokens)

    @property
    def tokens(self) -> list[int]:
        return self._own.tokens

    def __len__(self) -> int:
        return len(self._own)

    def extend(self, tokens: Iterable[int]) -> None:
        self._own.extend(tokens)

    def cut(self, length: int) -> None:
        self._own.cut(length)
        if self._store is not None:
            self._store.cut(length)

    def learn(self, committed: int) -> None:
        self._own.learn(committed)
        if self._store is not None:
            self._store.learn(committed)
        if self._habits is not None:
            for position in range(max(1, self._counted), committed):
                self._habits.learn(self._before(position), self.tokens[position])
            self._counted = max(self._counted, committed)

    def candidates(self, position: int) -> list[Candidate]:
        found = [self._own.candidates(position)]
        if self._store is not None:
            found.append(self._store.candidates(position))
        if self._habits is not None:
            found.append(self._habits.candidates(self._before(position)))
        return fused(*found)

    def following(self, candidate: Candidate) -> list[Candidate]:
        return fused(*[self._following(side) for side in (candidate, *candidate.also)])

    def _following(self, candidate: Candidate) -> list[Candidate]:
        """What follows where its own source has seen it."""
        if candidate.context:
            assert self._habits is not None
            return self._habits.candidates(candidate.context)
        index = self._own if candidate.source is Source.NGRAM else self._store
        assert index is not None
        return index.following(candidate)

    def _before(self, position: int) -> list[int]:
        return self.tokens[max(0, position - CONTEXT) : position]


def fused(*lists: Sequence[Candidate]) -> list[Candidate]:
    """Candidates of several sources for one place, the likeliest first, each token once.

    One that several name has the highest of its chances, and the source that says so. Together they are never more than
    certain.
    """
    best: dict[int, Candidate] = {}
    for candidate in chain(*lists):
        known = best.get(candidate.token)
        if known is None:
            best[candidate.token] = candidate
            continue
        first, second = (known, candidate) if known.chance >= candidate.chance else (candidate, known)
        best[candidate.token] = first.with_chance(first.chance, (*first.also, second, *second.also))
    ranked = sorted(best.values(), key=lambda candidate: candidate.chance, reverse=True)
    total = sum([candidate.chance for candidate in ranked])
    if total <= 1:
        return ranked
    return [candidate.with_chance(candidate.chance / total, candidate.also) for candidate in ranked]
