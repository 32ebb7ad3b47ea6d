"""Prompt lookup: find where the text's last few tokens occurred before, and guess the tokens that followed there.

`NgramIndex` indexes one text (prompt and output); `guess_tree` merges the likeliest continuations at several positions
into one tree.  `fused_guesses` adds other sources (`GuessSource`) to the text's own n-grams.  Source: SSSD (Marzollo et
al. 2024).  SSSD discounts counts by match length and depth; we learn such discounts (rates by rank and match length)
from the text as it grows.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pearl.protocol.events import Alternative
from pearl.protocol.messages import Source
from pearl.protocol.window import Payoff
from pearl.spec.methods import MAX_LOOK_AHEAD

LONGEST = 4  # tokens of the longest indexed n-gram; a longer match is found token by token
MOST_MATCHED = 12  # longer matches count as this long
RANKS = 3  # candidates per position
_LEARN = 256  # rates are learned from this many tokens at the end of a prompt
RATE_WEIGHT = 0.05  # weight of a new outcome in a rate's moving average
_LEAST_CHANCE = 0.01  # less likely guesses do not enter the tree
_OF_DRAFT = (Source.RUNNER_UP, Source.BRANCH)
# Weight of an occurrence, by match length: one occurrence outweighs two whose matches are one token shorter.
_WEIGHTS = [3.0**matched for matched in range(MOST_MATCHED + 1)]

# How often candidates of each source are right at first; each text adapts its own copy.
PRIORS: dict[str, Any] = json.loads(Path(__file__).with_name("priors.json").read_text())

Occurrence = tuple[int, int]  # position, number of matching tokens before it


class Candidate(
    NamedTuple
):  # a forward makes dozens of these, and a dataclass takes 4 times as long to make
    """A token guessed for one position.

    Attributes:
        token: the token's id.
        chance: estimated probability that the token is right.
        occurrences: (position, match length) of each occurrence in the source. The match length is the number of tokens
            before the occurrence that equal the text's last tokens, at most `MOST_MATCHED`.
        source: the kind of source that guessed the token.
        also: candidates of other sources with the same token.
        context: the last tokens, this one included, for sources that keep no positions; otherwise empty.
        prepared: (token, chance) of each token that the draft's branch has after this one.
        rate: row and column, in the source's table, of the learned rate that gave `chance`.
        origin: the source to ask for tokens that may follow; None for the index itself.
    """

    token: int
    chance: float
    occurrences: tuple[Occurrence, ...]
    source: Source = Source.NGRAM
    also: tuple[Candidate, ...] = ()
    context: tuple[int, ...] = ()
    prepared: tuple[tuple[int, float], ...] = ()
    rate: tuple[int, int] = (0, 0)
    origin: GuessSource | None = None


def prior_rates(source: str) -> list[list[float]]:
    """Return a copy of a source's initial rates, which a text may adapt."""
    return [list(rates) for rates in PRIORS[source]["rates"]]


def learn_rate(rates: list[float], place: int, hit: bool) -> None:
    """Update a moving average: rate = (1 - w) * rate + w * hit, with w = `RATE_WEIGHT`."""
    rates[place] += RATE_WEIGHT * (hit - rates[place])


def learn_hit(rates: Sequence[list[float]], candidate: Candidate, token: int) -> bool:
    """Learn that `token` is committed: update the rate that gave a candidate's chance; return whether it was right."""
    row, column = candidate.rate
    hit = candidate.token == token
    learn_rate(rates[row], column, hit)
    return hit


def scaled(candidates: list[Candidate]) -> list[Candidate]:
    """Return candidates of one position with chances that sum to at most 1."""
    total = sum([candidate.chance for candidate in candidates])
    if total <= 1:
        return candidates
    return [candidate._replace(chance=candidate.chance / total) for candidate in candidates]


class GuessSource(Protocol):
    """Guesses tokens of one text, which the source reads."""

    def cut(self, length: int) -> None:
        """Forget everything about positions after the first `length` tokens."""

    def learn(self, committed: int) -> None:
        """Update the rates by the first `committed` tokens of the text, which are final now."""

    def candidates(self, position: int) -> list[Candidate]:
        """Return candidates for `position` (1 to the text's length) given the tokens before it, likeliest first."""
        ...

    def following(self, candidate: Candidate) -> list[Candidate]:
        """Return candidates for the position after a candidate of this source."""
        ...


class NgramTable:
    """The end positions of each n-gram of some tokens, for n up to `LONGEST`. Adding or removing a token is O(1).

    Attributes:
        tokens: the indexed tokens.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._ends: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(LONGEST)]
        self.extend(tokens)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, NgramTable)
            and self.tokens == other.tokens
            and self._ends == other._ends
        )

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        text = self.tokens
        for token in tokens:
            text.append(token)
            end = len(text)
            for n in range(1, min(LONGEST, end) + 1):
                self._ends[n - 1].setdefault(tuple(text[end - n :]), []).append(end)

    def cut(self, length: int) -> None:
        """Remove all but the first `length` tokens."""
        text = self.tokens
        for end in range(len(text), length, -1):
            for n in range(1, min(LONGEST, end) + 1):
                gram = tuple(text[end - n : end])
                ends = self._ends[n - 1][gram]
                ends.pop()
                if not ends:
                    del self._ends[n - 1][gram]
        del text[length:]

    def ends(self, text: Sequence[int], position: int, n: int) -> Sequence[int]:
        """Return, ascending, the end positions in this table of the n-gram that `text` has before `position`."""
        return self._ends[n - 1].get(tuple(text[position - n : position]), ())

    def matched(self, end: int, text: Sequence[int], position: int, at_least: int) -> int:
        """Return how many tokens before `end` equal those of `text` before `position`, at most `MOST_MATCHED`.

        Args:
            at_least: this many of them are known to be equal.
        """
        tokens = self.tokens
        most = min(MOST_MATCHED, end, position)
        matched = at_least
        while matched < most and tokens[end - 1 - matched] == text[position - 1 - matched]:
            matched += 1
        return matched


class SuffixLookup:
    """Finds places where the last tokens of a text occur; the tokens that follow at these places are the candidates.

    Attributes:
        stride: distance from an occurrence to the place of the token after it.
        is_conditional: whether a candidate's chance supposes that the likelier candidates are wrong.

    Args:
        tokens: the text, which is only read.
        source: the key of the initial rates in priors.json.
        learn_from: the first position to learn from.
    """

    stride = 1
    is_conditional = True

    def __init__(self, tokens: list[int], source: str, learn_from: int) -> None:
        self.tokens = tokens
        self._rates = prior_rates(source)
        #: position -> occurrences, kept until the rates learn from that position
        self._matches: dict[int, list[Occurrence]] = {}
        self._learned = learn_from

    def cut(self, length: int) -> None:
        for position in list(self._matches):
            if position > length:
                del self._matches[position]

    def learn(self, committed: int) -> None:
        for position in range(max(1, self._learned), committed):
            # Only the candidates of this source, without those that a subclass adds.
            for candidate in SuffixLookup.candidates(self, position):
                hit = learn_hit(self._rates, candidate, self.tokens[position])
                if hit and self.is_conditional:
                    break
        self._learned = max(self._learned, committed)
        for position in list(self._matches):
            if position < committed:
                del self._matches[position]

    def candidates(self, position: int) -> list[Candidate]:
        matches = self._matches.get(position)
        if matches is None:
            matches = self._matching(position)
            self._matches[position] = matches
        return self._ranked(matches)

    def following(self, candidate: Candidate) -> list[Candidate]:
        occurrences = []
        for place, matched in candidate.occurrences:
            occurrences.append((place + self.stride, matched + (matched < MOST_MATCHED)))
        return self._ranked(occurrences)

    def _rated(
        self, ranked: Iterable[tuple[int, Sequence[Occurrence]]], source: Source = Source.NGRAM
    ) -> list[Candidate]:
        """Return candidates for tokens, each with its occurrences, by the rates of their ranks and match lengths."""
        origin = None
        if source is not Source.NGRAM:
            origin = self
        remaining = 1.0
        candidates = []
        for rank, (token, places) in enumerate(ranked):
            longest = max([matched for _, matched in places])
            rate = (rank, longest - 1)
            chance = remaining * self._rates[rank][longest - 1]
            remaining -= chance
            candidate = Candidate(token, chance, tuple(places), source, rate=rate, origin=origin)
            candidates.append(candidate)
        return candidates

    def _matching(self, position: int) -> list[Occurrence]:
        """Return the occurrences of the tokens before `position`."""
        raise NotImplementedError

    def _ranked(self, occurrences: Sequence[Occurrence]) -> list[Candidate]:
        """Return candidates: of the tokens that followed the occurrences, the `RANKS` tokens of the most weight."""
        raise NotImplementedError


@dataclass(frozen=True)
class GuessWindow:
    """Nodes that an index adds to every forward of the target, to see what the target draws after them.

    Attributes:
        tokens: the nodes' tokens, level by level.
        parents: the parent of each node: another node of the window, or -1 for the text's last token.
        columns: number of nodes of a level. The target draws after each node of the last level.
        levels: the depth of the last level's first node, from 1.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    columns: int
    levels: int


class NgramIndex(SuffixLookup):
    """The n-grams of one text.

    Example: after the text 7 8 9 7 8, position 5 has candidate 9, because 7 8 was followed by 9::

        >>> NgramIndex([7, 8, 9, 7, 8]).candidates(5)[0].token
        9

    Attributes:
        most_occurrences: most occurrences considered at a position: longer matches first, then more recent ones.
        ranks: most candidates for a position.
        reads_discarded: whether to call `discarded`, for which the target has to draw after discarded tokens.
        has_head: whether the target's head guesses now, which takes time.
        table: where each n-gram of the text is.

    Args:
        tokens: the text so far; rates are learned from its last `_LEARN` tokens.
    """

    most_occurrences = 16
    ranks = RANKS
    reads_discarded = False

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.table = NgramTable()
        super().__init__(self.table.tokens, "ngram", max(0, len(tokens) - _LEARN))
        self.has_head = True
        self.extend(tokens)
        self.learn(len(tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append `tokens` to the text."""
        self.table.extend(tokens)

    def cut(self, length: int) -> None:
        """Truncate the text to its first `length` tokens."""
        self.table.cut(length)
        super().cut(length)

    # ---- the target's computations for an index; this class asks for none ----

    def window(self, most: int, room: int) -> GuessWindow | None:
        """Return nodes to feed with the next forward; None if there are none.

        Args:
            most: number of nodes for which the forward's tree has room.
            room: number of positions in the context from the text's last token on.
        """
        return None

    def take(self, draws: Sequence[int]) -> None:
        """Take in the target's draw after each node of the last level of `window`."""

    def discarded(self, tokens: Sequence[int], draws: Sequence[int]) -> None:
        """Take in tokens of the draft that were discarded, and the target's draw after each of these tokens."""

    # ---- occurrences ----

    def _matching(self, position: int) -> list[Occurrence]:
        """Return (end, match length) of earlier occurrences of the tokens before `position`."""
        text = self.tokens
        matches = {}
        for n in range(min(LONGEST, position), 0, -1):
            for end in reversed(self.table.ends(text, position, n)):
                if end >= position or end in matches:
                    continue
                matches[end] = n if n < LONGEST else self._matched(end, position, n)
                if len(matches) == self.most_occurrences:
                    return list(matches.items())
        return list(matches.items())

    def _matched(self, end: int, position: int, at_least: int) -> int:
        """Return how many tokens before `end` equal the tokens before `position`; it is known that `at_least` do."""
        return self.table.matched(end, self.tokens, position, at_least)

    def _ranked(self, occurrences: Sequence[Occurrence]) -> list[Candidate]:
        text = self.tokens
        length = len(text)
        by_token: dict[int, list[Occurrence]] = {}
        for occurrence in occurrences:
            end, _ = occurrence
            if end < length:
                by_token.setdefault(text[end], []).append(occurrence)
        best = list(by_token)
        if len(best) > 1:  # ties go to the more recent
            weights = {}
            for token, places in by_token.items():
                weights[token] = sum([_WEIGHTS[matched] for _, matched in places])
            best = sorted(weights, key=weights.__getitem__, reverse=True)[:RANKS]
        return self._rated([(token, by_token[token]) for token in best])


@dataclass(frozen=True, slots=True)
class Anchor:
    """A position to make guesses for.

    Attributes:
        end: the position. The parent of its guesses is the token before it.
        chance: probability that all pending tokens before `end` will be accepted.
        token: the draft's token at `end`, which is not guessed again; None at the text's end.
        trust: probability that `token` is accepted if all tokens before it are.
        runners_up: the draft's alternatives to `token`.
    """

    end: int
    chance: float
    token: int | None = None
    trust: float = 0.0
    runners_up: tuple[Alternative, ...] = ()

    def merged(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Merge the candidates of an index with the runners-up: return each token once, without the draft's token."""
        if self.token is None and not self.runners_up:
            return list(candidates)
        by_token = {}
        for candidate in candidates:
            if candidate.token != self.token:
                chance = candidate.chance * self._share(candidate)
                by_token[candidate.token] = Candidate(candidate.token, chance, *candidate[2:])
        for alternative in self.runners_up:
            chain = zip(alternative.tokens, alternative.chances, strict=True)
            token, chance = next(chain)
            guess = by_token.get(token, Candidate(token, 0.0, (), Source.RUNNER_UP))
            if token != self.token and chance > guess.chance:
                by_token[token] = guess._replace(chance=chance, prepared=tuple(chain))
        return list(by_token.values())

    def _share(self, candidate: Candidate) -> float:
        """Return P(candidate right | `token` wrong) / P(candidate right).

        Draft and index guess independently, and at most one of them can be right, so this is
        (1 - trust) / (1 - chance * trust).
        """
        if self.token is None:
            return 1.0
        return (1 - self.trust) / (1 - candidate.chance * self.trust)


def anchored(
    text: Sequence[int],
    committed: int,
    trust: Sequence[float],
    alternatives: Sequence[Alternative] = (),
) -> list[Anchor]:
    """Return anchors after the last committed token and after each pending one.

    Args:
        trust: acceptance chance of each pending token.
        alternatives: the draft's runners-up, each with the tokens that the draft's branch has after it.
    """
    by_position: dict[int, list[Alternative]] = {}
    for alternative in alternatives:
        by_position.setdefault(alternative.position, []).append(alternative)
    chance = 1.0
    anchors = []
    for end, (token, accepted) in enumerate(zip(text[committed:], trust, strict=True), committed):
        runners_up = tuple(by_position.get(end, ()))
        anchors.append(Anchor(end, chance, token, accepted, runners_up))
        chance *= accepted
    end = committed + len(trust)
    anchors.append(Anchor(end, chance, runners_up=tuple(by_position.get(end, ()))))
    return anchors


class GuessTree(NamedTuple):
    """Guesses, parents before children.

    Attributes:
        parents: the parent of each guess. If it is below the length of the index, it is a position of the text;
            otherwise it is guess number `parent - length`.
        chances: for each guess, the anchor's chance times the probability of the path from the anchor to the guess.
    """

    tokens: list[int]
    parents: list[int]
    chances: list[float]
    sources: list[Source]

    def first(self, count: int) -> GuessTree:
        """Return the tree of the first `count` guesses."""
        return GuessTree(
            self.tokens[:count], self.parents[:count], self.chances[:count], self.sources[:count]
        )


def guess_tree(
    index: NgramIndex,
    anchors: Sequence[Anchor],
    most: int,
    limit: int,
    branches: bool = True,
    nodes: int = MAX_LOOK_AHEAD,
    payoff: Payoff | None = None,
) -> GuessTree:
    """Grow a tree of up to `nodes` guesses after the anchors, likeliest first, so that parents come before children.

    Example: with one anchor at position 5 of a text of 5 tokens, candidates 9 (chance 0.5) and 4 (0.3) there, and
    after 9 the candidate 2 (0.8), the tree is tokens [9, 2, 4], parents [4, 5, 4], chances [0.5, 0.4, 0.3].

    Args:
        most: most guesses that may come from the index.
        limit: guesses are made for positions before this one.
        branches: whether a token may have several children; if not, only its likeliest candidate is used.
        payoff: is offered each guess; the tree grows no further where no more guesses can pay.
    """
    widest = index.ranks if branches else 1
    ids = count()
    waiting: list[_Waiting] = []

    def wait(candidates: Iterable[Candidate], parent: int, position: int, reached: float) -> None:
        for candidate in candidates:
            negative = -(reached * candidate.chance)
            heapq.heappush(waiting, _Waiting(negative, next(ids), parent, position, candidate))

    for anchor in anchors:
        if anchor.end < limit:
            candidates = index.candidates(anchor.end)[:widest] if most else []
            wait(anchor.merged(candidates), anchor.end - 1, anchor.end, anchor.chance)
    tree = GuessTree([], [], [], [])
    while waiting and len(tree.tokens) < nodes and -waiting[0].negative >= _LEAST_CHANCE:
        negative, _, parent, position, candidate = heapq.heappop(waiting)
        if payoff is not None and not payoff.may_pay(-negative):
            break
        if candidate.source not in _OF_DRAFT:
            if not most:
                continue
            most -= 1
        node_id = len(index) + len(tree.tokens)
        tree.tokens.append(candidate.token)
        tree.parents.append(parent)
        tree.chances.append(-negative)
        tree.sources.append(candidate.source)
        if payoff is not None:
            payoff.offer(-negative)
        if position + 1 < limit and (most or candidate.prepared):
            wait(_following(index, candidate)[:widest], node_id, position + 1, -negative)
    return tree


class _Waiting(NamedTuple):
    """A guess that may enter the tree. The least tuple is the likeliest guess.

    Attributes:
        negative: minus the guess's chance.
        tie_break: a number that rises with each new guess.
    """

    negative: float
    tie_break: int
    parent: int
    position: int
    candidate: Candidate


def _following(index: NgramIndex, candidate: Candidate) -> list[Candidate]:
    if candidate.prepared:
        token, chance = candidate.prepared[0]
        return [Candidate(token, chance, (), Source.BRANCH, prepared=candidate.prepared[1:])]
    if candidate.source in _OF_DRAFT:
        return []
    return index.following(candidate)
