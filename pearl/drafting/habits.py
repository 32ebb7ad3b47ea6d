"""What a target tends to write: counts of what followed the last few tokens in its texts so far, for those to come.

A text's own n-grams know nothing where its last token has not come before: at 15 to 22 positions in 100 of the answers
that the rates below come from.  Yet most of the time a model has shown in earlier texts what it lets follow that token.
SSSD (Marzollo et al. 2024) has a datastore for this; habits fill themselves with the model's own answers.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

from pearl.drafting.ngram import RANKS, RATE_WEIGHT, Candidate

CONTEXT = 3  # tokens of the longest context that is counted
_CONTEXTS = 1 << 17  # that are kept: those longest not seen are forgotten; they take some 50 MB
_FOLLOWERS = 16  # of a context that are counted: the least frequent makes room
_BINS = (0.15, 0.3, 0.5, 0.8)  # of a candidate's share: their inner bounds

# How often a candidate is right, by the tokens of its context (rows) and by its share (columns). Measured on 48 answers
# of SmolLM2-135M to HumanEval, GSM8K and MT-bench, one after the other; texts soon have rates of their own.
_PRIOR = (
    (0.03, 0.08, 0.17, 0.25, 0.56),
    (0.03, 0.12, 0.19, 0.46, 0.58),
    (0.09, 0.19, 0.35, 0.78, 0.98),
)


class Habits:
    """Of one target. What it keeps is bounded, and holds no text: no more than `CONTEXT` + 1 tokens in a row.

    How often a candidate is right is learned as texts are written, by its share of all that followed.
    """

    def __init__(self, contexts: int = _CONTEXTS) -> None:
        self._most = contexts
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}  # those seen last come last
        self._rates = [list(rates) for rates in _PRIOR]

    def __len__(self) -> int:
        """Contexts that are kept."""
        return len(self._followers)

    def learn(self, before: Sequence[int], token: int) -> None:
        """`token` was written behind `before`, whose last `CONTEXT` tokens matter: correct the rates, and count it."""
        for candidate, (length, share) in self._ranked(tuple(before[-CONTEXT:])):
            rates = self._rates[length - 1]
            rates[share] += RATE_WEIGHT * ((candidate == token) - rates[share])
        for length in range(1, min(CONTEXT, len(before)) + 1):
            self._count(tuple(before[-length:]), token)

    def candidates(self, before: Sequence[int]) -> list[Candidate]:
        """What may follow `before`, the likeliest first: what followed the longest of its ends that is known."""
        context = tuple(before[-CONTEXT:])
        left, result = 1.0, []
        for token, (length, share) in self._ranked(context):
            chance = min(left, self._rates[length - 1][share])
            left -= chance
            result.append(Candidate(token, chance, length, (), context=(*context, token)[-CONTEXT:]))
        return result

    def _ranked(self, context: tuple[int, ...]) -> list[tuple[int, tuple[int, int]]]:
        """Tokens, each with where its rate is: the length of what is known of the context, and the bin of its share."""
        for length in range(len(context), 0, -1):
            if (followers := self._followers.get(context[-length:])) is not None:
                total = sum(followers.values()) + 1
                best = sorted(followers.items(), key=lambda pair: pair[1], reverse=True)[:RANKS]
                return [(token, (length, bisect(_BINS, count / total))) for token, count in best]
        return []

    def _count(self, context: tuple[int, ...], token: int) -> None:
        followers = self._followers.pop(context, None) or {}
        if token not in followers and len(followers) == _FOLLOWERS:
            del followers[min(followers, key=followers.__getitem__)]
        followers[token] = followers.get(token, 0) + 1
        self._followers[context] = followers
        if len(self._followers) > self._most:
            del self._followers[next(iter(self._followers))]
