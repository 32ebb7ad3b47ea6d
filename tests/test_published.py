"""Guesses as published: what is copied, counted by enumeration, and taken from discarded tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from pearl.config import EngineConfig
from pearl.drafting.ngram import LONGEST, NgramIndex
from pearl.drafting.published import INDEXES, Counted
from pearl.errors import ConfigError
from pearl.execution.target import TargetExecutor
from pearl.models.checkpoints.loading import load_runner
from pearl.models.runner import feed_chain
from pearl.protocol.events import Forward, Guess, Judge, Open, Phase
from pearl.protocol.messages import Source
from pearl.protocol.options import RequestOptions, Sampling
from tests.conftest import TOY
from tests.test_datastore import make
from tests.tiny import tiny_model

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
