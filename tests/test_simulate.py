"""Under the virtual clock the text depends on what should decide it, and on nothing else (invariants 3, 5, 10)."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from pearl.lab.simulate import Outcome, Timing, paired_executors, simulate
from pearl.models.loading import load_runner
from pearl.models.runner import ModelRunner
from pearl.models.toy import ToyRunner, alpha_pair, coin_pair
from pearl.protocol.events import Odds
from pearl.protocol.messages import Submit
from pearl.protocol.options import RequestOptions, Sampling
from pearl.spec.methods import METHODS
from tests.pairwise import combined
from tests.replace import replace
from tests.test_look_ahead import TIMINGS
from tests.tiny import tiny_model

VOCAB = 12
TOKENS = 60
PROMPT = (1, 2, 3)
DRAFTING = [name for name, method in METHODS.items() if method.drafts]
WINDOWS = [("stream", None), ("fixed", 1), ("fixed", 2), ("fixed", 7)]


def decode(
    decoding: RequestOptions, timing: Timing, seed: int = 5, temperature: float = 1.0, **contexts: int
) -> Outcome:
    target, draft = alpha_pair(VOCAB, 0.7)
    executors = paired_executors(ToyRunner(VOCAB, target), ToyRunner(VOCAB, draft))
    submit = Submit(1, PROMPT, len(PROMPT) + TOKENS, replace(decoding, sampling=Sampling(temperature, seed=seed)))
    return simulate(submit, *executors, timing, **contexts)  # type: ignore[arg-type]


@cache
def plain(seed: int, temperature: float) -> list[int]:
    """Target-only decoding."""
    return decode(RequestOptions("ar"), TIMINGS[0], seed, temperature).tokens


@combined
@pytest.mark.parametrize("method", ["pearl", "pearl-no-pre-verify"])
def test_sampled_text_is_a_function_of_the_seed(method: str, combined: Any) -> None:
    """Not of window, timing, delay or policy - while draws in sequence would make it one of all four."""
    texts = {seed: decode(RequestOptions(), TIMINGS[0], seed).tokens for seed in range(5)}
    assert len(set(map(tuple, texts.values()))) == 5
    for (window, gamma), timing, seed in combined(WINDOWS, TIMINGS, range(2)):
        found = decode(RequestOptions(method, window, gamma), timing, seed).tokens
        assert found == texts[seed], (window, gamma, timing.seed)


@combined
@pytest.mark.parametrize("method", DRAFTING)
def test_coupled_and_greedy_texts_are_plain_decoding(method: str, combined: Any) -> None:
    """Whatever the draft does: the target's draw is always what is committed."""
    accepted = 0
    for (window, gamma), timing, (rule, temperature) in combined(
        WINDOWS, TIMINGS[:3], [("coupled", 1.0), ("ratio", 0.0)]
    ):
        outcome = decode(RequestOptions(method, window, gamma, rule), timing, temperature=temperature)
        assert outcome.tokens == plain(5, temperature), (window, gamma, rule, timing.seed)
        accepted += outcome.counts.accepted
    assert accepted > 0


def test_the_simulation_overlaps_what_pearl_overlaps() -> None:
    """PEARL is faster than alternation, and each ablation lies between - or the simulator compares nothing."""
    seconds = {method: decode(RequestOptions(method, "fixed", 4), TIMINGS[0]).seconds for method in METHODS}
    for between in ("pearl-no-post-verify", "pearl-no-pre-verify", "sd"):
        assert seconds["pearl"] < seconds[between] < seconds["ar"]


SAMPLINGS = {
    "greedy": Sampling(0.0),
    "sampled": Sampling(1.0, seed=5),
    "nucleus": Sampling(0.7, 20, 0.9, seed=5),
}
SLOW = {("ratio", "greedy"), ("coupled", "nucleus")}


@pytest.mark.parametrize(
    ("rule", "name"),
    [pytest.param(*one, marks=[pytest.mark.long] * (one in SLOW)) for one in product(("ratio", "coupled"), SAMPLINGS)],
)
def test_a_pair_of_coins_has_its_rate_under_every_rule(rule: str, name: str) -> None:
    """Of 4,000 positions judged: four standard deviations are 0.019."""
    target, draft = coin_pair(64, 0.9)
    executors = paired_executors(ToyRunner(64, target), ToyRunner(64, draft))
    decoding = RequestOptions("pearl", "fixed", 4, rule, sampling=SAMPLINGS[name])
    counts = simulate(Submit(1, PROMPT, 4000, decoding), *executors, TIMINGS[0]).counts
    assert counts.judged > 3900
    assert counts.accepted / counts.judged == pytest.approx(0.9, abs=0.019)


# ---- look-ahead, lookup and branches on models ----

KINDS = ["llama", "qwen3", "gpt2"]
MORE = ["llama-biased", "llama-tied", "llama-long", "mistral", "qwen2", "opt", "bloom", "gpt-neox"]
OURS = ("llama", "mistral", "qwen")


@cache
def pair(kind: str) -> tuple[ModelRunner, ModelRunner]:
    """A target and a draft that is often right."""
    spare = 5 if kind.startswith(OURS) else 0
    target, draft = (
        load_runner(str(tiny_model(kind, noise=noise)), device=torch.device("cpu"), dtype="float32", spare=spare)
        for noise in (0.0, 0.05)
    )
    return target, draft


def decode_model(kind: str, decoding: RequestOptions, timing: Timing) -> Outcome:
    for runner in pair(kind):
        for slot in range(runner.capabilities.slots):
            runner.rollback(0, slot)
    prompt = (5, 9, 40, 7, 12, 33) * 4
    return simulate(Submit(1, prompt, len(prompt) + 24, decoding), *paired_executors(*pair(kind)), timing)


@combined
@pytest.mark.parametrize(("rule", "temperature"), [("coupled", 0.0), ("coupled", 0.8), ("ratio", 0.8)])
@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.long) for kind in MORE)])
def test_all_that_guesses_writes_one_text(kind: str, rule: str, temperature: float, combined: Any) -> None:
    """Look-ahead, lookup and branches, with either window, and whatever forwards and messages take."""
    plain = RequestOptions("pearl", "fixed", 3, rule, sampling=Sampling(temperature, top_k=5, seed=8))
    expected, seen = decode_model(kind, plain, TIMINGS[0]).tokens, Odds()
    for ahead, lookup, branches, window, timing in combined((0, 8), (0, 4), (0, 4), ("stream", "fixed"), TIMINGS[:3]):
        guessing = plain.changed(look_ahead=ahead, draft_lookup=lookup, branches=branches, window=window)
        outcome = decode_model(kind, guessing, timing)
        assert (outcome.tokens, outcome.counts.resyncs) == (expected, 0), guessing
        seen += outcome.counts.odds or Odds()
    assert (seen.rejections > 0) == (rule == "ratio")
