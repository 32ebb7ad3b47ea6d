"""Guesses as published: what is copied, counted by enumeration, taken from discarded tokens, or from lookahead."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from pearl.config import EngineConfig, SamplingParams
from pearl.drafting.jacobi import COLUMNS, KEPT, LEVELS, JacobiIndex
from pearl.drafting.ngram import LONGEST, NgramIndex
from pearl.drafting.published import INDEXES, Counted
from pearl.engine import Engine
from pearl.errors import ConfigError
from pearl.execution.target import TargetExecutor
from pearl.models.checkpoints.loading import load_runner
from pearl.models.runner import feed_chain
from pearl.protocol.events import Forward, Guess, Judge, Keep, Open, Phase
from pearl.protocol.messages import Source
from pearl.protocol.options import RequestOptions, Sampling
from tests.conftest import TOY
from tests.test_datastore import make
from tests.tiny import VOCAB_SIZE, tiny_model

TEXT = (1, 2, 3, 9, 8, 2, 3, 7, 6, 1, 2, 3)


def paths(index: NgramIndex, most: int) -> list[list[int]]:
    """The likeliest path of guesses behind each candidate."""
    found = []
    for candidate in index.candidates(len(index)):
        path, below = [candidate.token], index.following(candidate)
        while below and len(path) < most:
            path, below = [*path, below[0].token], index.following(below[0])
        found.append(path)
    return found


def test_pld_copies_behind_the_earliest_of_the_longest_matches() -> None:
    index = INDEXES["pld"](TEXT, None, None, None)
    assert paths(index, 5) == [[9, 8, 2, 3, 7]], "1 2 3 is at the beginning"
    index.cut(11)
    index.extend([7, 2, 3])
    assert paths(index, 3) == [[9, 8, 2]], "7 2 3 is new, 2 3 is not: its earliest place"
    index.extend([99])
    assert paths(index, 3) == []


def test_llma_copies_from_the_prompt_alone() -> None:
    index = INDEXES["llma"](TEXT[:8], None, None, None)
    index.extend([5, 4, 5])
    assert paths(index, 3) == [], "5 is in the text, and not in the prompt"
    index.extend([2, 3])
    assert paths(index, 99) == [[9, 8, 2, 3, 7]], "up to the prompt's end"
    longer = INDEXES["llma"]((0, 2, 3, 4, 5, 11, 1, 2, 3, 4, 5, 12), None, None, None)
    longer.extend([1, 2, 3, 4, 5])
    assert paths(longer, 1) == [[12]], "a match of five tokens"


def counted(text: list[int], path: tuple[int, ...]) -> dict[int, float]:
    """By enumeration of the text: the probability of each token behind a path; see `Counted`."""
    factor, damping, depth = Counted.weights
    best: dict[int, float] = {}
    for n in range(1, LONGEST + 1):
        prefix = (*text[len(text) - n :], *path)
        ends = [end for end in range(len(prefix), len(text)) if tuple(text[end - len(prefix) : end]) == prefix]
        for token in {text[end] for end in ends}:
            share = sum(text[end] == token for end in ends) / len(ends)
            best[token] = max(best.get(token, 0.0), factor * depth * (1 - damping ** len(prefix)) * share)
    total = max(1.0, sum(best.values()))  # of the trees of several prefixes
    return {token: chance / total for token, chance in best.items()}


@pytest.mark.parametrize("seed", range(4))
def test_sssd_has_the_shares_of_enumeration(seed: int) -> None:
    noise = random.Random(seed)
    text = [noise.randrange(3) for _ in range(60)]
    index = INDEXES["sssd"](text, None, None, None)
    waiting = [((), index.candidates(len(text)))]
    for path, candidates in waiting:
        assert {each.token: each.chance for each in candidates} == pytest.approx(counted(text, path)), path
        if len(path) < 3:
            waiting += [((*path, each.token), index.following(each)) for each in candidates]
    assert len(waiting) > 20


def test_rest_guesses_from_the_longest_match_of_a_datastore(tmp_path: Path) -> None:
    store = make(tmp_path / "store", [[1, 2, 3], [1, 2, 3], [1, 2, 4], [9, 2, 5]], 10)
    index = INDEXES["rest"]([1, 2, 7, 1, 2], store, None, None)
    found = index.candidates(5)
    assert {each.token: each.chance for each in found} == pytest.approx({3: 2 / 3, 4: 1 / 3})
    assert {each.source for each in found} == {Source.DATASTORE}, "not the 7 of the text"
    both = INDEXES["sssd"]([1, 2, 7, 1, 2], store, None, None).candidates(5)
    assert {7, 3, 4} <= {each.token for each in both}


def test_ouroboros_keeps_what_the_target_drew_behind_discarded_tokens() -> None:
    """As plain forwards draw it, while the draft had drawn the same; and phrases of the text."""
    runner, alone = (load_runner(str(tiny_model(layers=4)), device=torch.device("cpu")) for _ in range(2))
    executor, prompt = TargetExecutor(runner), (5, 40, 7, 93, 11, 12, 200, 3)

    def drawn(tokens: list[int]) -> int:
        alone.rollback(0)
        return int(feed_chain(alone, tokens, 1)[0].argmax())

    wrong = (drawn([*prompt]) + 1) % 200
    agreed = drawn([*prompt, wrong])
    window = (wrong, agreed, 17, 18)
    draws = [drawn([*prompt, *window[:length]]) for length in range(1, 4)]
    assert draws[0] == agreed
    executor.execute(Open(prompt, RequestOptions("ouroboros", sampling=Sampling(0.0)), request=1))
    executor.execute(Forward(Phase.PREFILL, 0, prompt[:-1], 0, request=1))
    executor.execute(Guess(0, (*prompt, *window), len(prompt), 99, (0.5,) * 4, 16, request=1))
    executor.execute(Forward(Phase.POST_VERIFY, len(prompt) - 1, (prompt[-1], *window), 5, request=1))
    executor.execute(Judge(len(prompt), window, (None,) * 4, (0, 1, 2, 3), request=1))
    pool = executor._requests[1].index._pool  # type: ignore[union-attr]
    assert pool[wrong] == [(agreed, draws[1])]
    assert pool[agreed][-1] == (draws[1],)
    assert pool[5] == [prompt[1:5]]


def test_methods_that_need_a_setting_are_refused_without() -> None:
    for method, needed in (("rest", "--datastore"), ("pia", "--habits"), ("head", "--head")):
        with pytest.raises(ConfigError, match=needed):
            EngineConfig(target=TOY, draft="none").check_method(method)


# ---- lookahead decoding ----


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
