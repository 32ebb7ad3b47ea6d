"""Joint greedy decoding: the likeliest tokens together, against trying all."""

from __future__ import annotations

from itertools import product
from math import log

import pytest
import torch

from pearl.lab.experiments.mjgd import decode
from pearl.models.toy import ToyRunner

ROWS = torch.softmax(2 * torch.randn(6, 6, generator=torch.Generator().manual_seed(4)), -1)


def runner() -> ToyRunner:
    return ToyRunner(6, lambda seen: ROWS[seen[-1]])


def surprise(first: int, tokens: tuple[int, ...] | list[int]) -> float:
    return -sum(log(ROWS[a, b].item()) for a, b in zip((first, *tokens), tokens, strict=False))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_each_step_takes_the_likeliest_tokens_together(count: int) -> None:
    written = decode(runner(), [0], 12, count)
    assert len(written.tokens) == 12
    last = 0
    for at in range(0, 12, count):
        block = tuple(written.tokens[at : at + count])
        best = min(product(range(6), repeat=count), key=lambda tokens, last=last: surprise(last, tokens))
        assert surprise(last, block) == pytest.approx(surprise(last, best))
        last = block[-1]
    assert written.surprise == pytest.approx(surprise(0, written.tokens), abs=1e-5)


def test_more_tokens_a_step_are_likelier_as_a_whole_here() -> None:
    """The likeliest token leads nowhere in particular, the second to what is sure."""
    rows = torch.tensor([[0.0, 0.55, 0.45], [0.3, 0.4, 0.3], [0.05, 0.05, 0.9]])
    greedy, joint = (decode(ToyRunner(3, lambda seen: rows[seen[-1]]), [0], 4, count) for count in (1, 4))
    assert greedy.tokens == [1, 1, 1, 1]
    assert joint.tokens == [2, 2, 2, 2]
    assert joint.surprise < greedy.surprise


def test_it_ends_behind_an_end() -> None:
    whole = decode(runner(), [0], 12, 3).tokens
    end = whole[4]
    cut = decode(runner(), [0], 12, 3, {end}).tokens
    assert cut == whole[: whole.index(end) + 1]
    assert len(decode(runner(), [0], 7, 3).tokens) == 7
