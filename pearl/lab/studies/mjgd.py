"""Multi-token joint greedy decoding: each step commits the `count` tokens that together are likeliest for the target.

With one token per step it is greedy decoding; with more, the text as a whole is likelier.  The joint rule approximates
it.  It is not fast: the search takes more forwards than there are tokens.  Source: Qin et al. 2024, section 3.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count as counter
from typing import NamedTuple

import torch

from pearl.models.runner import ModelRunner, feed_chain


@dataclass
class JointText:
    """A text. `surprise`: minus the log of its probability, in nats."""

    tokens: list[int] = field(default_factory=list)
    surprise: float = 0.0


def decode(
    runner: ModelRunner, prompt: Sequence[int], limit: int, count: int, ends: Collection[int] = ()
) -> JointText:
    """Write up to `limit` tokens after the prompt, `count` per step; stop after a token of `ends`.

    The search is exact (best first). What would follow a token of `ends` still counts in the joint probability.
    """
    runner.rollback(0)
    text = JointText()
    unfed = list(prompt)
    while len(text.tokens) < limit:
        row = feed_chain(runner, unfed, 1)[0]
        unfed = []
        for token, surprise in _likeliest(runner, row, min(count, limit - len(text.tokens))):
            unfed.append(token)
            text.surprise += surprise
            if token in ends:
                break
        text.tokens += unfed
        if unfed[-1] in ends:
            break
    return text


class _Path(NamedTuple):
    """A sequence of tokens after the cache's contents, and the surprise of each, in nats."""

    tokens: tuple[int, ...] = ()
    surprises: tuple[float, ...] = ()


class _Queued(NamedTuple):
    """The next continuation of a path, ordered by the surprise of both together; `number` breaks ties."""

    surprise: float
    number: int
    path: _Path
    rank: int


def _likeliest(runner: ModelRunner, row: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """Return the `count` likeliest tokens after the cache's contents, each with its surprise.

    Args:
        row: logits [vocab] after the cache's contents.
    """
    length = runner.length()
    numbers = counter()
    tables = {_Path(): _table(row)}  # continuations of each path, likeliest first
    queue: list[_Queued] = []

    def push(path: _Path, rank: int) -> None:
        surprises, _ = tables[path]
        if rank < len(surprises):
            total = sum(path.surprises) + surprises[rank]
            heapq.heappush(queue, _Queued(total, next(numbers), path, rank))

    push(_Path(), 0)
    while True:
        best = heapq.heappop(queue)
        surprises, ids = tables[best.path]
        push(best.path, best.rank + 1)
        path = _Path(
            (*best.path.tokens, ids[best.rank]), (*best.path.surprises, surprises[best.rank])
        )
        if len(path.tokens) == count:
            return list(zip(path.tokens, path.surprises, strict=True))
        tables[path] = _table(feed_chain(runner, path.tokens, 1)[0])
        runner.rollback(length)
        push(path, 0)


def _table(row: torch.Tensor) -> tuple[list[float], list[int]]:
    """Return (surprises of all tokens, smallest first; the tokens)."""
    surprises, ids = torch.log_softmax(row.double(), -1).neg_().sort(stable=True)
    return surprises.tolist(), ids.tolist()
