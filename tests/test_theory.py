"""The closed forms by themselves: against enumeration, against a chain run step by step, against what they state."""

from __future__ import annotations

from itertools import product

import pytest

from pearl.lab import theory
from pearl.protocol.window import expected_rate

RATES = [0.0, 0.3, 0.6, 0.8, 0.9, 1.0]


@pytest.mark.parametrize("a", RATES)
@pytest.mark.parametrize("gamma", [1, 4, 7])
def test_sd_yields_what_enumeration_does(a: float, gamma: int) -> None:
    """Over every outcome of gamma judgements: the tokens before the first rejection, and one more."""
    expected = 0.0
    for rights in product((True, False), repeat=gamma):
        chance = 1.0
        for right in rights:
            chance *= a if right else 1 - a
        expected += chance * (1 + (rights.index(False) if False in rights else gamma))
    assert theory.sd_tokens_per_step(a, gamma) == pytest.approx(expected)
    assert theory.sd_improvement(a, gamma, 0.2) == pytest.approx(expected / (1 + 0.2 * gamma))


@pytest.mark.parametrize("a", RATES)
@pytest.mark.parametrize("c", [1, 2, 5, 9])
def test_pearl_yields_what_its_chain_does(a: float, c: int) -> None:
    """Phase after phase from a pre-verify on, until the shares have settled."""
    post, shares = 0.0, []
    for _ in range(3000):
        shares.append(post)
        post = (1 - post) * a + post * a**c
    settled = sum(shares[1000:]) / 2000  # with a = 1, c = 1 they swing
    expected = 1 - settled + settled * theory.geometric(a, c)
    assert theory.pearl_tokens_per_step(a, c) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("a", [0.3, 0.8, 0.9])
def test_at_the_speed_ratio_it_is_the_rate_that_the_runtime_expects(a: float) -> None:
    assert expected_rate(5, a, 1.0, 5.0, 5.0) == pytest.approx(theory.pearl_tokens_per_step(a, 5) / 5)


def test_run_lengths_are_a_geometric_distributions() -> None:
    a = 0.8
    assert theory.run_committed(a) == pytest.approx(1 + sum(n * a**n * (1 - a) for n in range(500)))


def test_best_gamma_is_no_worse_than_any_other() -> None:
    for a, ratio in product((0.3, 0.6, 0.8, 0.95), (1, 3, 5, 10)):
        best = theory.sd_best_gamma(a, 1.0, lambda _, ratio=ratio: ratio)  # type: ignore[misc]
        every = [theory.sd_improvement(a, gamma, 1 / ratio) for gamma in range(1, 40)]
        assert theory.sd_improvement(a, best, 1 / ratio) == pytest.approx(max(every))
    assert theory.sd_best_gamma(0.8, 1.0, lambda _: 5.0) == 4
    assert theory.sd_best_gamma(0.8, 1.0, lambda _: 5.0, delay=10.0) > 4  # a dear message is worth more tokens
    assert theory.sd_best_gamma(0.8, 1.0, lambda n: 5.0 * n) == 1  # no use in feeding many
