"""Prompt lookup: guesses the next tokens: those that followed where the text's last few tokens occurred before.

`NgramIndex` indexes one text (prompt and output); `guess_tree` merges the likeliest continuations at several positions
into one tree.  Source: SSSD (Marzollo et al. 2024), which discounts counts by match length and depth; here,
the discounts (rates by rank and match length) are learned from the text as it grows.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from operator import mul
from typing import NamedTuple

from pearl.protocol.events import Alternative
from pearl.protocol.messages import Source
from pearl.spec.methods import MAX_LOOK_AHEAD

LONGEST = 4  # the longest indexed n-gram; a longer match is found by extending one token by token
MOST_MATCHED = 12  # match lengths are counted up to here
RANKS = 3  # candidates per position
_LEARN = 256  # rates are learned from this many tokens at the end of a prompt
RATE_WEIGHT = 0.05  # weight of a new outcome in a rate's moving average
_LEAST_CHANCE = 0.01  # less likely guesses do not enter the tree
_OF_DRAFT = (Source.RUNNER_UP, Source.BRANCH)
# Of an occurrence, by match length: a longer one outweighs up to two that are one token shorter.
_WEIGHTS = [3.0**matched for matched in range(MOST_MATCHED + 1)]

# Row k: probability that the k-th candidate is right if all before it are wrong, by match length (columns, from 1).
# Measured on answers of SmolLM2-135M to HumanEval, GSM8K and MT-bench; each text adapts its own copy.
_PRIOR = (
    (0.21, 0.52, 0.64, 0.72, 0.75, 0.75, 0.78, 0.85, 0.85, 0.87, 0.87, 0.94),
    (0.12, 0.27, 0.32, 0.45, 0.45, *[0.4] * 7),
    (0.12, 0.18, *[0.15] * 10),
)


class Candidate(
    NamedTuple
):  # dozens are made between two forwards, and a dataclass takes four times as long
    """A token guessed for one position.

    Attributes:
        token: its id.
        chance: estimated probability that it is right.
        matched: match length: tokens before it that agree with the text, at most `MOST_MATCHED`; the longest if it
            occurs several times.
        occurrences: (position, match length) of each occurrence in its source.
        source: who guessed it.
        also: the same token as guessed by other sources.
        context: for `Habits`, which keep no positions: the last tokens, this one included. Else empty.
        behind: what the draft has prepared behind it, with the chance of each token.
    """

    token: int
    chance: float
    matched: int
    occurrences: tuple[tuple[int, int], ...]
    source: Source = Source.NGRAM
    also: tuple[Candidate, ...] = ()
    context: tuple[int, ...] = ()
    behind: tuple[tuple[int, float], ...] = ()


class NgramIndex:
    """The end positions of each n-gram of one text, for n up to `LONGEST`. Adding or removing a token is O(1).

    Attributes:
        most_occurrences: earlier ones considered at a position, longest matches first, then most recent.
        ranks: most candidates for a position.
        has_head: whether the target's head guesses now, which takes time.

    Args:
        tokens: the text so far; rates are learned from its last `_LEARN` tokens.
    """

    most_occurrences, ranks, has_head = 16, RANKS, True

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._ends: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(LONGEST)]
        self._rates = [list(rates) for rates in _PRIOR]
        self._matches: dict[
            int, list[tuple[int, int]]
        ] = {}  # by position: looked for again when it is learned from
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
                self._ends[n - 1].setdefault(tuple(text[end - n :]), []).append(end)

    def cut(self, length: int) -> None:
        """Truncate the text to its first `length` tokens."""
        text = self.tokens
        for end in range(len(text), length, -1):
            for n in range(1, min(LONGEST, end) + 1):
                ends, gram = self._ends[n - 1], tuple(text[end - n : end])
                known = ends[gram]
                known.pop()
                if not known:
                    del ends[gram]
        del text[length:]
        self._matches = {
            position: each for position, each in self._matches.items() if position <= length
        }

    def learn(self, committed: int) -> None:
        """Update the rates with tokens that have become final: the first `committed` of the text."""
        for position in range(max(1, self._learned), committed):
            for rank, candidate in enumerate(
                NgramIndex.candidates(self, position)
            ):  # of this source alone
                rates = self._rates[rank]
                hit = candidate.token == self.tokens[position]
                rates[candidate.matched - 1] += RATE_WEIGHT * (hit - rates[candidate.matched - 1])
                if hit:
                    break
        self._learned = max(self._learned, committed)
        self._matches = {
            position: each for position, each in self._matches.items() if position >= committed
        }

    def candidates(self, position: int) -> list[Candidate]:
        """Candidates for `position` (1 to the text's length) given the tokens before it, likeliest first."""
        if (known := self._matches.get(position)) is None:
            known = self._matches[position] = self._matching(position)
        return self._ranked(known)

    def _matching(self, position: int) -> list[tuple[int, int]]:
        """(end, match length) of earlier occurrences of the tokens before `position`."""
        text, matches = self.tokens, dict[int, int]()
        for n in range(min(LONGEST, position), 0, -1):
            ends = self._ends[n - 1].get(tuple(text[position - n : position]), ())
            for end in reversed(ends):
                if end >= position or end in matches:
                    continue
                matches[end] = n if n < LONGEST else self._matched(end, position, n)
                if len(matches) == self.most_occurrences:
                    return list(matches.items())
        return list(matches.items())

    def following(self, candidate: Candidate) -> list[Candidate]:
        """Candidates for the position after `candidate`: the tokens that followed its occurrences."""
        return self._ranked(
            [
                (end + 1, matched + (matched < MOST_MATCHED))
                for end, matched in candidate.occurrences
            ]
        )

    def _ranked(self, occurrences: Sequence[tuple[int, int]]) -> list[Candidate]:
        found: dict[int, list[tuple[int, int]]] = {}
        text, last = self.tokens, len(self.tokens)
        for occurrence in occurrences:
            if occurrence[0] < last:
                found.setdefault(text[occurrence[0]], []).append(occurrence)
        best = list(found)
        if len(best) > 1:  # ties go to the more recent
            weights = {
                token: sum([_WEIGHTS[matched] for _, matched in seen])
                for token, seen in found.items()
            }
            best = sorted(weights, key=weights.__getitem__, reverse=True)[:RANKS]
        left, result = 1.0, []
        for rank, token in enumerate(best):
            longest = max([matched for _, matched in found[token]])
            chance = left * self._rates[rank][longest - 1]
            left -= chance
            result.append(Candidate(token, chance, longest, tuple(found[token])))
        return result

    def _matched(self, end: int, position: int, known: int) -> int:
        """How many tokens before `end` equal those before `position`; at least `known`."""
        text, matched = self.tokens, known
        while (
            matched < MOST_MATCHED
            and matched < end
            and text[end - 1 - matched] == text[position - 1 - matched]
        ):
            matched += 1
        return matched


@dataclass(frozen=True, slots=True)
class Anchor:
    """A position to make guesses for.

    Attributes:
        end: the position; the token before it is the guesses' parent.
        chance: probability that all pending tokens before `end` will be accepted.
        taken: the draft's token at `end`, which is not guessed again; None at the text's end.
        trust: probability that `taken` is accepted if all tokens before it are.
        others: the draft's, in place of `taken`.
    """

    end: int
    chance: float
    taken: int | None = None
    trust: float = 0.0
    others: tuple[Alternative, ...] = ()

    def beside(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """The candidates of an index and the draft's others, each token once and the draft's own not at all."""
        if self.taken is None and not self.others:
            return list(candidates)
        found: dict[int, Candidate] = {}
        for candidate in candidates:
            if candidate.token != self.taken:
                # P(candidate right | `taken` wrong): both guess independently, and at most one can be right.
                share = (
                    1.0
                    if self.taken is None
                    else (1 - self.trust) / (1 - candidate.chance * self.trust)
                )
                found[candidate.token] = Candidate(
                    candidate.token, candidate.chance * share, *candidate[2:]
                )
        for other in self.others:
            (token, *tokens), (chance, *chances) = other.tokens, other.chances
            known = found.get(token, Candidate(token, 0.0, 0, (), Source.RUNNER_UP))
            if token != self.taken and chance > known.chance:
                behind = tuple(zip(tokens, chances, strict=True))
                found[token] = known._replace(chance=chance, behind=behind)
        return list(found.values())


def anchored(
    text: Sequence[int], committed: int, trust: Sequence[float], others: Sequence[Alternative] = ()
) -> list[Anchor]:
    """Anchors after the last committed token and after each pending one. `trust`: acceptance chances of the latter."""
    reached = accumulate(trust, mul, initial=1.0)
    pending = zip(text[committed:], trust, strict=True)
    by_position: dict[int, list[Alternative]] = {}
    for other in others:
        by_position.setdefault(other.position, []).append(other)
    return [
        Anchor(end, chance, token, own, tuple(by_position.get(end, ())))
        for end, (chance, (token, own)) in enumerate(
            zip(reached, [*pending, (None, 0.0)], strict=True), committed
        )
    ]


def guess_tree(
    index: NgramIndex,
    anchors: Sequence[Anchor],
    most: int,
    limit: int,
    branches: bool = True,
    nodes: int = MAX_LOOK_AHEAD,
) -> tuple[list[int], list[int], list[float], list[Source]]:
    """A tree of up to `nodes` guesses after the anchors, likeliest first, so that parents come before children.

    Args:
        most: of these that come from the index.
        limit: guesses are made for positions before this one.
        branches: whether a token may have several children; if not, only its likeliest candidate is used.

    Returns:
        (tokens, parents, chances, sources). A parent below `len(index)` is a position of the text; `len(index)` + i is
        guess i. A chance is the probability of the whole path from the anchor on, times the anchor's.
    """
    widest = index.ranks if branches else 1
    ids = count()
    waiting: list[
        tuple[float, int, int, int, Candidate]
    ] = []  # -chance, tie-break, parent, position, candidate
    for anchor in anchors:
        if anchor.end < limit:
            for candidate in anchor.beside(index.candidates(anchor.end)[:widest] if most else ()):
                chance = anchor.chance * candidate.chance
                heapq.heappush(waiting, (-chance, next(ids), anchor.end - 1, anchor.end, candidate))
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    sources: list[Source] = []
    while waiting and len(tokens) < nodes and -waiting[0][0] >= _LEAST_CHANCE:
        negative, _, parent, position, candidate = heapq.heappop(waiting)
        if candidate.source not in _OF_DRAFT:
            if not most:
                continue
            most -= 1
        number = len(index) + len(tokens)
        tokens.append(candidate.token)
        parents.append(parent)
        chances.append(-negative)
        sources.append(candidate.source)
        if position + 1 < limit and (most or candidate.behind):
            for below in _following(index, candidate)[:widest]:
                heapq.heappush(
                    waiting, (negative * below.chance, next(ids), number, position + 1, below)
                )
    return tokens, parents, chances, sources


def _following(index: NgramIndex, candidate: Candidate) -> list[Candidate]:
    if candidate.behind:
        ((token, chance), *behind) = candidate.behind
        return [Candidate(token, chance, 0, (), Source.BRANCH, behind=tuple(behind))]
    return index.following(candidate) if candidate.source not in _OF_DRAFT else []
