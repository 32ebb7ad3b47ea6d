"""Guesses of a head for the text of one slot: it reads what is committed, and drafts a chain with runners-up beside it.

A chain follows the head's own draws, which race with the same random numbers as the target's; it ends where it has
become unlikely.  How likely a guess is right is learned by its rank and by the probability that the head gives it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from pearl.drafting.ngram import RANKS, RATE_WEIGHT, Candidate
from pearl.models.head import Head
from pearl.protocol.messages import Source

_DEEPEST = 8  # tokens of a chain
_LEAST_CHANCE = 0.15  # of a chain; further tokens would seldom be reached
_BINS = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)  # of the head's probability

Draw = Callable[[torch.Tensor, int], int]  # (logits [vocab], position) -> token


class HeadText:
    """What a head has read of a slot, and what waits to be read.

    Positions of the slot's text from `first` on are read: of earlier ones nobody has kept the target's states.
    """

    def __init__(self, head: Head, slot: int) -> None:
        self._head, self._slot = head, slot
        self._first = 0
        self._waiting: list[torch.Tensor] = []  # the target's states of the tokens that come next, [n, features] each
        self._output: torch.Tensor | None = None  # the last one
        head.lengths[slot] = 0

    @property
    def _read(self) -> int:
        """The position whose states are read next: its token is known, the token after it may not be."""
        return self._first + self._head.lengths[self._slot]

    @property
    def _end(self) -> int:
        return self._read + sum(map(len, self._waiting))

    def extend(self, start: int, features: torch.Tensor) -> None:
        """The target has read tokens from position `start` on, and these are its states."""
        if start != self._end:
            self._first, self._waiting, self._output = start, [], None
            self._head.lengths[self._slot] = 0
        self._waiting.append(features)

    def rollback(self, length: int) -> None:
        """The slot holds only the first `length` tokens."""
        if length < self._read:  # into what was read, whose inputs are gone: start over here
            self._first, self._waiting, self._output = length, [], None
            self._head.lengths[self._slot] = 0
        elif length < self._end:
            self._waiting = [torch.cat(self._waiting)[: length - self._read]]

    def read(self, tokens: Sequence[int], committed: int) -> bool:
        """Read the first `committed` tokens of the text as far as states are known. Whether that is all of them."""
        count = min(committed - 1, self._end, self._first + self._head.context - _DEEPEST) - self._read
        if count > 0:
            states = torch.cat(self._waiting)
            known, self._waiting = states[:count], [states[count:]]
            ids = torch.tensor(tokens[self._read + 1 : self._read + 1 + count], device=self._head.device)
            self._output = self._head.read(ids, self._head.fused(known), self._slot)
        return self._output is not None and self._read == committed - 1

    def draft(self, position: int, draw: Draw, least: float = _LEAST_CHANCE) -> list[list[tuple[int, float]]]:
        """For positions from `position` on the tokens that the head holds likeliest, its own draw first, each with its
        probability; each level follows the draws of those before it.
        """
        head, slot, output = self._head, self._slot, self._output
        assert output is not None
        levels: list[list[tuple[int, float]]] = []
        length, reached = head.lengths[slot], 1.0
        while len(levels) < _DEEPEST and reached >= least:
            logits = head.logits(output)
            own = draw(logits, position + len(levels))
            shares, at = logits.softmax(-1).topk(min(RANKS, len(logits)))
            likeliest = dict(zip(head.ids[at].tolist(), shares.tolist(), strict=True))
            chance = likeliest.pop(own, 0.0) or float(logits.softmax(-1)[head.ids == own].sum())
            levels.append([(own, chance), *likeliest.items()][:RANKS])
            reached *= chance
            output = head.read(torch.tensor([own], device=head.device), output, slot)
        head.lengths[slot] = length
        return levels


class HeadGuesses:
    """The guesses of one text, with rates that are learned as it grows.

    Args:
        text: what the head has read.
        tokens: of the text; only read.
        draw: the request's own draw from logits over the head's vocabulary.
    """

    def __init__(self, text: HeadText, tokens: Sequence[int], draw: Draw) -> None:
        self._text, self._tokens, self._draw = text, tokens, draw
        self._levels: list[list[tuple[int, float]]] = []
        self._at = 0  # the position of the first level
        middles = [(low + high) / 2 for low, high in pairwise((0.0, *_BINS, 1.0))]
        self._rates = [list(middles) for _ in range(RANKS)]

    def learn(self, committed: int) -> None:
        """Update the rates by what became of the last guesses, and guess what follows the committed tokens."""
        for position, level in enumerate(self._levels, self._at):
            if position >= committed:
                break
            for rank, (token, chance) in enumerate(level):
                rates, share, hit = self._rates[rank], bisect(_BINS, chance), token == self._tokens[position]
                rates[share] += RATE_WEIGHT * (hit - rates[share])
            if level[0][0] != self._tokens[position]:
                break
        if committed == self._at and self._levels:
            return
        is_read = self._text.read(self._tokens, committed)
        self._at, self._levels = committed, self._text.draft(committed, self._draw) if is_read else []

    def candidates(self, position: int) -> list[Candidate]:
        """Of the position behind the committed tokens; there are none for others."""
        return self._level(0) if position == self._at else []

    def following(self, candidate: Candidate) -> list[Candidate]:
        ((level, rank),) = candidate.occurrences
        return [] if rank else self._level(level + 1)

    def _level(self, number: int) -> list[Candidate]:
        found = self._levels[number] if number < len(self._levels) else []
        chances = [self._rates[rank][bisect(_BINS, chance)] for rank, (_, chance) in enumerate(found)]
        total = max(1.0, sum(chances))
        return [
            Candidate(token, chance / total, 1, ((number, rank),), Source.HEAD)
            for rank, ((token, _), chance) in enumerate(zip(found, chances, strict=True))
        ]
