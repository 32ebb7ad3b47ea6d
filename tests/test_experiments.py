"""The closed forms against the simulator; workloads; intervals; the command."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
from click.testing import CliRunner

from pearl.cli import cli
from pearl.lab import theory
from pearl.lab.experiments.estimate import Estimate, bootstrap
from pearl.lab.experiments.workload import independent, run
from pearl.lab.simulate import Timing
from pearl.protocol.options import RequestOptions
from pearl.protocol.window import expected_rate

STEADY = Timing(1.0, lambda _: 5.0)
STREAM, FIXED = RequestOptions("pearl", "stream"), RequestOptions("pearl", "fixed")


# ---- theory ----


def pearl_improvement(a: float, window: int, ratio: float) -> float:
    """Speed-up over the target alone with any fixed window.

    A step lasts as long as a target forward; after a full acceptance, until the next window is drafted if that is
    later.

    Args:
        ratio: t_target / t_draft, at least 1.

    Source: the chain of `pearl_tokens_per_step`.
    """
    post = a / (1 + a - a**window)
    late = max(window / ratio - 1, 0.0)  # by how much drafting a window outlasts a target forward
    return theory.pearl_tokens_per_step(a, window) / (1 + late * ((1 - post) * a + post * a**window))


def no_pre_verify_improvement(a: float, window: int, ratio: float) -> float:
    """`pearl_improvement` without pre-verify. Source: renewals at corrections.

    After a correction the target waits for a whole window and verifies it with the token behind it; then each step
    verifies one window, until a token is rejected.
    """
    late = max(window / ratio - 1, 0.0)
    if a == 1:
        return window / (1 + late)
    again = a ** (window + 1) / (1 - a**window)  # steps of a renewal after its first
    tokens = theory.geometric(a, window + 1) + again * theory.geometric(a, window)
    seconds = window / ratio + 1 + late * a ** (window + 1) + again * (1 + late * a**window)
    return tokens / seconds


def no_post_verify_improvement(a: float, window: int, ratio: float) -> float:
    """`pearl_improvement` without post-verify. Source: renewals, each with a pre-verify.

    If that accepts, the target waits until the window is full, verifies the rest and draws a bonus token.
    """
    tokens = 1 + a * theory.geometric(a, window)
    return tokens / (1 - a + a * (max(window / ratio, 1.0) + 1))


FORMS: dict[str, Callable[[float, int, float], float]] = {  # of acceptance, window and speed ratio
    "sd": lambda a, window, ratio: theory.sd_improvement(a, window, 1 / ratio),
    "pearl": pearl_improvement,
    "pearl-no-pre-verify": no_pre_verify_improvement,
    "pearl-no-post-verify": no_post_verify_improvement,
}


@pytest.mark.parametrize(("method", "window", "a"), [*product(FORMS, [5], [0.8]), ("sd", 3, 0.4), ("pearl", 3, 0.4)])
def test_any_window_is_as_fast_as_its_closed_form(method: str, window: int, a: float) -> None:
    """Within a hundredth. And so are tokens a step, of sd as Leviathan et al. have it, and runs, by theorem 2."""
    found = run(independent(a, 20, 1000, 1), STEADY, RequestOptions(method, "fixed", window))
    assert found.tokens_per_second * 5 == pytest.approx(FORMS[method](a, window, 5), rel=0.01)
    if method == "sd":
        assert found.tokens_per_step == pytest.approx(theory.sd_tokens_per_step(a, window), rel=0.01)
    if (method, window) == ("pearl", 5):
        assert found.tokens_per_step == pytest.approx(theory.pearl_tokens_per_step(a, 5), rel=0.01)
        assert found.tokens_per_step == pytest.approx(2.28, rel=0.01) or a != 0.8, "as the paper states"
        assert found.accepted_per_run == pytest.approx(a / (1 - a), rel=0.01)
        assert expected_rate(5, a, 1.0, 5.0, 5.0) == pytest.approx(theory.pearl_tokens_per_step(a, 5) / 5)
    assert theory.pearl_tokens_per_step(1.0, window) == theory.sd_tokens_per_step(1.0, window - 1) == window


def test_the_papers_other_forms() -> None:
    """Run lengths are those of a geometric distribution; no gamma is better than the best."""
    assert theory.run_committed(0.8) == pytest.approx(1 + sum(n * 0.8**n * 0.2 for n in range(500)))
    for a, ratio in product((0.3, 0.6, 0.8, 0.95), (1, 3, 5, 10)):
        best = theory.sd_best_gamma(a, 1.0, lambda _, ratio=ratio: ratio)  # type: ignore[misc]
        every = [theory.sd_improvement(a, gamma, 1 / ratio) for gamma in range(1, 40)]
        assert theory.sd_improvement(a, best, 1 / ratio) == pytest.approx(max(every))
    assert theory.sd_best_gamma(0.8, 1.0, lambda _: 5.0) == 4
    assert theory.sd_best_gamma(0.8, 1.0, lambda n: 5.0 * n) == 1  # no use in feeding many


# ---- workloads ----


def test_every_method_meets_the_same_luck() -> None:
    """Where every position is judged, as many draft tokens are right by any window and delay."""
    texts = independent(0.7, 4, 300)
    expected = sum(sum(text.right) for text in texts)
    for decoding in (STREAM, FIXED, RequestOptions("pearl", "fixed", 2), RequestOptions("pearl-no-pre-verify")):
        for timing in ({}, {"delay": 2.0}, {"jitter": 0.4}):
            done = run(texts, replace(STEADY, **timing), decoding)
            sums = [done.total(f"num_{kind}_draft_tokens") for kind in ("judged", "accepted")]
            assert sums == [1200, expected]


def test_an_interval_holds_its_statistic_and_covers_the_truth() -> None:
    """95% intervals of 200 samples, deterministic."""
    found = bootstrap([1.0, 2.0, 4.0, 8.0, 16.0])
    assert (found.value, found) == (4.0, bootstrap([1.0, 2.0, 4.0, 8.0, 16.0]))
    assert 1 <= found.low < 4 < found.high <= 16
    assert bootstrap([3.0]) == Estimate(3.0, 3.0, 3.0)
    noise = random.Random(1)
    samples = [[noise.gauss(10, 1) for _ in range(25)] for _ in range(200)]
    intervals = [bootstrap(sample, resamples=400) for sample in samples]
    assert sum(one.low <= 10 <= one.high for one in intervals) in range(180, 201)


# ---- the command ----


@pytest.mark.parametrize("times", ["5:", "1:5,1:6", "0:5", "nan"])
def test_times_that_make_no_sense_are_refused(times: str) -> None:
    result = CliRunner().invoke(cli, ["simulate", "stops", "it.npz", "--t-target", times])
    assert result.exit_code == 2
    assert "tokens fed:milliseconds" in result.output
