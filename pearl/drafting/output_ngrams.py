"""An n-gram table over a target's earlier outputs, as a source of guesses for later outputs.

The n-grams of a text itself give no guess after a token that is new in that text.  In the answers
from which the rates in priors.json come, 15 to 22% of the positions have no guess for this reason.
At such positions the target's earlier outputs often give a guess.  SSSD (Marzollo et al. 2024) uses
a prepared datastore there.  `Habits` instead learns from each output which tokens followed others.
"""

from bisect import bisect
from collections.abc import Sequence

from pearl.drafting.ngram import RANKS, Candidate, GuessSource, learn_hit, prior_rates

CONTEXT = 3  # tokens of the longest context
_CONTEXTS = 1 << 17  # contexts kept, about 50 MB; the least recently seen are dropped
_FOLLOWERS = 16  # tokens counted per context; a new one replaces the least frequent
_BINS = (0.15, 0.3, 0.5, 0.8)  # inner bounds of the bins of a token's share of a context's counts


class Habits:
    """The n-gram table of one target's outputs: which tokens followed each context, and how often.

    A context has at most `CONTEXT` tokens. The table keeps at most `contexts` contexts, and drops
    those not seen for the longest time.
    """

    def __init__(self, contexts: int = _CONTEXTS) -> None:
        self._most = contexts
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}  # most recently seen last
        self._rates = prior_rates("output_ngrams")

    def __len__(self) -> int:
        """Return the number of contexts."""
        return len(self._followers)

    def learn(self, before: Sequence[int], token: int) -> None:
        """Learn that `token` followed `before`.

        First update the rates of the candidates that the table has after `before`, then the counts.
        """
        for candidate in self.candidates(before):
            learn_hit(self._rates, candidate, token)
        for length in range(1, min(CONTEXT, len(before)) + 1):
            self._count(tuple(before[-length:]), token)

    def candidates(
        self, before: Sequence[int], origin: GuessSource | None = None
    ) -> list[Candidate]:
        """Return the tokens seen after the longest known suffix of `before`, the likeliest first."""
        context = tuple(before[-CONTEXT:])
        for length in range(len(context), 0, -1):
            counts = self._followers.get(context[-length:])
            if counts is None:
                continue
            total = sum(counts.values()) + 1
            remaining = 1.0
            candidates = []
            for token in sorted(counts, key=counts.__getitem__, reverse=True)[:RANKS]:
                share = bisect(_BINS, counts[token] / total)
                rate = (length - 1, share)
                chance = min(remaining, self._rates[length - 1][share])
                remaining -= chance
                extended = (*context, token)[-CONTEXT:]
                candidate = Candidate(token, chance, (), context=extended, rate=rate, origin=origin)
                candidates.append(candidate)
            return candidates
        return []

    def _count(self, context: tuple[int, ...], token: int) -> None:
        followers = self._followers.pop(context, None) or {}
        if token not in followers and len(followers) == _FOLLOWERS:
            del followers[min(followers, key=followers.__getitem__)]
        followers[token] = followers.get(token, 0) + 1
        self._followers[context] = followers
        if len(self._followers) > self._most:
            del self._followers[next(iter(self._followers))]


class HabitGuesses:
    """The guesses of `Habits` for one text, whose committed tokens the habits learn.

    The tokens that the text has when this object is made, the prompt, are not learned.
    """

    def __init__(self, habits: Habits, tokens: Sequence[int]) -> None:
        self._habits = habits
        self._tokens = tokens
        self._learned = len(tokens)

    def cut(self, length: int) -> None:
        """Do nothing, because only committed tokens are learned, and these are never removed."""

    def learn(self, committed: int) -> None:
        for position in range(max(1, self._learned), committed):
            self._habits.learn(self._before(position), self._tokens[position])
        self._learned = max(self._learned, committed)

    def candidates(self, position: int) -> list[Candidate]:
        return self._habits.candidates(self._before(position), self)

    def following(self, candidate: Candidate) -> list[Candidate]:
        return self._habits.candidates(candidate.context, self)

    def _before(self, position: int) -> Sequence[int]:
        return self._tokens[max(0, position - CONTEXT) : position]
