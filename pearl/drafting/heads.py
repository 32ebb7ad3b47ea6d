"""Guesses of a drafting head, such as EAGLE-3 or MTP, for the texts in the target's slots.

The head reads the target's hidden states of committed tokens, and proposes a block of successive
tokens, each with runners-up.  The block's tokens are the head's own draws, which use the same
random numbers as the target's draws.  The block ends once its probability has become small.

Guesses are sorted into groups by two numbers: the rank of the guess, and the bin of the probability
that the head gives the guess.  This file learns for each group how often its guesses are right.
"""

from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from pearl.drafting.ngram import RANKS, Candidate, learn_hit, scaled
from pearl.models.heads.head import Block, Draw, Head, Level
from pearl.models.runner import ModelRunner
from pearl.protocol.messages import MAX_FRAME, HiddenStates, Source

_LEAST_CHANCE = 0.15  # a less likely block ends, because its next token would seldom be reached
_BINS = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)  # inner bounds for the head's probability


class StateLog:
    """Holds the target's hidden states of a text, from position `start` on, until they are read."""

    def __init__(self) -> None:
        self._begin(0)

    def _begin(self, start: int) -> None:
        self.start = start
        self._parts: list[torch.Tensor] = []  # [n, features] each

    @property
    def end(self) -> int:
        return self.start + sum(map(len, self._parts))

    def extend(self, start: int, states: torch.Tensor) -> None:
        """Append the target's states of the tokens from position `start` on.

        States that the log has already are skipped. If `start` is after the end of the log, so
        that states between them are missing, the log is emptied first and begins at `start`.
        """
        if start > self.end:
            self._begin(start)
        self._parts.append(states[self.end - start :])

    def rollback(self, length: int) -> None:
        """Keep only the states of the text's first `length` tokens."""
        if length < self.start:
            self._begin(length)
        elif length < self.end:
            self._parts = [torch.cat(self._parts)[: length - self.start]]

    def take(self, count: int) -> torch.Tensor:
        """Remove and return the first `count` states."""
        states = torch.cat(self._parts)
        self.start += count
        self._parts = [states[count:]]
        return states[:count]


class HeadText:
    """The part of a slot's text that a head has read.

    The head goes on reading where it stopped. If the log of hidden states begins at another
    position, the head cannot go on. It then forgets the text, and starts where the log begins.
    """

    def __init__(self, head: Head, slot: int) -> None:
        self.log = StateLog()
        self._head = head
        self._slot = slot
        self._first = 0
        head.lengths[slot] = 0

    @property
    def _read(self) -> int:
        """The position of the hidden state that the head reads next."""
        return self._first + self._head.lengths[self._slot]

    def read(self, tokens: Sequence[int], committed: int) -> bool:
        """Let the head read the first `committed` tokens of the text, as far as states are logged.

        Return whether the head has read all of them, so that it can draft.
        """
        log = self.log
        head = self._head
        if log.start != self._read:
            self._first = log.start
            head.lengths[self._slot] = 0
        end = min(committed - 1, log.end, self._first + head.context - head.deepest)
        count = end - self._read
        if count > 0:
            next_tokens = tokens[self._read + 1 : end + 1]
            ids = torch.tensor(next_tokens, device=head.device)
            head.extend(ids, log.take(count), self._slot)
        return head.lengths[self._slot] > 0 and self._read == committed - 1

    def draft(self, position: int, draw: Draw, least: float = _LEAST_CHANCE) -> list[Level]:
        """Return the block that the head proposes, one level for each position from `position` on.

        A level has the head's own draw, then the likeliest other tokens. `position` must follow the
        tokens that the head has read. `least`: the block ends once its probability is below this.
        """
        head = self._head
        block = Block(head.ids, draw, position, head.deepest, least, RANKS)
        head.propose(block, self._slot)
        return block.levels


class TargetStates:
    """Passes on the target's hidden states of each slot to whoever reads them.

    The reader is a head in this process, the draft in the other process, or both.

    Args:
        runner: the target's runner, which keeps the hidden states of the last forward.
        head: the head in this process; None if there is none.
        gives: whether the draft reads the states.
    """

    def __init__(self, runner: ModelRunner, head: Head | None, gives: bool) -> None:
        self._runner: Any = runner
        self.texts: list[HeadText] = []
        #: The logs of each slot. If the draft reads states, each slot's last log is for the draft.
        self._logs: list[list[StateLog]] = []
        for slot in range(runner.capabilities.slots):
            logs = []
            if head is not None:
                text = HeadText(head, slot)
                self.texts.append(text)
                logs.append(text.log)
            if gives:
                logs.append(StateLog())
            self._logs.append(logs)

    def rollback(self, length: int, slot: int) -> None:
        for log in self._logs[slot]:
            log.rollback(length)

    def extend(self, start: int, slot: int, path: Sequence[int] | None = None) -> None:
        """Log the states of the slot's last forward.

        Args:
            start: the position of the first token that the forward was fed.
            path: the indices of the tokens to log, if the forward was fed a tree; None for all
                tokens.
        """
        logs = self._logs[slot]
        if not logs:
            return
        states = self._runner.features(slot)
        if path is not None:
            states = states[list(path)]
        for log in logs:
            log.extend(start, states)

    def messages(self, request: int, end: int, slot: int) -> Iterator[HiddenStates]:
        """Yield messages with the states before position `end` that the draft was not sent yet."""
        log = self._logs[slot][-1]
        start = log.start
        count = min(end, log.end) - start
        if count <= 0:
            return
        data = log.take(count).to("cpu", torch.bfloat16).view(torch.uint8)
        for part in data.split(max(1, MAX_FRAME // 2 // data.shape[1])):
            yield HiddenStates(request, start, part.numpy().tobytes())
            start += len(part)


class HeadGuesses:
    """A head's guesses for one text, with rates that are learned as the text grows.

    Args:
        text: the part of the text that the head has read.
        tokens: the tokens of the text; this object only reads them.
        draw: draws a token from logits over the head's vocabulary, as the target draws in this
            request.
    """

    def __init__(self, text: HeadText, tokens: Sequence[int], draw: Draw) -> None:
        self._text = text
        self._tokens = tokens
        self._draw = draw
        self._levels: list[Level] = []
        self._position = 0  # position of the first level
        middles = [(low + high) / 2 for low, high in pairwise((0.0, *_BINS, 1.0))]
        self._rates = [list(middles) for _ in range(RANKS)]

    def cut(self, length: int) -> None:
        """Do nothing. The head makes new guesses each time that tokens are committed."""

    def learn(self, committed: int) -> None:
        """Update the rates with the last guesses, and then forget these guesses."""
        if committed == self._position:
            return
        for position, level in enumerate(self._levels, self._position):
            if position >= committed:
                break
            for candidate in self._level_candidates(position - self._position):
                learn_hit(self._rates, candidate, self._tokens[position])
            if level[0].token != self._tokens[position]:
                break
        self._position = committed
        self._levels = []

    def candidates(self, position: int) -> list[Candidate]:
        """Return candidates for an uncommitted position.

        The head computes its block at the first call after tokens were committed. Pending tokens of
        a draft may stand before the position. If a pending token differs from the head's own draw,
        there are no candidates.
        """
        number = position - self._position
        if number < 0:
            return []
        if not self._levels and self._text.read(self._tokens, self._position):
            self._levels = self._text.draft(self._position, self._draw)
        pending = self._tokens[self._position : position]
        for level, token in zip(self._levels, pending, strict=False):
            if level[0].token != token:
                return []
        return self._level_candidates(number)

    def following(self, candidate: Candidate) -> list[Candidate]:
        ((number, rank),) = candidate.occurrences
        if rank:
            return []
        return self._level_candidates(number + 1)

    def _level_candidates(self, number: int) -> list[Candidate]:
        if number >= len(self._levels):
            return []
        candidates = []
        for rank, guess in enumerate(self._levels[number]):
            occurrences = ((number, rank),)
            bin = bisect(_BINS, guess.prob)
            chance = self._rates[rank][bin]
            candidate = Candidate(
                guess.token, chance, occurrences, Source.HEAD, rate=(rank, bin), origin=self
            )
            candidates.append(candidate)
        return scaled(candidates)
