"""How often rules reject, and by how much they bias the text: theory against the protocol (Yin et al. 2024).

`rejections` uses pairs of non-stationary Markov chains, whose distributions are all known (figures 2 to 4; the paper
does not print its chains).  `front` does the same for opt and uno on a pair of models: along texts of the target, where
bias and rejections of opt add up to the distance between the models, and in each rule's own texts, which its bias
changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from pearl.decoding.sampling import probabilities
from pearl.lab import theory
from pearl.lab.experiments.estimate import Estimate, mean_of
from pearl.lab.experiments.texts import rows_along
from pearl.lab.simulate import Outcome, Timing, paired_executors, simulate
from pearl.models.runner import ModelRunner
from pearl.models.toy import NextToken, ToyRunner
from pearl.protocol.messages import Submit
from pearl.protocol.options import RequestOptions, Sampling
from pearl.spec.rules import RULES, Parameters

TOKENS, VOCAB = 50, 8  # of a text; of the chains
CANDIDATES = (1, 2, 4, 8)
EPSILONS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
RELAXED = ("opt", "uno")
_MANY = 200  # candidates: stands for any number; ten times as many change the fourth decimal
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

    @property
    def label(self) -> str:
        values = ", ".join(f"{name} {value:g}" for name, value in self.parameters)
        return RULES[self.rule].label + (f", {values}" if values else "")


@dataclass(frozen=True)
class Price:
    """Means per token of one relaxed rule on a pair of models.

    Attributes:
        expected, bias: along texts of the target.
        measured, measured_bias: in the rule's own texts.
        foretold: rejections that the distributions along the rule's own texts imply; `measured` differs by chance only.
        margin: 1.96 standard deviations of that chance.
    """

    rule: str
    epsilon: float
    expected: float
    bias: float
    measured: Estimate
    measured_bias: Estimate
    foretold: float
    margin: float

    @property
    def is_as_foretold(self) -> bool:
        return abs(self.measured.value - self.foretold) <= self.margin


# ---- Markov chains ----


def chains(seed: int = 0) -> list[Chain]:
    """Two pairs; the second has the better draft."""
    return [_chain(2 * seed + number, share) for number, share in enumerate(_SHARE)]


def _chain(seed: int, share: float) -> Chain:
    generator = torch.Generator().manual_seed(seed)
    tables = torch.rand(2, TOKENS, VOCAB, VOCAB, generator=generator) ** 4 + 1e-3
    target, other = tables / tables.sum(-1, keepdim=True)
    return Chain(f"chain {seed % 2 + 1}", target, share * target + (1 - share) * other)


def limit(chain: Chain) -> float:
    """Rejections of batch with any number of candidates: after an accepted token there is only one."""
    return theory.expected_batch_rejections(chain.target.tolist(), chain.draft.tolist(), 0, _MANY)


def rejections(texts: int, seed: int = 0, tell: Callable[[str], None] = lambda what: None) -> Iterator[Rejections]:
    """Each rule on both chains, in `texts` texts of `TOKENS` tokens."""
    rules: list[tuple[str, Parameters]] = [("ratio", ())]
    rules += [("batch", (("candidates", float(count)),)) for count in CANDIDATES]
    rules += [(rule, (("epsilon", epsilon),)) for rule in RELAXED for epsilon in EPSILONS]
    for chain in chains(seed):
        for rule, parameters in rules:
            one = measured(chain, rule, parameters, texts, seed)
            tell(f"{one.chain}, {one.label}")
            yield one


def measured(chain: Chain, rule: str, parameters: Parameters, texts: int, seed: int = 0) -> Rejections:
    """One rule on one chain."""
    found, biases = list[float](), list[float]()
    for text in range(texts):
        runners = (ToyRunner(VOCAB, _distribution(tables)) for tables in (chain.target, chain.draft))
        sampling = Sampling(1.0, seed=seed * texts + text)
        counts = _decode(next(runners), next(runners), (0,), TOKENS, sampling, rule, parameters).counts
        assert counts.odds is not None
        found.append(float(counts.rejected))
        biases.append(counts.odds.bias)
    values, tables = RULES[rule].values(parameters), (chain.target.tolist(), chain.draft.tolist(), 0)
    if rule == "batch":
        expected, bias = theory.expected_batch_rejections(*tables, int(values["candidates"])), 0.0
    else:
        expected, bias = theory.expected_relaxed_rejections(*tables, values.get("epsilon", 0.0), rule != "uno")
    own = mean_of(found, _NONE / len(found))
    return Rejections(chain.name, rule, parameters, expected, own, bias, mean_of(biases))


def _distribution(tables: torch.Tensor) -> NextToken:
    last = len(tables) - 1  # a draft drafts beyond the end of the text
    return lambda context: tables[min(len(context) - 1, last)][context[-1]]


def _decode(
    target: ModelRunner,
    draft: ModelRunner,
    prompt: Sequence[int],
    tokens: int,
    sampling: Sampling,
    rule: str,
    parameters: Parameters,
) -> Outcome:
    decoding = RequestOptions("pearl", "fixed", _WINDOW, rule, parameters, sampling=sampling)
    submit = Submit(1, tuple(prompt), len(prompt) + tokens, decoding)
    return simulate(submit, *paired_executors(target, draft), Timing(1.0, lambda _: float(_WINDOW)))


# ---- a pair of models ----


@torch.inference_mode()
def front(
    target: ModelRunner,
    draft: ModelRunner,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampling: Sampling,
    tell: Callable[[str], object] = lambda what: None,
) -> Iterator[Price]:
    """The price of each relaxed rule and epsilon; the first is opt with epsilon 0: the exact ratio rule.

    Args:
        prompts: at least two.
        tokens: of each text; an end-of-sequence token does not end it.
        sampling: temperature > 0.
    """
    along: dict[tuple[str, float], tuple[float, float]] = {}
    for rule in RELAXED:
        for epsilon in EPSILONS:
            tell(f"{rule}, epsilon {epsilon:g}")
            runs = []
            for prompt in prompts:
                target.rollback(0)
                draft.rollback(0)
                runs.append(_decode(target, draft, prompt, tokens, sampling, rule, (("epsilon", epsilon),)))
            along = along or prices(target, draft, prompts, [run.tokens for run in runs], sampling)
            yield _priced(rule, epsilon, along[rule, epsilon], runs)


def _priced(rule: str, epsilon: float, along: tuple[float, float], runs: Sequence[Outcome]) -> Price:
    odds = [run.counts.odds for run in runs if run.counts.odds is not None]
    assert len(odds) == len(runs)
    lengths = [len(run.tokens) for run in runs]
    rejected = mean_of([run.counts.rejected / length for run, length in zip(runs, lengths, strict=True)])
    biases = mean_of([one.bias / length for one, length in zip(odds, lengths, strict=True)])
    foretold = sum(one.rejections for one in odds) / sum(lengths)
    margin = 1.96 * sqrt(sum(one.variance for one in odds)) / sum(lengths)
    return Price(rule, epsilon, *along, rejected, biases, foretold, margin)


def prices(
    target: ModelRunner,
    draft: ModelRunner,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    sampling: Sampling,
) -> dict[tuple[str, float], tuple[float, float]]:
    """(rule, epsilon) -> rejections and bias per token of `texts`."""
    sums = {(rule, epsilon): [0.0, 0.0] for rule in RELAXED for epsilon in EPSILONS}
    for prompt, text in zip(prompts, texts, strict=True):
        for rows, given in zip(rows_along(target, prompt, text), rows_along(draft, prompt, text), strict=True):
            given = pad(given, (0, max(0, rows.shape[-1] - given.shape[-1])), value=-torch.inf)[:, : rows.shape[-1]]
            p, q = probabilities(rows, sampling).double(), probabilities(given, sampling).double()
            for (rule, epsilon), sum_ in sums.items():
                rejected, bias = relaxed(p, q, epsilon, corrects=rule == "opt")
                sum_[0] += float(rejected.sum())
                sum_[1] += float(bias.sum())
    count = sum(map(len, texts))
    return {key: (rejected / count, bias / count) for key, (rejected, bias) in sums.items()}


def relaxed(p: torch.Tensor, q: torch.Tensor, epsilon: float, corrects: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(probability of a rejection [n], bias [n]) for rows [n, vocab] of target and draft.

    See `theory.expected_relaxed_rejections`.
    """
    accepted = torch.minimum(q, p + epsilon * (p > 0))
    rejected = (1 - accepted.sum(-1)).clamp_min(0)
    rest = (p - q).clamp_min(0) if corrects else p
    total = rest.sum(-1, keepdim=True)
    law = accepted + rejected[:, None] * torch.where(total > 0, rest / total.clamp_min(1e-300), 0.0)
    return rejected, (law - p).abs().sum(-1) / 2
