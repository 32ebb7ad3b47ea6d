"""Look-ahead, lookup and branches, alone and together, change no text of a model: invariant 10 of the design.

Toys are in tests/test_branches.py, whole engines with a draft that is killed in tests/test_exactness.py. And rejections
of tiny models are as many as their distributions say.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

from pearl.lab.simulate import Outcome, Timing, paired_executors, simulate
from pearl.models.loading import load_runner
from pearl.models.runner import ModelRunner
from pearl.protocol.events import Odds
from pearl.protocol.messages import Submit
from pearl.protocol.options import RequestOptions, Sampling
from tests.replace import replace
from tests.tiny import tiny_model

OURS = ("llama", "llama-biased", "llama-tied", "llama-long", "mistral", "qwen2", "qwen3")
GENERAL = ("gpt2", "opt", "bloom", "gpt-neox")
NEAR = ("llama", "qwen3", "gpt2")  # the others run with all tests
SAMPLINGS = [("coupled", 0.0), ("coupled", 0.8), ("ratio", 0.8)]
PROMPT = (5, 9, 40, 7, 12, 33) * 4
TIMINGS = [
    Timing(1.0, lambda _: 4.0),
    Timing(1.0, lambda n: 2.0 + 0.3 * n, delay=0.7, jitter=0.5, seed=1),
    Timing(1.0, lambda _: 6.0, delay=2.0, jitter=0.9, seed=2),
]
EVERY = list(product((0, 8), (0, 4), (0, 4)))  # look-ahead, lookup, branches


@cache
def pair(kind: str) -> tuple[ModelRunner, ModelRunner]:
    """A target and a draft that is often right."""
    spare = 5 if kind in OURS else 0
    target, draft = (
        load_runner(str(tiny_model(kind, noise=noise)), device=torch.device("cpu"), dtype="float32", spare=spare)
        for noise in (0.0, 0.05)
    )
    return target, draft


def decode(
    kind: str, decoding: RequestOptions, temperature: float, timing: Timing, tokens: int = 24, seed: int = 8
) -> Outcome:
    target, draft = pair(kind)
    for runner in (target, draft):
        for slot in range(runner.capabilities.slots):
            runner.rollback(0, slot)
    submit = Submit(
        1, PROMPT, len(PROMPT) + tokens, replace(decoding, sampling=Sampling(temperature, top_k=5, seed=seed))
    )
    return simulate(submit, *paired_executors(target, draft), timing)


@pytest.mark.parametrize(("rule", "temperature"), SAMPLINGS)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind not in NEAR)) for kind in OURS + GENERAL]
)
def test_all_combinations_write_one_text(kind: str, rule: str, temperature: float) -> None:
    """With either window, and whatever forwards and messages take."""
    plain = decode(kind, RequestOptions("pearl", "fixed", 3, rule), temperature, TIMINGS[0])
    seen = Odds()
    for number, (extras, window) in enumerate(product(EVERY, ("stream", "fixed"))):
        decoding = RequestOptions("pearl", window, 3, rule, (), *extras)
        outcome = decode(kind, decoding, temperature, TIMINGS[number % len(TIMINGS)])
        assert outcome.tokens == plain.tokens, (extras, window)
        assert outcome.counts.resyncs == 0
        seen += outcome.counts.odds or Odds()
    assert (seen.rejections > 0) == (rule == "ratio")


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_as_many_are_rejected_as_the_models_distributions_say(kind: str) -> None:
    """Theorem 1 of Yin et al. at every position that was judged."""
    found, odds = 0, Odds()
    for seed in range(8):
        counts = decode(kind, RequestOptions("pearl", "stream", 3, "ratio"), 1.5, TIMINGS[0], 60, seed).counts
        assert counts.odds is not None
        found, odds = found + counts.rejected, odds + counts.odds
    assert odds.variance > 4, "too little was in doubt to say anything"
    assert abs(found - odds.rejections) < 4 * odds.variance**0.5
