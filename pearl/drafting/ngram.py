"""Prompt lookup: find where the text's last few tokens occurred before, and guess the tokens that followed there.

`NgramIndex` indexes one text (prompt and output).  `guess_tree` merges the likeliest continuations
at several positions into one tree.  `fused_guesses` adds other sources (`GuessSource`) to the
text's own n-grams.

Source: SSSD (Marzollo et al. 2024).  SSSD discounts counts by match length and depth.  We learn
rates instead: how often candidates of each rank and match length are right in the text so far.
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
RANKS = 3  # most candidates per position
_LEARN = 256  # rates are learned from this many tokens at the end of a prompt
RATE_WEIGHT = 0.05  # weight of a new outcome in a rate's moving average
_LEAST_CHANCE = 0.01  # less likely guesses do not enter the tree
_OF_DRAFT = (Source.RUNNER_UP, Source.BRANCH)
# Weight of an occurrence, by match length: one occurrence outweighs two whose matches are one token shorter.
_WEIGHTS = [3.0**matched for matched in range(MOST_MATCHED + 1)]

# The initial rates of each source: how often its candidates are right. Each text adapts a copy.
PRIORS: dict[str, Any] = json.loads(Path(__file__).with_name("priors.json").read_text())

Occurrence = tuple[int, int]  # (position in the source, number of matching tokens before it)


class Candidate(
    NamedTuple
):  # a forward makes dozens of these, and a dataclass takes 4 times as long to make
    """A token guessed for one position.

    Attributes:
        token: the token's id.
        chance: estimated probability that the token is right.
        occurrences: (position, match length) of each place in the source that the token follows.
            The match length is the number of tokens before the place that equal the text's last
            tokens, at most `MOST_MATCHED`.
        source: the kind of source that guessed the token.
        also: candidates of other sources with the same token.
        context: the last tokens of the text, with this token at the end. Only for sources that keep
            no positions; otherwise empty.
        prepared: (token, chance) of each token that the draft's branch has after this token.
        rate: the learned rate that gave `chance`, as (row, column) in the source's table of rates.
        origin: the source to ask for tokens that may follow this one; None if that is the text's
            own `NgramIndex`.
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
    """Return a copy of the initial rates of a source, which a text may change."""
    return [list(rates) for rates in PRIORS[source]["rates"]]


def learn_rate(rates: list[float], place: int, hit: bool) -> None:
    """Update rates[place], a moving average: rate = (1 - w) * rate + w * hit.

    The weight w is `RATE_WEIGHT`.
    """
    rates[place] += RATE_WEIGHT * (hit - rates[place])


def learn_hit(rates: Sequence[list[float]], candidate: Candidate, token: int) -> bool:
    """Update the rate that gave a candidate its chance, once `token` is committed at its position.

    Return whether the candidate was right.
    """
    row, column = candidate.rate
    hit = candidate.token == token
    learn_rate(rates[row], column, hit)
    return hit


def scaled(candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates of one position, with their chances scaled to sum to at most 1."""
    total = sum([candidate.chance for candidate in candidates])
    if total <= 1:
        return candidates
    return [candidate._replace(chance=candidate.chance / total) for candidate in candidates]


class GuessSource(Protocol):
    """A source of guesses for the tokens of one text. It only reads the text."""

    def cut(self, length: int) -> None:
        """Forget everything about positions after the first `length` tokens."""

    def learn(self, committed: int) -> None:
        """Update the rates with the text's first `committed` tokens, which are final now."""

    def candidates(self, position: int) -> list[Candidate]:
        """Return candidates for `position` given the tokens before it, the likeliest first.

        `position` is between 1 and the text's length.
        """
        ...

    def following(self, candidate: Candidate) -> list[Candidate]:
        """Return candidates for the position after `candidate`, which this source has made."""
        ...


class NgramTable:
    """Maps each n-gram of some tokens to the positions after it, for n up to `LONGEST`.

    Adding or removing a token at the end takes O(1) time.

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
        """Return the positions after each occurrence of an n-gram in this table, ascending.

        The n-gram consists of the `n` tokens that `text` has before `position`.
        """
        return self._ends[n - 1].get(tuple(text[position - n : position]), ())

    def matched(self, end: int, text: Sequence[int], position: int, at_least: int) -> int:
        """Return how many of the tokens before `end` equal those of `text` before `position`.

        `end` is a position in this table. The result is at most `MOST_MATCHED`.

        Args:
            at_least: how many of these tokens are known to be equal.
        """
        tokens = self.tokens
        most = min(MOST_MATCHED, end, position)
        matched = at_least
        while matched < most and tokens[end - 1 - matched] == text[position - 1 - matched]:
            matched += 1
        return matched


class SuffixLookup:
    """Finds places where the last tokens of a text occur; the tokens that follow are candidates.

    Attributes:
        stride: distance from a place to that of the next token in the text: 1, or -1 if the source
            has its tokens in reverse order.
        is_conditional: whether rates are conditional. The rate of a candidate is then the
            probability that it is right, given that all likelier candidates are wrong.

    Args:
        tokens: the text, which this object only reads.
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
        """Return the tokens of `ranked` as candidates, and compute their chances.

        There is a learned rate for each rank and match length. The rate for a token's rank and its
        longest match is the probability that the token is right if all likelier tokens are wrong.

        Args:
            ranked: (token, its occurrences), the likeliest token first.
        """
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
        """Return where the tokens that the text has before `position` occur in the source."""
        raise NotImplementedError

    def _ranked(self, occurrences: Sequence[Occurrence]) -> list[Candidate]:
        """Return the tokens at `occurrences` as candidates, at most the `RANKS` likeliest."""
        raise NotImplementedError


@dataclass(frozen=True)
class GuessWindow:
    """Tokens that an index adds to each forward, to see what the target draws after them.

    This is the window of Lookahead decoding.

    Attributes:
        tokens: the tokens of the nodes, level by level. The first level is a chain that follows the
            text. Each node of a later level follows the node of its column in the level before.
        parents: the parent of each node: another node of the window, or -1 for the text's last
            token.
        columns: number of nodes in a level. The target draws after each node of the last level.
        levels: number of levels.
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
        most_occurrences: most occurrences considered for a position. Longer matches are preferred,
            and then more recent ones.
        ranks: most candidates for a position.
        reads_discarded: whether to call `discarded` when draft tokens were discarded. If so, the
            target also has to draw a token after each of these draft tokens.
        has_head: whether the target's head may be asked for guesses now, which takes time.
        table: the positions of each n-gram of the text.

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

    # ---- what an index may ask the target to compute; this class asks for nothing ----

    def window(self, most: int, room: int) -> GuessWindow | None:
        """Return the window that this index adds to the next forward; None if it adds none.

        Args:
            most: the most nodes of the window that fit into the forward's tree.
            room: number of positions left in the context, from the text's last token on.
        """
        return None

    def take(self, draws: Sequence[int]) -> None:
        """Learn from `draws`, the target's draw after each node of the last level of `window`."""

    def discarded(self, tokens: Sequence[int], draws: Sequence[int]) -> None:
        """Learn from discarded draft tokens, and from the target's draw after each of them."""

    # ---- occurrences ----

    def _matching(self, position: int) -> list[Occurrence]:
        """Return earlier occurrences of the tokens that the text has before `position`.

        Each is (position after the occurrence, number of matching tokens).
        """
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
        """Return how many tokens before `end` equal the tokens before `position`.

        `at_least`: how many of them are known to be equal.
        """
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
    """A position to make guesses for: that of a pending token, or the end of the text.

    A pending token was drafted, but the target has not judged it yet.

    Attributes:
        end: the position. The guesses for it follow the token before it.
        chance: probability that all pending tokens before `end` will be accepted.
        token: the pending token at `end`, which is not guessed again; None at the text's end.
        trust: probability that `token` is accepted if all tokens before it are.
        runners_up: the draft's runners-up of `token`.
    """

    end: int
    chance: float
    token: int | None = None
    trust: float = 0.0
    runners_up: tuple[Alternative, ...] = ()

    def merged(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Merge the candidates of an index with the runners-up; return each token once.

        The pending token itself is left out.
        """
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
        """Return the factor by which `token` lowers the chance of a candidate.

        At most one of the two tokens can be right. Let c be the candidate's chance, and t the
        `trust` in `token`. If the two estimates are otherwise independent, the candidate is right
        with probability c * (1 - t) / (1 - c * t).
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
    """Return anchors for the position of each pending token and for the end of the text.

    Args:
        text: all tokens, the pending ones included.
        committed: number of committed tokens.
        trust: for each pending token, the probability that it is accepted if all pending tokens
            before it are.
        alternatives: the draft's runners-up. Each comes with the tokens of the branch that
            continues it, if there is such a branch.
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
    """A tree of guesses, in an order in which parents come before their children.

    Attributes:
        tokens: the token of each guess.
        parents: the parent of each guess. A number below the length of the text is a position of
            the text; otherwise the parent is guess number `parent - length`.
        chances: for each guess, the probability that it and all tokens before it are right.
        sources: who guessed each token.
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
    """Grow a tree of guesses from the anchors, always adding the likeliest guess next.

    Example: a text has 5 tokens, and the one anchor is at position 5. The candidates there are 9
    (chance 0.5) and 4 (chance 0.3), and after 9 there is the candidate 2 (chance 0.8). The tree has
    the tokens [9, 2, 4], the parents [4, 5, 4] and the chances [0.5, 0.4, 0.3].

    Args:
        most: the most guesses that may come from the index.
        limit: guesses are made for positions before this one.
        branches: whether a token may have several children. If not, only the likeliest candidate is
            used at each place.
        nodes: the most guesses in the tree.
        payoff: is offered each guess. The tree stops growing once further guesses cannot pay.
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
    """A guess that may enter the tree, as an item of a heap.

    The heap returns its least item first. This is the likeliest guess.

    Attributes:
        negative: minus the chance of the guess.
        tie_break: a number that rises with each new guess.
        parent: see `GuessTree.parents`.
        position: the position that the guess is for.
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
