"""Closed forms of the papers against the real coordinator and drafter under the virtual clock.

Luck comes from a workload; for rejections, from models whose distributions are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from pearl.lab import theory
from pearl.lab.experiments.workload import Coin, Totals, independent, run
from pearl.lab.simulate import CoinTarget, Executor, Timing, paired_executors, simulate
from pearl.models.runner import ModelRunner
from pearl.models.toy import ToyRunner
from pearl.protocol.messages import Provenance, Submit
from pearl.protocol.options import RequestOptions, Sampling
from tests.rejection_theory import expected_rejections

CLOSE = 0.01  # largest relative difference between a simulation and its closed form
Pair = Callable[[ModelRunner, ModelRunner], tuple[Executor, Executor]]

_FORMS = {
    "pearl": theory.pearl_improvement,
    "pearl-no-pre-verify": theory.no_pre_verify_improvement,
    "pearl-no-post-verify": theory.no_post_verify_improvement,
}
_TEXTS = 20  # of a workload: so that a rate of .8 or .9 is met exactly at every position
_VOCAB = 8  # of the Markov chains


@dataclass(frozen=True)
class Check:
    """A closed form and its simulation. `exact`: they must be equal, not within `CLOSE`. `note`: a remark to print."""

    claim: str
    setting: str
    closed: float
    simulated: float
    exact: bool = False
    note: str = ""

    @property
    def difference(self) -> float:
        return self.simulated / self.closed - 1

    @property
    def passed(self) -> bool:
        return self.simulated == self.closed if self.exact else abs(self.difference) <= CLOSE


def checks(
    tokens: int = 20_000, seed: int = 0, coin: Coin = CoinTarget, pair: Pair = paired_executors
) -> Iterator[Check]:
    """All checks, each as it is done; the search for the best windows, which takes longest, comes last.

    Args:
        tokens: about the tokens of each simulation; a tenth for each window of the search.
        coin, pair: executors; tests pass wrong ones.
    """
    for a, c in ((0.8, 5), (0.9, 5), (0.6, 3)):
        yield from pearl_yield(a, c, tokens, seed, coin)
    for a, window, ratio in ((0.8, 3, 5), (0.8, 5, 5), (0.9, 6, 4)):
        for method, form in _FORMS.items():
            yield speed(method, form(a, window, ratio), a, window, ratio, tokens, seed, coin)
    for a, gamma, ratio in ((0.8, 4, 5), (0.9, 7, 5), (0.6, 2, 3)):
        yield from sd_yield(a, gamma, ratio, tokens, seed, coin)
    for chain in (0, 1):
        yield rejections(chain, tokens // 2, seed, pair)
    for a, c in ((0.6, 3), (0.7, 10), (0.8, 5), (0.9, 8)):
        yield best_window(a, c, tokens // 10, seed, coin)


def _run(method: str, a: float, window: int, ratio: int, tokens: int, seed: int, coin: Coin) -> Totals:
    """Simulate a fixed window with t_draft 1."""
    workload = independent(Timing(1.0, lambda _: float(ratio)), a, _TEXTS, max(1, tokens // _TEXTS), seed)
    return run(workload, RequestOptions(method, "fixed", window), coin)


def speed(
    method: str, closed: float, a: float, window: int, ratio: int, tokens: int, seed: int, coin: Coin = CoinTarget
) -> Check:
    """Speed of a method with any fixed window, or of sd with a gamma."""
    done = _run(method, a, window, ratio, tokens, seed, coin)
    setting = f"a {a}, {'gamma ' if method == 'sd' else 'window '}{window}, t_target/t_draft {ratio}"
    return Check(f"{method}: times as fast as ar", setting, closed, done.tokens_per_second * ratio)


def best_window(a: float, c: int, tokens: int, seed: int, coin: Coin = CoinTarget) -> Check:
    """The best fixed window of 1 to twice the speed ratio `c`, found by trying all."""
    windows = range(1, 2 * c + 1)
    rates = {window: _run("pearl", a, window, c, tokens, seed, coin).tokens_per_second for window in windows}
    found = max(rates, key=lambda window: rates[window])
    near = max(rate for window, rate in rates.items() if window != found)
    note = f"{rates[found] / near - 1:.1%} faster than the next best of 1 to {2 * c}"
    return Check("PEARL, theorem 1: best window", f"a {a}, t_target/t_draft {c}", float(c), found, True, note)


def pearl_yield(a: float, c: int, tokens: int, seed: int, coin: Coin = CoinTarget) -> Iterator[Check]:
    """Tokens per step, speed and run lengths of a fixed window at the speed ratio."""
    done, setting = _run("pearl", a, c, c, tokens, seed, coin), f"a {a}, fixed({c})"
    closed = theory.pearl_tokens_per_step(a, c)
    yield Check("PEARL: tokens a target step", setting, closed, done.tokens_per_step)
    yield Check("PEARL: times as fast as ar", setting, closed, done.tokens_per_second * c)
    accepted, committed = a / (1 - a), theory.run_committed(a)
    simulated = done.accepted_per_run or 0.0
    yield Check("PEARL, theorem 2: accepted a run", setting, accepted, simulated)
    note = f"committed, with one more as some state it: {committed + 1:.3f}; simulated {simulated + 2:.3f}"
    yield Check("PEARL, theorem 2: committed a run", setting, committed, simulated + 1, note=note)


def sd_yield(a: float, gamma: int, ratio: int, tokens: int, seed: int, coin: Coin = CoinTarget) -> Iterator[Check]:
    """Tokens per step and speed of `sd`, after Leviathan et al."""
    done, closed = _run("sd", a, gamma, ratio, tokens, seed, coin), theory.sd_tokens_per_step(a, gamma)
    yield Check("sd: tokens a target step", f"a {a}, gamma {gamma}", closed, done.tokens_per_step)
    yield speed("sd", theory.sd_improvement(a, gamma, 1 / ratio), a, gamma, ratio, tokens, seed, coin)


def rejections(chain: int, tokens: int, seed: int, pair: Pair = paired_executors) -> Check:
    """Rejections of a pair of Markov chains, over texts of its own."""
    torch.set_num_threads(1)  # with eight tokens more threads only wait for each other
    target, draft = _markov_chain(2 * chain), _markov_chain(2 * chain + 1)
    expected, counted, each = 0.0, 0, max(1, tokens // _TEXTS)
    for text in range(_TEXTS):
        runners = [ToyRunner(_VOCAB, partial(_next, rows)) for rows in (target, draft)]
        sampling = Sampling(1.0, seed=seed * _TEXTS + text)
        submit = Submit(text, (0,), 1 + each, RequestOptions("pearl", "fixed", 2, sampling=sampling))
        outcome = simulate(submit, *pair(runners[0], runners[1]), Timing(1.0, lambda _: 2.0))
        counted += outcome.counts.provenance[Provenance.CORRECTED]
        expected += expected_rejections([target.tolist()] * each, [draft.tolist()] * each, 0)
    setting = f"pair {chain} of Markov chains, {_TEXTS * each} tokens"
    return Check("Yin et al., theorem 1: sum of TV", setting, expected, counted)


def _next(rows: torch.Tensor, context: Sequence[int]) -> torch.Tensor:
    return rows[context[-1]]


def _markov_chain(seed: int) -> torch.Tensor:
    """[8, 8]: row s is the distribution after token s. Rows of two chains have distances of 0.4 to 0.95."""
    weights = torch.rand(_VOCAB, _VOCAB, generator=torch.Generator().manual_seed(seed)) ** 4 + 1e-3
    return weights / weights.sum(1, keepdim=True)
