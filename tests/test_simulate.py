"""Under the virtual clock the text is a function of what should decide it, and of nothing else (invariants 3 and 5)."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from pearl.lab.simulate import Outcome, Timing, paired_executors, simulate
from pearl.models.toy import ToyRunner, alpha_pair, coin_pair
from pearl.protocol.messages import Submit
from pearl.protocol.options import RequestOptions, Sampling
from pearl.spec.methods import METHODS
from tests.replace import replace

VOCAB = 12
TOKENS = 60
PROMPT = (1, 2, 3)
DRAFTING = [name for name, method in METHODS.items() if method.drafts]
WINDOWS = [("stream", None), ("fixed", 1), ("fixed", 2), ("fixed", 7)]
TIMINGS = [
    Timing(1.0, lambda _: 4.0),
    Timing(1.0, lambda n: 2.0 + 0.3 * n, delay=0.7, jitter=0.5, seed=1),
    Timing(1.0, lambda _: 0.5, delay=3.0, jitter=0.9, seed=2),
    Timing(1.0, lambda _: 9.0, delay=0.01, jitter=0.3, seed=3),
]


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


@pytest.mark.parametrize("method", ["pearl", "pearl-no-pre-verify"])
@pytest.mark.parametrize("seed", [5, 6])
def test_sampled_text_is_a_function_of_the_seed(method: str, seed: int) -> None:
    """Not of window, timing, delay or policy - while draws in sequence would make it one of all four."""
    expected = decode(RequestOptions(), TIMINGS[0], seed).tokens
    for (window, gamma), timing in product(WINDOWS, TIMINGS):
        assert decode(RequestOptions(method, window, gamma), timing, seed).tokens == expected, (
            window,
            gamma,
            timing.seed,
        )


def test_another_seed_or_sample_is_another_text() -> None:
    texts = {tuple(decode(RequestOptions(), TIMINGS[0], seed).tokens) for seed in range(5)}
    assert len(texts) == 5


@pytest.mark.parametrize("method", DRAFTING)
def test_coupled_is_plain_seeded_decoding(method: str) -> None:
    """Whatever the draft does: the target's draw is always what is committed."""
    for (window, gamma), timing in product(WINDOWS, TIMINGS[:3]):
        outcome = decode(RequestOptions(method, window, gamma, "coupled"), timing)
        assert outcome.tokens == plain(5, 1.0), (window, gamma, timing.seed)
    assert outcome.counts.accepted > 0


@pytest.mark.parametrize("method", DRAFTING)
def test_greedy_is_plain_greedy_decoding(method: str) -> None:
    for (window, gamma), timing in product(WINDOWS, TIMINGS[:3]):
        outcome = decode(RequestOptions(method, window, gamma), timing, temperature=0.0)
        assert outcome.tokens == plain(5, 0.0), (window, gamma, timing.seed)


@pytest.mark.parametrize("method", DRAFTING)
def test_a_shorter_draft_context_changes_no_greedy_text(method: str) -> None:
    """Crossed amid a window; and one that the prompt has filled already."""
    for window, gamma in WINDOWS:
        for context in range(1, len(PROMPT) + 12, 2):
            decoding = RequestOptions(method, window, gamma)
            outcome = decode(decoding, TIMINGS[1], temperature=0.0, draft_context=context)
            assert outcome.tokens == plain(5, 0.0), (window, gamma, context)
            assert outcome.counts.drafted == 0 or context > len(PROMPT)


def test_the_simulation_overlaps_what_pearl_overlaps() -> None:
    """PEARL is faster than alternation, and each ablation lies between - or the simulator compares nothing."""
    seconds = {method: decode(RequestOptions(method, "fixed", 4), TIMINGS[0]).seconds for method in METHODS}
    assert seconds["pearl"] < seconds["pearl-no-post-verify"] < seconds["ar"]
    assert seconds["pearl"] < seconds["pearl-no-pre-verify"] < seconds["ar"]
    assert seconds["pearl"] < seconds["sd"] < seconds["ar"]


@pytest.mark.parametrize("rule", ["ratio", "coupled"])
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0, seed=5), Sampling(0.7, 20, 0.9, seed=5)], ids=str)
def test_a_pair_of_coins_has_its_rate_under_every_rule(rule: str, sampling: Sampling) -> None:
    """Of 4,000 positions judged: four standard deviations are 0.019."""
    target, draft = coin_pair(64, 0.9)
    executors = paired_executors(ToyRunner(64, target), ToyRunner(64, draft))
    decoding = RequestOptions("pearl", "fixed", 4, rule)
    counts = simulate(Submit(1, PROMPT, 4000, replace(decoding, sampling=sampling)), *executors, TIMINGS[0]).counts
    assert counts.judged > 3900
    assert counts.accepted / counts.judged == pytest.approx(0.9, abs=0.019)
