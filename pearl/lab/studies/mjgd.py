"""Multi-token joint greedy decoding: each step commits the `count` tokens that together are likeliest for the target.

With one token per step it is greedy decoding; with more, the text as a whole is likelier.  The joint rule approximates
it.  It is not fast: the search takes more forwards than there are tokens.  Source: Qin et al. 2024, section 3.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count as counter

import torch

from pearl.models.runner import ModelRunner, feed_chain


@dataclass
class Written:
    """A text. `surprise`: minus the log of its probability, in nats."""

    tokens: list[int] = field(default_factory=list)
    surprise: float = 0.0


def decode(
    runner: ModelRunner, prompt: Sequence[int], limit: int, count: int, ends: Collection[int] = ()
) -> Written:
    """Write up to `limit` tokens after the prompt, `count` per step; stop after a token of `ends`.

    The search is exact (best first). What would follow a token of `ends` still counts in the joint probability.
    """
    runner.rollback(0)
    written, unfed = Written(), list(prompt)
    while len(written.tokens) < limit:
        row = feed_chain(runner, unfed, 1)[0]
        best, surprise = _likeliest(runner, row, min(count, limit - len(written.tokens)))
        end = next((i for i, token in enumerate(best, start=1) if token in ends), len(best))
        unfed = list(best[:end])
        written.tokens += unfed
        written.surprise += sum(surprise[:end])
        if end < len(best) or best[end - 1] in ends:
            break
    return written


def _likeliest(
    runner: ModelRunner, row: torch.Tensor, count: int
) -> tuple[tuple[int, ...], list[float]]:
    """(the `count` likeliest tokens after the cache's contents, the surprise of each).

    Args:
        row: logits [vocab] after the cache's contents.
    """
    length, order = runner.length(), counter()
    # By sequence: its continuations, likeliest first. The queue holds the next continuation of each sequence.
    tables: dict[tuple[int, ...], tuple[list[float], list[int]]] = {(): _table(row)}
    queue: list[tuple[float, int, tuple[int, ...], list[float], int]] = []

    def push(above: tuple[int, ...], surprise: list[float], rank: int) -> None:
        costs, _ = tables[above]
        if rank < len(costs):
            heapq.heappush(queue, (sum(surprise) + costs[rank], next(order), above, surprise, rank))

    push((), [], 0)
    while True:
        _, _, above, surprise, rank = heapq.heappop(queue)
        costs, ids = tables[above]
        push(above, surprise, rank + 1)
        path, known = (*above, ids[rank]), [*surprise, costs[rank]]
        if len(path) == count:
            return path, known
        tables[path] = _table(feed_chain(runner, path, 1)[0])
        runner.rollback(length)
        push(path, known, 0)


def _table(row: torch.Tensor) -> tuple[list[float], list[int]]:
    """(surprises of all tokens, smallest first; the tokens)."""
    costs, ids = torch.log_softmax(row.double(), -1).neg_().sort(stable=True)
    return costs.tolist(), ids.tolist()
