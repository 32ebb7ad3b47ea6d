"""Guesses from n-grams and datastores as papers print them, for comparisons with `NgramIndex`.

`NgramIndex` learns the probabilities of its guesses; the papers give formulas. Each index here says
which tokens enter the tree of guesses, and with what probability. All else is as in method `ngram`:
the tree, the choice of the nodes that pay, and verification.
"""

import sys
from collections.abc import Sequence
from functools import partial
from heapq import nlargest
from typing import Any

from pearl.drafting.datastore import Datastore
from pearl.drafting.fused_guesses import Guesser, StoreGuesses
from pearl.drafting.ngram import LONGEST, Candidate, NgramIndex, Occurrence
from pearl.drafting.output_ngrams import Habits
from pearl.protocol.messages import Source

# The paper on SSSD does not print its weights. These dampings are the best of a grid of 5 by 4,
# over 36 greedy answers (3,398 tokens) of SmolLM2-135M to HumanEval, GSM8K and MT-bench: with them
# guesses are right 1.06 times as often as their probabilities say.
INPUT_FACTOR = 1.0
SHORT_DAMPING = 0.65
DEPTH_DAMPING = 0.9
_WIDEST = 8  # children of a node
_FIRST = 5000  # most occurrences that REST reads at a position


class Copied(NgramIndex):
    """Guesses a chain: the tokens after the earliest occurrence of the longest matching n-gram.

    Args:
        longest: most tokens of an n-gram.
        is_prompt_alone: whether only the prompt is searched and copied from, and not the output.
    """

    def __init__(
        self, tokens: Sequence[int], *sources: Any, longest: int, is_prompt_alone: bool
    ) -> None:
        self._longest = longest
        self._limit = sys.maxsize
        if is_prompt_alone:
            self._limit = len(tokens)
        super().__init__(tokens)

    def learn(self, committed: int) -> None:
        """Do nothing: a copy is always proposed, with probability 1."""

    def candidates(self, position: int) -> list[Candidate]:
        text = self.tokens
        limit = min(position, self._limit)
        for n in range(min(self._longest, position), 0, -1):
            indexed = min(n, LONGEST)
            for end in self.table.ends(text, position, indexed):
                if end < limit and self._matched(end, position, indexed) >= n:
                    return self._copy(end)
        return []

    def following(self, candidate: Candidate) -> list[Candidate]:
        ((end, _),) = candidate.occurrences
        return self._copy(end + 1)

    def _copy(self, end: int) -> list[Candidate]:
        if end >= min(self._limit, len(self.tokens)):
            return []
        return [Candidate(self.tokens[end], 1.0, ((end, 1),))]


class Counted(Guesser):
    """Guesses with probabilities from counts: P(path) = count(prefix + path) / count(prefix).

    A path is a sequence of guesses after the text, and a prefix is the text's last n tokens, n from
    1 to `LONGEST`. Each n gives a probability; a token gets the largest of these probabilities.

    P of a guess from the text itself is multiplied by `INPUT_FACTOR`, and damped for short prefixes
    and for long paths. P of a guess from the datastore is not changed. Source: SSSD (Marzollo et
    al. 2024), section 3.1.
    """

    most_occurrences = 100
    ranks = _WIDEST
    weights = (INPUT_FACTOR, SHORT_DAMPING, DEPTH_DAMPING)

    def _make_store(self, store: Datastore, learn_from: int) -> StoreGuesses:
        return CountedStore(store, self.tokens, learn_from)

    def learn(self, committed: int) -> None:
        for source in self._sources:
            source.learn(committed)

    def _matched(self, end: int, position: int, at_least: int) -> int:
        return at_least  # prefixes longer than `LONGEST` are not counted

    def _ranked(self, occurrences: Sequence[tuple[int, int]]) -> list[Candidate]:
        factor, damping, depth = self.weights
        places = [occurrence for occurrence in occurrences if occurrence[0] < len(self.tokens)]
        probs: dict[int, float] = {}
        for length in {matched for _, matched in places}:
            tree = [self.tokens[end] for end, matched in places if matched >= length]
            weight = factor * depth * (1 - damping**length) / len(tree)
            for token in set(tree):
                probs[token] = max(probs.get(token, 0.0), weight * tree.count(token))
        candidates = []
        for token in nlargest(self.ranks, probs, probs.__getitem__):
            token_occurrences = tuple(place for place in places if self.tokens[place[0]] == token)
            candidates.append(Candidate(token, probs[token], token_occurrences))
        return candidates


class CountedStore(StoreGuesses):
    """Guesses from a datastore; a token's probability is its share of the continuations."""

    def learn(self, committed: int) -> None:
        """Do nothing: the probabilities are counted, not learned."""

    def _ranked(self, occurrences: Sequence[Occurrence]) -> list[Candidate]:
        by_token = self._store.followed(occurrences)
        candidates = []
        for token in nlargest(_WIDEST, by_token, lambda token: len(by_token[token])):
            places = tuple(by_token[token])
            share = len(places) / len(occurrences)
            candidates.append(Candidate(token, share, places, Source.DATASTORE, origin=self))
        return candidates


class Rest(Counted):
    """Guesses from a datastore alone: what follows the text's longest suffix that occurs there.

    Source: REST (He et al. 2024).
    """

    def _make_store(self, store: Datastore, learn_from: int) -> StoreGuesses:
        return LongestMatch(store, self.tokens, learn_from)

    def candidates(self, position: int) -> list[Candidate]:
        return self.of_sources(position)


class LongestMatch(CountedStore):
    """Guesses what follows the longest match in a datastore, and ignores shorter matches."""

    most = _FIRST

    def _matching(self, position: int) -> list[Occurrence]:
        occurrences = super()._matching(position)
        lengths = [matched for _, matched in occurrences]
        return occurrences[: lengths.count(max(lengths, default=0))]


# ---- factories, named by `pearl.spec.methods` ----


pld = partial(Copied, longest=3, is_prompt_alone=False)
llma = partial(Copied, longest=5, is_prompt_alone=True)


def pia(
    tokens: Sequence[int], store: Datastore | None, habits: Habits | None, *sources: Any
) -> NgramIndex:
    return Counted(tokens, None, habits)


def rest(tokens: Sequence[int], store: Datastore | None, *sources: Any) -> NgramIndex:
    return Rest(tokens, store)


def sssd(tokens: Sequence[int], store: Datastore | None, *sources: Any) -> NgramIndex:
    return Counted(tokens, store)
