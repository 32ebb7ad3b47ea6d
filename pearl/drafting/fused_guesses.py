"""Guesses from several sources, fused: if several guess the same token, it is one candidate.

The sources are the n-grams of the text itself, a datastore, `Habits` (n-grams of earlier outputs),
a drafting head, and a prediction that the client sent.  Because of the fusion, no two children of
a node in the tree of guesses (`guess_tree`) have the same token.  Source: the fused tree of SSSD
(Marzollo et al. 2024).
"""

from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from heapq import nlargest
from importlib import import_module

from pearl.drafting.datastore import BINS, CONTINUATIONS, DAMPING, Datastore
from pearl.drafting.heads import HeadGuesses
from pearl.drafting.ngram import (
    MOST_MATCHED,
    RANKS,
    Candidate,
    GuessSource,
    NgramIndex,
    Occurrence,
    SuffixLookup,
    scaled,
)
from pearl.drafting.output_ngrams import HabitGuesses, Habits
from pearl.drafting.prediction import PredictedGuesses
from pearl.protocol.messages import Source

MakeHead = Callable[[Sequence[int]], HeadGuesses]  # the argument, a text's tokens, is only read
MakeIndex = Callable[
    [Sequence[int], Datastore | None, Habits | None, MakeHead | None, Sequence[int]], NgramIndex
]

# Weight of an occurrence, by match length.
_POWERS = [DAMPING**matched for matched in range(MOST_MATCHED + 1)]
_NEARLY_SURE = 0.75  # a candidate with this chance is right so often that a head adds little
_LEARN = 64  # rates are learned from this many tokens at the end of a prompt; each costs a lookup


def text_index(
    tokens: Sequence[int],
    store: Datastore | None,
    habits: Habits | None = None,
    head: MakeHead | None = None,
    prediction: Sequence[int] = (),
) -> NgramIndex:
    """Make the index of one text: its own n-grams, and the further sources that are passed."""
    if store is None and habits is None and head is None and not prediction:
        return NgramIndex(tokens)
    return Guesser(tokens, store, habits, head, prediction)


@cache
def index_factory(guesses: str) -> MakeIndex:
    """Return the function that makes the index of a text, given its name `guesses`.

    The name has the form "module:name", as in `Method.guesses`. An empty name stands for
    `text_index`.
    """
    if not guesses:
        return text_index
    module, _, name = guesses.partition(":")
    factory: MakeIndex = getattr(import_module(module), name)
    return factory


class StoreGuesses(SuffixLookup):
    """Candidates from a datastore for the positions of one text.

    An occurrence is a place in the datastore. The datastore has its tokens in reverse order, so the
    token that follows place 7 in a document is at place 6 (`stride` is -1).
    """

    stride = -1
    is_conditional = False
    most = CONTINUATIONS

    def __init__(self, store: Datastore, text: list[int], learn_from: int) -> None:
        super().__init__(text, "datastore", learn_from)
        self._store = store

    def _matching(self, position: int) -> list[Occurrence]:
        context = self.tokens[max(0, position - MOST_MATCHED) : position]
        return self._store.occurrences(context, self.most)

    def _ranked(self, occurrences: Sequence[Occurrence]) -> list[Candidate]:
        if not occurrences:
            return []
        _, longest = occurrences[0]
        by_token = self._store.followed(occurrences)
        weights = {}
        for token, places in by_token.items():
            weights[token] = sum([_POWERS[matched] for _, matched in places])
        total = sum([_POWERS[matched] for _, matched in occurrences])
        candidates = []
        for token in nlargest(RANKS, weights, weights.__getitem__):
            matches = tuple(by_token[token])
            _, matched = matches[0]
            share = bisect(BINS, weights[token] / (total + _POWERS[longest]))
            rate = (share, matched - 1)
            chance = self._rates[share][matched - 1]
            candidate = Candidate(token, chance, matches, Source.DATASTORE, rate=rate, origin=self)
            candidates.append(candidate)
        return candidates


class Guesser(NgramIndex):
    """The n-gram index of one text, with further sources of guesses.

    Args:
        tokens: the prompt.
        store: a datastore to look guesses up in.
        habits: n-grams of the target's earlier outputs. They learn from the tokens that are
            committed after the prompt.
        head: makes the source that takes its guesses from the target's drafting head.
        prediction: the tokens that the client expects after the prompt.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        store: Datastore | None = None,
        habits: Habits | None = None,
        head: MakeHead | None = None,
        prediction: Sequence[int] = (),
    ) -> None:
        self._sources: list[GuessSource] = []
        super().__init__(tokens)
        if store is not None:
            source = self._make_store(store, max(0, len(tokens) - _LEARN))
            source.learn(len(tokens))
            self._sources.append(source)
        if habits is not None:
            self._sources.append(HabitGuesses(habits, self.tokens))
        if prediction:
            self._sources.append(PredictedGuesses(prediction, self.tokens))
        if head is not None:  # the last source, because it looks at the guesses of the others
            self._sources.append(head(self.tokens))

    def _make_store(self, store: Datastore, learn_from: int) -> StoreGuesses:
        return StoreGuesses(store, self.tokens, learn_from)

    def cut(self, length: int) -> None:
        super().cut(length)
        for source in self._sources:
            source.cut(length)

    def learn(self, committed: int) -> None:
        super().learn(committed)
        for source in self._sources:
            source.learn(committed)

    def candidates(self, position: int) -> list[Candidate]:
        return fused(self.of_sources(position, super().candidates(position)))

    def of_sources(self, position: int, known: Iterable[Candidate] = ()) -> list[Candidate]:
        """Return the candidates in `known`, followed by those of the further sources.

        The head is asked only if none of the other candidates is nearly certain.
        """
        candidates = list(known)
        for source in self._sources:
            if not isinstance(source, HeadGuesses) or self._asks_head(candidates):
                candidates += source.candidates(position)
        return candidates

    def _asks_head(self, candidates: Sequence[Candidate]) -> bool:
        """Return whether to ask the head for guesses in addition to `candidates`.

        The head has to compute its guesses, and they add little if a candidate is nearly certain.
        """
        best = max([candidate.chance for candidate in candidates], default=0.0)
        return self.has_head and best < _NEARLY_SURE

    def following(self, candidate: Candidate) -> list[Candidate]:
        candidates = []
        for guess in (candidate, *candidate.also):
            if guess.origin is None:
                candidates += super().following(guess)
            else:
                candidates += guess.origin.following(guess)
        return fused(candidates)


def fused(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Merge candidates for one position; return each token once, the likeliest first.

    If several sources guess a token, only the candidate with the highest chance is kept; its `also`
    has the others. Chances are scaled to sum to at most 1.
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
    return scaled(ranked)
