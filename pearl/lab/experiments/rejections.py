"""How often rules reject, and by how much their texts are biased: what theory expects, and what the protocol does.

On pairs of non-stationary Markov chains, of which every distribution is known: the distribution of a token depends on
its position and on the token before it.  The texts are decoded by the real coordinator and drafter with the rules' own
halves.  Source: Yin et al. 2024, figures 2 to 4; they do not print their chains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import mean, stdev
from typing import Any

import torch

from pearl.lab import theory
from pearl.lab.experiments.estimate import Estimate
from pearl.lab.simulate import Timing, paired_executors, simulate
from pearl.models.toy import NextToken, ToyRunner
from pearl.protocol.messages import Submit
from pearl.protocol.options import RequestOptions, Sampling
from pearl.spec.rules import RULES, Parameters

TOKENS, VOCAB = 50, 8  # of a text; of the chains
CANDIDATES = (1, 2, 4, 8)
EPSILONS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
_MANY = 2000  # candidates: more change nothing that is shown
_SHARE = (0.6, 0.85)  # of each chain's draft: how much of it is its target
_WINDOW = 2
_NONE = 3.0  # of n texts none had any: at 95% they have at most 3 / n on average


@dataclass(frozen=True)
class Chain:
    """A pair of models: [tokens, vocab, vocab] each; row s of a table is the distribution after token s."""

    name: str
    target: torch.Tensor
    draft: torch.Tensor


@dataclass(frozen=True)
class Rejections:
    """Of a text on average, by one rule on one chain: what theory expects, and what was measured, with 95% margins.

    `bias`: the sum of the distances of what is committed from the target's distribution.
    """

    chain: str
    rule: str
    parameters: Parameters
    expected: float
    measured: Estimate
    bias: float
    measured_bias: Estimate

    @property
    def label(self) -> str:
        values = ", ".join(f"{name} {value:g}" for name, value in self.parameters)
        return RULES[self.rule].label + (f", {values}" if values else "")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def chains(seed: int = 0) -> list[Chain]:
    """Two pairs: of the second one the draft is the better."""
    return [_chain(2 * seed + number, share) for number, share in enumerate(_SHARE)]


def _chain(seed: int, share: float) -> Chain:
    generator = torch.Generator().manual_seed(seed)
    tables = torch.rand(2, TOKENS, VOCAB, VOCAB, generator=generator) ** 4 + 1e-3
    target, other = tables / tables.sum(-1, keepdim=True)
    return Chain(f"chain {seed % 2 + 1}", target, share * target + (1 - share) * other)


def limit(chain: Chain) -> float:
    """Rejections with any number of candidates: behind a token that was accepted there is but one."""
    return theory.expected_batch_rejections(chain.target.tolist(), chain.draft.tolist(), 0, _MANY)


def rejections(texts: int, seed: int = 0, tell: Callable[[str], None] = lambda what: None) -> Iterator[Rejections]:
    """For both chains each rule, in `texts` texts of `TOKENS` tokens."""
    for chain in chains(seed):
        for rule, parameters in _rules():
            one = measured(chain, rule, parameters, texts, seed)
            tell(f"{one.chain}, {one.label}")
            yield one


def _rules() -> Iterator[tuple[str, Parameters]]:
    yield "ratio", ()
    for count in CANDIDATES:
        yield "batch", (("candidates", float(count)),)
    for rule in ("opt", "uno"):
        for epsilon in EPSILONS:
            yield rule, (("epsilon", epsilon),)


def measured(chain: Chain, rule: str, parameters: Parameters, texts: int, seed: int = 0) -> Rejections:
    """One rule on one chain."""
    found, biases = list[float](), list[float]()
    for text in range(texts):
        target, draft = (ToyRunner(VOCAB, _distribution(tables)) for tables in (chain.target, chain.draft))
        decoding = RequestOptions("pearl", "fixed", _WINDOW, rule, parameters)
        submit = Submit(text, (0,), 1 + TOKENS, decoding.changed(sampling=Sampling(1.0, seed=seed * texts + text)))
        counts = simulate(submit, *paired_executors(target, draft), Timing(1.0, lambda _: float(_WINDOW))).counts
        assert counts.odds is not None
        found.append(float(counts.rejected))
        biases.append(counts.odds.bias)
    return Rejections(chain.name, rule, parameters, *_expected(chain, rule, parameters, found, biases))


def _expected(
    chain: Chain, rule: str, parameters: Parameters, found: Sequence[float], biases: Sequence[float]
) -> tuple[float, Estimate, float, Estimate]:
    values, tables = RULES[rule].values(parameters), (chain.target.tolist(), chain.draft.tolist(), 0)
    if rule == "batch":
        expected, bias = theory.expected_batch_rejections(*tables, int(values["candidates"])), 0.0
    else:
        expected, bias = theory.expected_relaxed_rejections(*tables, values.get("epsilon", 0.0), rule != "uno")
    return expected, _mean(found, _NONE / len(found)), bias, _mean(biases)


def _mean(values: Sequence[float], least: float = 0.0) -> Estimate:
    """`least`: of its margin."""
    return Estimate(mean(values), max(least, 1.96 * stdev(values) / sqrt(len(values))))


def _distribution(tables: torch.Tensor) -> NextToken:
    last = len(tables) - 1  # a draft goes on behind the text's end
    return lambda seen: tables[min(len(seen) - 1, last)][seen[-1]]
