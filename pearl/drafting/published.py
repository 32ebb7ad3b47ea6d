"""Guesses as published, to compare methods with: `NgramIndex` learns its probabilities instead.

Each kind of index says where tokens come from and with what probability they enter the tree; the rest (the tree, which
of its nodes pay, verification) is that of method `ngram`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import nlargest

from pearl.drafting.datastore import Datastore, Occurrence
from pearl.drafting.fused_guesses import Guesser, MakeHead, StoreGuesses
from pearl.drafting.jacobi import JacobiIndex, PhraseIndex
from pearl.drafting.ngram import LONGEST, Candidate, NgramIndex
from pearl.drafting.output_ngrams import Habits
from pearl.protocol.messages import Source

MakeIndex = Callable[[Sequence[int], Datastore | None, Habits | None, MakeHead | None], NgramIndex]

# SSSD's weights are not printed. These dampings are the best of a grid of 5 by 4 over 36 greedy answers (3,398 tokens)
# of SmolLM2-135M to HumanEval, GSM8K and MT-bench. Guesses are then right 1.06 times as often as they say.
INPUT_FACTOR, SHORT_DAMPING, DEPTH_DAMPING = 1.0, 0.65, 0.9
_WIDEST = 8  # children of a node
_FIRST = 5000  # REST's continuations


class Copied(NgramIndex):
    """Copies what followed the earliest occurrence of the longest matching n-gram: a chain.

    Args:
        longest: tokens of an n-gram.
        is_prompt_alone: whether only the prompt is copied from.
    """

    def __init__(self, tokens: Sequence[int], longest: int, is_prompt_alone: bool) -> None:
        self._longest, self._limit = longest, len(tokens) if is_prompt_alone else None
        super().__init__(tokens)

    def learn(self, committed: int) -> None:
        """There is nothing to learn: a copy is always proposed."""

    def candidates(self, position: int) -> list[Candidate]:
        text = self.tokens
        for n in range(min(self._longest, position), 0, -1):
            known = min(n, LONGEST)
            for end in self._ends[known - 1].get(tuple(text[position - known : position]), ()):
                if (
                    end < min(position, self._limit or position)
                    and self._matched(end, position, known) >= n
                ):
                    return self._copy(end)
        return []

    def following(self, candidate: Candidate) -> list[Candidate]:
        ((end, _),) = candidate.occurrences
        return self._copy(end + 1)

    def _copy(self, end: int) -> list[Candidate]:
        is_known = end < (self._limit or len(self.tokens))
        return [Candidate(self.tokens[end], 1.0, 1, ((end, 1),))] if is_known else []


class Counted(Guesser):
    """Guesses with probabilities from counts: P = count(prefix + path) / count(prefix).

    P of a guess from the text itself is scaled and damped; P of one from the datastore is not.

    The prefixes are the text's last 1 to `LONGEST` tokens, each with a tree of its own, and a token has the largest of
    its probabilities.  Source: SSSD (Marzollo et al. 2024), section 3.1.
    """

    most_occurrences, ranks = 100, _WIDEST
    weights = INPUT_FACTOR, SHORT_DAMPING, DEPTH_DAMPING

    def _make_store(self, store: Datastore, learn_from: int) -> StoreGuesses:
        return CountedStore(store, self.tokens, learn_from)

    def learn(self, committed: int) -> None:
        self._learn_habits(committed)

    def _matched(self, end: int, position: int, known: int) -> int:
        return known  # no longer prefix has a tree

    def _ranked(self, occurrences: Sequence[tuple[int, int]]) -> list[Candidate]:
        factor, damping, depth = self.weights
        known = [
            (self.tokens[end], end, matched)
            for end, matched in occurrences
            if end < len(self.tokens)
        ]
        best: dict[int, float] = {}
        for length in {matched for _, _, matched in known}:
            tree = [token for token, _, matched in known if matched >= length]
            weight = factor * depth * (1 - damping**length) / len(tree)
            for token in set(tree):
                best[token] = max(best.get(token, 0.0), weight * tree.count(token))
        return [
            Candidate(
                token,
                best[token],
                1,
                tuple((end, matched) for each, end, matched in known if each == token),
            )
            for token in nlargest(self.ranks, best, best.__getitem__)
        ]


class CountedStore(StoreGuesses):
    """Continuations of a datastore by their share."""

    def _ranked(self, occurrences: Sequence[Occurrence]) -> list[tuple[Candidate, int]]:
        found = self._store.followed(occurrences)
        best = nlargest(_WIDEST, found, lambda token: len(found[token]))
        return [
            (
                Candidate(
                    t, len(found[t]) / len(occurrences), 1, tuple(found[t]), Source.DATASTORE
                ),
                0,
            )
            for t in best
        ]


class Rest(Counted):
    """A datastore alone: the first continuations of the longest suffix that it has (He et al. 2024)."""

    def _make_store(self, store: Datastore, learn_from: int) -> StoreGuesses:
        return LongestMatch(store, self.tokens, learn_from)

    def candidates(self, position: int) -> list[Candidate]:
        return [] if self._store is None else self._store.candidates(position)


class LongestMatch(CountedStore):
    """Continuations of the longest match alone."""

    def _lookup(self, last: Sequence[int]) -> list[Occurrence]:
        found = self._store.occurrences(last, _FIRST)
        return [each for each in found if each[1] == found[0][1]]


INDEXES: dict[str, MakeIndex] = {
    "jacobi": lambda tokens, *_: JacobiIndex(tokens),
    "phrases": lambda tokens, *_: PhraseIndex(tokens),
    "pld": lambda tokens, *_: Copied(tokens, longest=3, is_prompt_alone=False),
    "llma": lambda tokens, *_: Copied(tokens, longest=5, is_prompt_alone=True),
    "pia": lambda tokens, store, habits, *_: Counted(tokens, None, habits),
    "rest": Rest,
    "sssd": lambda tokens, store, *_: Counted(tokens, store),
}
