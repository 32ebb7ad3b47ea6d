"""Multi-token joint greedy decoding: at each step the `count` tokens that together are likeliest under the target.

With one token a step it is greedy decoding; with more the text is likelier as a whole.  It is what the joint rule
approximates, and no way to be fast: the search needs more forwards than there are tokens.  Source: Qin et al. 2024,
section 3.
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
    """A text.

    Attributes:
        surprise: minus the logarithm of its probability, nats.
        forwards: that the searches took.
    """

    tokens: list[int] = field(default_factory=list)
    surprise: float = 0.0
    forwards: int = 0


def decode(runner: ModelRunner, prompt: Sequence[int], limit: int, count: int, ends: Collection[int] = ()) -> Written:
    """Write up to `limit` tokens behind the prompt, `count` a step; ends behind one of `ends`.

    The likeliest tokens are found exactly, best first: what is as likely as the best continuation so far could be is
    looked at, and nothing else. (A token of `ends` is a token: what would follow it counts.)
    """
    runner.rollback(0)
    written, unfed = Written(), list(prompt)
    while len(written.tokens) < limit:
        row = feed_chain(runner, unfed, 1)[0]
        best, surprise, forwards = _likeliest(runner, row, min(count, limit - len(written.tokens)))
        written.forwards += 1 + forwards
        end = next((i for i, token in enumerate(best, start=1) if token in ends), len(best))
        unfed = list(best[:end])
        written.tokens += unfed
        written.surprise += sum(surprise[:end])
        if end < len(best) or best[end - 1] in ends:
            break
    return written


def _likeliest(runner: ModelRunner, row: torch.Tensor, count: int) -> tuple[tuple[int, ...], list[float], int]:
    """The likeliest `count` tokens behind what the cache holds, each one's surprise, and forwards taken.

    Args:
        row: logits [vocab] behind it.
    """
    length, forwards, order = runner.length(), 0, counter()
    # Of each sequence looked at its continuations, the likeliest first; a sequence waits as the next one of its parent.
    tables: dict[tuple[int, ...], tuple[list[float], list[int]]] = {(): _table(row)}
    waiting: list[tuple[float, int, tuple[int, ...], list[float], int]] = []

    def push(above: tuple[int, ...], surprise: list[float], rank: int) -> None:
        costs, _ = tables[above]
        if rank < len(costs):
            heapq.heappush(waiting, (sum(surprise) + costs[rank], next(order), above, surprise, rank))

    push((), [], 0)
    while True:
        _, _, above, surprise, rank = heapq.heappop(waiting)
        costs, ids = tables[above]
        push(above, surprise, rank + 1)
        path, known = (*above, ids[rank]), [*surprise, costs[rank]]
        if len(path) == count:
            return path, known, forwards
        tables[path] = _table(feed_chain(runner, path, 1)[0])
        forwards += 1
        runner.rollback(length)
        push(path, known, 0)


def _table(row: torch.Tensor) -> tuple[list[float], list[int]]:
    """Surprises of all tokens, the least first, and the tokens."""
    costs, ids = torch.log_softmax(row.double(), -1).neg_().sort(stable=True)
    return costs.tolist(), ids.tolist()
