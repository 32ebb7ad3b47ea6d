"""Pairs of non-stationary Markov chains, whose distributions are all known (Yin et al. 2024, figures 2 to 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev
from typing import NamedTuple

import torch

from pearl.lab.experiments.estimate import Estimate, about
from pearl.lab.simulate import Timing, paired_executors, simulate
from pearl.models.toy import NextToken, ToyRunner
from pearl.protocol.messages import Submit
from pearl.protocol.options import RequestOptions, Sampling
from pearl.spec.rules import RULES, Parameters
from tests.rejection_theory import expected_batch_rejections, expected_relaxed_rejections

TOKENS, VOCAB = 50, 8  # of a text; of the chains
_SHARE = (0.6, 0.85)  # of each chain's draft: weight of the target in it
_WINDOW = 2
_NONE = 3.0  # if n texts have no rejection, the mean is at most 3 / n (95%)


class Chain(NamedTuple):
    """A pair of models: [tokens, vocab, vocab] each; row s of a table is the distribution after token s."""

    name: str
    target: torch.Tensor
    draft: torch.Tensor


@dataclass(frozen=True)
class Rejections:
    """Means per text of one rule on one chain: what theory expects, and what was measured.

    Attributes:
        bias: sum over positions of the distance between the committed token's distribution and the target's.
    """

    chain: str
    rule: str
    parameters: Parameters
    expected: float
    measured: Estimate
    bias: float
    measured_bias: Estimate


def chains(seed: int = 0) -> list[Chain]:
    """Two pairs; the second has the better draft."""
    return [_chain(2 * seed + number, share) for number, share in enumerate(_SHARE)]


def _chain(seed: int, share: float) -> Chain:
    generator = torch.Generator().manual_seed(seed)
    tables = torch.rand(2, TOKENS, VOCAB, VOCAB, generator=generator) ** 4 + 1e-3
    target, other = tables / tables.sum(-1, keepdim=True)
    return Chain(f"chain {seed % 2 + 1}", target, share * target + (1 - share) * other)


def measured(chain: Chain, rule: str, parameters: Parameters, texts: int, seed: int = 0) -> Rejections:
    """One rule on one chain."""
    found, biases = list[float](), list[float]()
    for text in range(texts):
        target, draft = (ToyRunner(VOCAB, _distribution(tables)) for tables in (chain.target, chain.draft))
        sampling = Sampling(1.0, seed=seed * texts + text)
        decoding = RequestOptions("pearl", "fixed", _WINDOW, rule, parameters, sampling=sampling)
        executors, timing = paired_executors(target, draft), Timing(1.0, lambda _: float(_WINDOW))
        counts = simulate(Submit(1, (0,), 1 + TOKENS, decoding), *executors, timing).counts
        assert counts.odds is not None
        found.append(float(counts.rejected))
        biases.append(counts.odds.bias)
    values, tables = RULES[rule].values(parameters), (chain.target.tolist(), chain.draft.tolist(), 0)
    if rule == "batch":
        expected, bias = expected_batch_rejections(*tables, int(values["candidates"])), 0.0
    else:
        expected, bias = expected_relaxed_rejections(*tables, values.get("epsilon", 0.0), rule != "uno")
    own = mean_of(found, _NONE / len(found))
    return Rejections(chain.name, rule, parameters, expected, own, bias, mean_of(biases))


def _distribution(tables: torch.Tensor) -> NextToken:
    last = len(tables) - 1  # a draft drafts beyond the end of the text
    return lambda context: tables[min(len(context) - 1, last)][context[-1]]


def mean_of(values: Sequence[float], least: float = 0.0) -> Estimate:
    """The mean of independent values. `least`: lower bound of the margin."""
    return about(mean(values), max(least, 1.96 * stdev(values) / sqrt(len(values))))
