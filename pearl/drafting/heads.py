"""Guesses of a head for the text of one slot: it reads what is committed, and drafts a chain with runners-up beside it.

A chain follows the head's own draws, which race with the same random numbers as the target's; it ends where it has
become unlikely.  How likely a guess is right is learned by its rank and by the probability that the head gives it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from pearl.drafting.ngram import RANKS, RATE_WEIGHT, Candidate
from pearl.models.heads.head import Head
from pearl.models.runner import ModelRunner
from pearl.protocol.messages import MAX_FRAME, HiddenStates, Source

_DEEPEST = 8  # tokens of a chain
_LEAST_CHANCE = 0.15  # of a chain; further tokens would seldom be reached
_BINS = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)  # of the head's probability

Draw = Callable[[torch.Tensor, int], int]  # (logits [vocab], position) -> token


class StateLog:
    """The target's hidden states of a text, from position `start` on, as far as nobody has taken them."""

    def __init__(self) -> None:
        self.start = 0
        self._parts: list[torch.Tensor] = []  # [n, features] each

    @property
    def end(self) -> int:
        return self.start + sum(map(len, self._parts))

    def extend(self, start: int, states: torch.Tensor) -> None:
        """The target has read tokens from position `start` on, and these are its states; `end` may be among them."""
        if start > self.end:
            self.start, self._parts = start, []
        self._parts.append(states[self.end - start :])

    def rollback(self, length: int) -> None:
        """The text has only the first `length` tokens."""
        if length < self.start:
            self.start, self._parts = length, []
        elif length < self.end:
            self._parts = [torch.cat(self._parts)[: length - self.start]]

    def take(self, count: int) -> torch.Tensor:
        """The first `count` of them; they are kept no longer."""
        states = torch.cat(self._parts)
        self.start, self._parts = self.start + count, [states[count:]]
        return states[:count]


class HeadText:
    """What a head has read of a slot's text.

    It reads on from what it has read, or else from the position where the log begins: of earlier ones nobody has kept
    the target's states.
    """

    def __init__(self, head: Head, slot: int) -> None:
        self.log = StateLog()
        self._head, self._slot = head, slot
        self._first = 0
        self._output: torch.Tensor | None = None  # the last one
        head.lengths[slot] = 0

    @property
    def _read(self) -> int:
        """The position whose states are read next: its token is known, the token after it may not be."""
        return self._first + self._head.lengths[self._slot]

    def read(self, tokens: Sequence[int], committed: int) -> bool:
        """Read the first `committed` tokens of the text as far as states are known. Whether that is all of them."""
        log = self.log
        if log.start != self._read:
            self._first, self._output = log.start, None
            self._head.lengths[self._slot] = 0
        count = (
            min(committed - 1, log.end, self._first + self._head.context - _DEEPEST) - self._read
        )
        if count > 0:
            ids = torch.tensor(
                tokens[self._read + 1 : self._read + 1 + count], device=self._head.device
            )
            self._output = self._head.read(ids, self._head.fused(log.take(count)), self._slot)[-1:]
        return self._output is not None and self._read == committed - 1

    def draft(
        self, position: int, draw: Draw, least: float = _LEAST_CHANCE
    ) -> list[list[tuple[int, float]]]:
        """For positions from `position` on the tokens that the head holds likeliest, its own draw first, each with its
        probability; each level follows the draws of those before it.
        """
        head, slot, output = self._head, self._slot, self._output
        assert output is not None
        levels: list[list[tuple[int, float]]] = []
        length, reached = head.lengths[slot], 1.0
        while len(levels) < _DEEPEST and reached >= least:
            (logits,) = head.logits(output)
            own = draw(logits, position + len(levels))
            shares, at = logits.softmax(-1).topk(min(RANKS, len(logits)))
            likeliest = dict(zip(head.ids[at].tolist(), shares.tolist(), strict=True))
            chance = likeliest.pop(own, 0.0) or float(logits.softmax(-1)[head.ids == own].sum())
            levels.append([(own, chance), *likeliest.items()][:RANKS])
            reached *= chance
            output = head.read(
                torch.tensor([own], device=head.device), output, slot, guessed=len(levels)
            )
        head.lengths[slot] = length
        return levels


class TargetStates:
    """Where hidden states of each slot's text go: to a head in this process, to a draft that reads them, or nowhere.

    Args:
        runner: keeps the states of the last forward.
        gives: whether there is such a draft.
    """

    def __init__(self, runner: ModelRunner, head: Head | None, gives: bool) -> None:
        slots = range(runner.capabilities.slots)
        self._runner: Any = runner
        self.texts = [] if head is None else [HeadText(head, slot) for slot in slots]
        self._given = [StateLog() for _ in slots] if gives else []

    def logs(self, slot: int) -> list[StateLog]:
        return [*(text.log for text in self.texts[slot : slot + 1]), *self._given[slot : slot + 1]]

    def rollback(self, length: int, slot: int) -> None:
        for log in self.logs(slot):
            log.rollback(length)

    def extend(self, start: int, slot: int, path: Sequence[int] | None = None) -> None:
        """The text has the tokens of the slot's last forward from position `start` on; of a tree those of `path`."""
        if logs := self.logs(slot):
            states = self._runner.features(slot)
            for log in logs:
                log.extend(start, states if path is None else states[list(path)])

    def messages(self, request: int, end: int, slot: int) -> Iterator[HiddenStates]:
        """For the draft, those of the text up to position `end` that it was not given."""
        log = self._given[slot]
        start, count = log.start, min(end, log.end) - log.start
        if count <= 0:
            return
        data = log.take(count).to("cpu", torch.bfloat16).view(torch.uint8)
        for some in data.split(max(1, MAX_FRAME // 2 // data.shape[1])):
            yield HiddenStates(request, start, some.numpy().tobytes())
            start += len(some)


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
                rates, share, hit = (
                    self._rates[rank],
                    bisect(_BINS, chance),
                    token == self._tokens[position],
                )
                rates[share] += RATE_WEIGHT * (hit - rates[share])
            if level[0][0] != self._tokens[position]:
                break
        if committed == self._at and self._levels:
            return
        is_read = self._text.read(self._tokens, committed)
        self._at, self._levels = (
            committed,
            self._text.draft(committed, self._draw) if is_read else [],
        )

    def candidates(self, position: int) -> list[Candidate]:
        """Of the position behind the committed tokens; there are none for others."""
        return self._level(0) if position == self._at else []

    def following(self, candidate: Candidate) -> list[Candidate]:
        ((level, rank),) = candidate.occurrences
        return [] if rank else self._level(level + 1)

    def _level(self, number: int) -> list[Candidate]:
        found = self._levels[number] if number < len(self._levels) else []
        chances = [
            self._rates[rank][bisect(_BINS, chance)] for rank, (_, chance) in enumerate(found)
        ]
        total = max(1.0, sum(chances))
        return [
            Candidate(token, chance / total, 1, ((number, rank),), Source.HEAD)
            for rank, ((token, _), chance) in enumerate(zip(found, chances, strict=True))
        ]
