"""Guesses without a model: what followed the last few tokens where they occurred earlier in the text.

`NgramIndex` holds one text, prompt and output, and finds earlier occurrences of its end; `guess_tree` grows the
likeliest continuations of several places into one tree.  Source: SSSD (Marzollo et al. 2024), which damps counts by
match length and depth; here the damping is learned from the text itself, token by token.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from pearl.protocol.messages import Source

LONGEST = 4  # tokens of the longest suffix that is indexed; longer matches are found by comparing
MOST_MATCHED = 12  # tokens before a guess that are compared
_OCCURRENCES = 16  # most recent occurrences of a suffix that are considered
RANKS = 3  # candidates a place
_LEARN = 256  # tokens at the end of a prompt that rates are learned from
RATE_WEIGHT = 0.05  # of a new outcome in a rate
_LEAST_CHANCE = 0.01  # of a node

# Rate at which the first, second and third candidate is right if those before it are not, by match length. Measured on
# answers of SmolLM2-135M to HumanEval, GSM8K and MT-bench; a text soon has rates of its own.
_PRIOR = (
    (0.21, 0.52, 0.64, 0.72, 0.75, 0.75, 0.78, 0.85, 0.85, 0.87, 0.87, 0.94),
    (0.12, 0.27, 0.32, 0.45, 0.45, *[0.4] * 7),
    (0.12, 0.18, *[0.15] * 10),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that may follow.

    Attributes:
        token: its id.
        chance: estimated probability that it does.
        matched: tokens before it that match, at most `MOST_MATCHED`; of several occurrences the most.
        occurrences: (position, tokens before it that match) in its source.
        source: where it comes from.
        also: the same token from other sources.
        context: of habits: the last tokens up to it, in place of occurrences.
    """

    token: int
    chance: float
    matched: int
    occurrences: tuple[tuple[int, int], ...]
    source: Source = Source.NGRAM
    also: tuple[Candidate, ...] = ()
    context: tuple[int, ...] = ()

    def with_chance(self, chance: float, also: tuple[Candidate, ...]) -> Candidate:
        return Candidate(self.token, chance, self.matched, self.occurrences, self.source, also, self.context)


class TextIndex(Protocol):
    """A text, and candidates for each of its places; see `NgramIndex`."""

    @property
    def tokens(self) -> list[int]: ...

    def __len__(self) -> int: ...

    def extend(self, tokens: Iterable[int]) -> None: ...

    def cut(self, length: int) -> None: ...

    def learn(self, committed: int) -> None: ...

    def candidates(self, position: int) -> list[Candidate]: ...

    def following(self, candidate: Candidate) -> list[Candidate]: ...


class NgramIndex:
    """Where each n-gram of one text ends, for n up to `LONGEST`. O(1) a token, appended or rolled back.

    Args:
        tokens: the text so far. Rates are learned from its end.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._ends: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(LONGEST)]
        self._rates = [list(rates) for rates in _PRIOR]
        self._learned = max(0, len(tokens) - _LEARN)
        self.extend(tokens)
        self.learn(len(tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append to the text."""
        text = self.tokens
        for token in tokens:
            text.append(token)
            end = len(text)
            for n in range(1, min(LONGEST, end) + 1):
                ends = self._ends[n - 1]
                gram = tuple(text[end - n :])
                if (known := ends.get(gram)) is None:
                    ends[gram] = [end]
                else:
                    known.append(end)

    def cut(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        text = self.tokens
        for end in range(len(text), length, -1):
            for n in range(1, min(LONGEST, end) + 1):
                ends, gram = self._ends[n - 1], tuple(text[end - n : end])
                known = ends[gram]
                known.pop()
                if not known:
                    del ends[gram]
        del text[length:]

    def learn(self, committed: int) -> None:
        """Update the rates by the first `committed` tokens of the text, which are final."""
        for position in range(max(1, self._learned), committed):
            for rank, candidate in enumerate(self.candidates(position)):
                rates = self._rates[rank]
                hit = candidate.token == self.tokens[position]
                rates[candidate.matched - 1] += RATE_WEIGHT * (hit - rates[candidate.matched - 1])
                if hit:
                    break
        self._learned = max(self._learned, committed)

    def candidates(self, position: int) -> list[Candidate]:
        """Candidates for `position`, 1 to the text's length, by the tokens before it; the likeliest first."""
        text, matches = self.tokens, {}
        for n in range(min(LONGEST, position), 0, -1):
            ends = self._ends[n - 1].get(tuple(text[position - n : position]), ())
            for i in range(len(ends) - 1, -1, -1):
                end = ends[i]
                if end >= position or end in matches:
                    continue
                matches[end] = self._matched(end, position, n)
                if len(matches) == _OCCURRENCES:
                    break
            if len(matches) == _OCCURRENCES:
                break
        return self._ranked(matches.items())

    def following(self, candidate: Candidate) -> list[Candidate]:
        """Candidates for the place behind a candidate: what followed its occurrences."""
        return self._ranked((end + 1, min(MOST_MATCHED, matched + 1)) for end, matched in candidate.occurrences)

    def _ranked(self, occurrences: Iterable[tuple[int, int]]) -> list[Candidate]:
        weights: dict[int, float] = {}
        found: dict[int, list[tuple[int, int]]] = {}
        text, last = self.tokens, len(self.tokens)
        for end, matched in occurrences:
            if end < last:
                token = text[end]
                # One longer match outweighs several shorter ones; the more recent of equals comes first.
                weights[token] = weights.get(token, 0.0) + 3.0**matched
                found.setdefault(token, []).append((end, matched))
        best = sorted(weights, key=weights.__getitem__, reverse=True)[:RANKS]
        left, result = 1.0, []
        for rank, token in enumerate(best):
            longest = max(matched for _, matched in found[token])
            chance = left * self._rates[rank][longest - 1]
            left -= chance
            result.append(Candidate(token, chance, longest, tuple(found[token])))
        return result

    def _matched(self, end: int, position: int, known: int) -> int:
        """How many tokens before `end` equal those before `position`; at least `known`."""
        text, matched = self.tokens, known
        while matched < MOST_MATCHED and matched < end and text[end - 1 - matched] == text[position - 1 - matched]:
            matched += 1
        return matched


@dataclass(frozen=True, slots=True)
class Anchor:
    """A place of the text that guesses may follow.

    Attributes:
        end: the guesses' position; the token before it is their parent.
        chance: probability that the text is right up to there.
        taken: the token that another proposer has at `end`; None at the text's end.
        trust: probability that `taken` is right if the text before it is.
    """

    end: int
    chance: float
    taken: int | None = None
    trust: float = 0.0


def anchored(text: Sequence[int], committed: int, acceptance: float) -> list[Anchor]:
    """The places after the last committed token and after each pending one, given the draft's acceptance rate."""
    reached = [acceptance**i for i in range(len(text) - committed + 1)]
    taken = [*text[committed:], None]
    return [Anchor(committed + i, reached[i], token, acceptance) for i, token in enumerate(taken)]


def guess_tree(
    index: TextIndex, anchors: Sequence[Anchor], most: int, limit: int, branches: bool = True
) -> tuple[list[int], list[int], list[float], list[Source]]:
    """The `most` likeliest guesses after the anchors, the likeliest first: a tree in which parents come first.

    Args:
        limit: the first position that needs no guess.
        branches: whether a token may have several children; otherwise the likeliest alone.

    Returns:
        (tokens, parents, chances, sources). A parent is numbered by its position where it is a token of the text, and
        from the text's length on where it is a guess. A chance is that of the whole path.
    """
    widest = RANKS if branches else 1
    ids = count()
    waiting: list[tuple[float, int, int, int, Candidate]] = []  # -chance, order, parent, position, what
    for anchor in anchors:
        for candidate in index.candidates(anchor.end)[:widest] if anchor.end < limit else ():
            chance = candidate.chance
            if anchor.taken is not None:
                if candidate.token == anchor.taken:
                    continue
                # At most one of the two is right; their errors are independent.
                chance *= (1 - anchor.trust) / (1 - chance * anchor.trust)
            heapq.heappush(waiting, (-anchor.chance * chance, next(ids), anchor.end - 1, anchor.end, candidate))
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    sources: list[Source] = []
    while waiting and len(tokens) < most and -waiting[0][0] >= _LEAST_CHANCE:
        negative, _, parent, position, candidate = heapq.heappop(waiting)
        number = len(index) + len(tokens)
        tokens.append(candidate.token)
        parents.append(parent)
        chances.append(-negative)
        sources.append(candidate.source)
        if position + 1 < limit:
            for below in index.following(candidate)[:widest]:
                heapq.heappush(waiting, (negative * below.chance, next(ids), number, position + 1, below))
    return tokens, parents, chances, sources
