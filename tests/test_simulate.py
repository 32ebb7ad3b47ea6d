"""The virtual clock: how often a draft is right, and texts of models that guess (of toys: test_texts)."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from pearl.lab.simulate import Outcome, Timing, paired_executors, simulate
from pearl.models.checkpoints.loading import load_runner
from pearl.models.runner import ModelRunner
from pearl.models.toy import coin_pair
from pearl.protocol.events import Odds
from pearl.protocol.messages import Submit
from pearl.protocol.options import RequestOptions, Sampling
from tests.pairwise import combined
from tests.tiny import tiny_model
from tests.virtual import TIMINGS, decoded

PROMPT = (1, 2, 3)


SAMPLINGS = {"greedy": Sampling(0.0), "sampled": Sampling(1.0, seed=5), "nucleus": Sampling(0.7, 20, 0.9, seed=5)}
SLOW = {("ratio", "greedy"), ("coupled", "nucleus")}


@pytest.mark.parametrize(
    ("rule", "name"),
    [pytest.param(*one, marks=[pytest.mark.long] * (one in SLOW)) for one in product(("ratio", "coupled"), SAMPLINGS)],
)
def test_a_pair_of_coins_has_its_rate_under_every_rule(rule: str, name: str) -> None:
    """Of 4,000 positions judged: four standard deviations are 0.019."""
    decoding = RequestOptions("pearl", "fixed", 4, rule)
    counts = decoded(coin_pair(64, 0.9), 64, decoding, SAMPLINGS[name], 4000, prompt=(1, 2, 3)).counts
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
