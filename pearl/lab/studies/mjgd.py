"""Multi-token joint greedy decoding: each step commits the likeliest sequence of n tokens.

With one token per step this is greedy decoding. With more tokens the text as a whole becomes
likelier for the target. Rule joint approximates this method. The method itself is slow, because its
search takes more forwards than the text has tokens. Source: Qin et al. 2024, section 3.
"""

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count as counter
from typing import NamedTuple

import torch

from pearl.models.runner import ModelRunner, feed_chain


@dataclass
class JointText:
    """A text. `surprise` is minus the log of the text's probability, in nats."""

    tokens: list[int] = field(default_factory=list)
    surprise: float = 0.0


def decode(
    runner: ModelRunner, prompt: Sequence[int], limit: int, count: int, ends: Collection[int] = ()
) -> JointText:
    """Generate up to `limit` tokens, `count` per step; stop after a token of `ends`.

    The search for each step's tokens is exact (best first). It looks past a token of `ends`: the
    tokens after it count in the joint probability, but are cut off from the text.
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


Choice = tuple[int, float]  # a token, and its surprise in nats


class _Queued(NamedTuple):
    """A path and a token that may continue it; items are ordered by `surprise`, then `number`.

    Attributes:
        surprise: surprise of the path together with the continuing token, in nats.
        number: a number that rises with each new item.
        path: tokens after those in the cache.
        table: all tokens that may continue the path, likeliest first.
        rank: index in `table` of the continuing token.
    """

    surprise: float
    number: int
    path: list[Choice]
    table: list[Choice]
    rank: int


def _likeliest(runner: ModelRunner, row: torch.Tensor, count: int) -> list[Choice]:
    """Return the likeliest sequence of `count` tokens after the tokens in the cache.

    Each token is returned with its surprise.

    Args:
        row: logits [vocab] of the first token of the sequence.
    """
    length = runner.length()
    numbers = counter()
    queue: list[_Queued] = []

    def push(path: list[Choice], table: list[Choice], rank: int) -> None:
        if rank < len(table):
            total = sum(surprise for _, surprise in path) + table[rank][1]
            heapq.heappush(queue, _Queued(total, next(numbers), path, table, rank))

    push([], _table(row), 0)
    while True:
        best = heapq.heappop(queue)
        push(best.path, best.table, best.rank + 1)
        path = [*best.path, best.table[best.rank]]
        if len(path) == count:
            return path
        rows = feed_chain(runner, [token for token, _ in path], 1)
        runner.rollback(length)
        push(path, _table(rows[0]), 0)


def _table(row: torch.Tensor) -> list[Choice]:
    """Return all tokens with their surprises, likeliest first."""
    surprises, ids = torch.log_softmax(row.double(), -1).neg_().sort(stable=True)
    return list(zip(ids.tolist(), surprises.tolist(), strict=True))
