"""Lookahead decoding: its window is what the target writes from its tokens, its pool guesses, and no text changes."""

from __future__ import annotations

import pytest
import torch

from pearl.config import SamplingParams
from pearl.drafting.jacobi import COLUMNS, KEPT, LEVELS, JacobiIndex
from pearl.engine import Engine
from pearl.execution.target import TargetExecutor
from pearl.models.checkpoints.loading import load_runner
from pearl.models.runner import feed_chain
from pearl.protocol.events import Forward, Guess, Keep, Open, Phase
from pearl.protocol.options import RequestOptions, Sampling
from tests.tiny import VOCAB_SIZE, tiny_model

PROMPT = (5, 40, 7, 93, 11, 12, 200, 3)


def test_the_window_is_the_targets_own_writing() -> None:
    """Each new level is what the target draws behind each column, beside guesses and without them."""
    runner, alone = (load_runner(str(tiny_model(layers=4)), device=torch.device("cpu")) for _ in range(2))
    executor = TargetExecutor(runner)
    executor.execute(Open(PROMPT, RequestOptions("lookahead", sampling=Sampling(0.0)), request=1))
    executor.execute(Forward(Phase.PREFILL, 0, PROMPT[:-1], 0, request=1))
    text = [*PROMPT]
    for step in range(3 * LEVELS):
        known = len(text) - 1 if step else 0
        executor.execute(Guess(known, tuple(text[known:]), len(text), 99, (), 16, request=1))
        index = executor._requests[1].index
        before = [list(level) for level in index._levels]
        start, guesses = len(text) - 1, (7, 9) if step % 2 else ()
        parents = (-1, *(0 for _ in guesses)) if guesses else None
        executor.execute(Forward(Phase.PRE_VERIFY, start, (text[-1], *guesses), 1 + len(guesses), parents, request=1))
        if guesses:
            executor.execute(Keep((0,), request=1))
        assert runner.length() == len(text)
        assert index._levels[:-1] == before[1:]
        for column in range(COLUMNS):
            alone.rollback(0)
            chain = [*text, *before[0][: column + 1], *(level[column] for level in before[1:])]
            assert index._levels[-1][column] == int(feed_chain(alone, chain, 1)[0].argmax())
        text.append(int(executor._requests[1].logits[0].argmax()))


def test_the_pool_guesses_what_has_followed_a_token() -> None:
    """The latest first; a bound for each token; and the chance of a place is learned."""
    index = JacobiIndex([1, 2, 3])
    index._levels = [[level * 10 + column for column in range(COLUMNS)] for level in range(LEVELS)]
    index.take([90] * COLUMNS)
    index.extend([2])
    (first,) = index.candidates(4)
    path = [first.token]
    while below := index.following(first):
        (first,) = below
        path.append(first.token)
    assert path == [12, 22, 32, 90]
    for number in range(2 * KEPT):
        index._levels = [[5] * COLUMNS, *([number + level] * COLUMNS for level in range(1, LEVELS))]
        index.take([number])
    index.extend([5])
    likeliest = index.candidates(5)
    assert [each.token for each in likeliest] == [2 * KEPT - number for number in range(KEPT)]
    assert sum(each.chance for each in likeliest) <= 1
    before = index._hits[0]
    index.extend([2 * KEPT])
    index.learn(6)
    assert index._hits[0] > before
    assert index.window(LEVELS - 1) is index.window(-1) is None
    small = index.window(2 * LEVELS)
    assert (small.columns, small.parents) == (2, (-1, 0, *range(2 * LEVELS - 2)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_text_changes(temperature: float) -> None:
    """In several slots, up to the context's end, and where n-grams of the text say the same."""
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=60, ignore_eos=True)
    prompts = [[5, 40, 7], [9, 9, 9, 9], list(range(20, 40))]
    with Engine(str(tiny_model(layers=4)), "none", slots=2, max_context=96) as engine:
        wanted = [each.tokens for each in engine.generate(prompts, params, method="ar")]
        found = engine.generate(prompts, params, method="lookahead")
    assert [each.tokens for each in found] == wanted
    if not temperature:
        assert sum(each.statistics.guessed_by_source.get("jacobi", 0) for each in found) > 0
    assert max(max(each) for each in wanted) < VOCAB_SIZE
