"""What rules that are not exact pay for fewer rejections, on a pair of models: for opt and uno, by epsilon.

Twice: along texts that the target itself might have written, where bias and rejections of opt add up to the distance
between the models at each position; and in texts that each rule writes by itself, which its own bias leads elsewhere.
Source: Yin et al. 2024, section 4.2 and figure 4, which has it for simulated chains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import mean, stdev
from typing import Any

import torch
from torch.nn.functional import pad

from pearl.decoding.sampling import probabilities
from pearl.lab.experiments.estimate import Estimate
from pearl.lab.experiments.rejections import EPSILONS
from pearl.lab.simulate import Outcome, Timing, paired_executors, simulate
from pearl.models.runner import ModelRunner, feed_chain
from pearl.protocol.messages import Submit
from pearl.protocol.options import RequestOptions, Sampling

RULES = ("opt", "uno")
_PIECE = 64  # positions in one forward: a row spans the vocabulary
_WINDOW = 2


@dataclass(frozen=True)
class Price:
    """Of one rule, a token.

    Attributes:
        expected, bias: along the target's texts: the chance of a rejection, and the distance of what would be
            committed from the target's distribution.
        measured: rejections in the rule's own texts, and `measured_bias` there.
        foretold: the rejections that the distributions along the rule's own texts let one expect: `measured` differs
            from it by chance alone, and `margin` is 1.96 times that chance's standard deviation.
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def front(
    target: ModelRunner,
    draft: ModelRunner,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampling: Sampling,
    tell: Callable[[str], object] = lambda what: None,
) -> Iterator[Price]:
    """For each rule and each epsilon of `EPSILONS`; rule opt with epsilon 0 comes first: it is ratio, whose texts are
    the target's.

    Args:
        prompts: at least two. tokens: of each text; its end-of-sequence token does not end it.
        sampling: temperature > 0.
    """
    own: list[Outcome] = []
    along: dict[tuple[str, float], tuple[float, float]] = {}
    for rule in RULES:
        for epsilon in EPSILONS:
            tell(f"{rule}, epsilon {epsilon:g}")
            runs = [_text(target, draft, each, tokens, sampling, rule, epsilon) for each in prompts]
            if not own:
                own = runs
                along = prices(target, draft, prompts, [run.tokens for run in own], sampling)
            yield _priced(rule, epsilon, along[rule, epsilon], runs)


def _text(
    target: ModelRunner,
    draft: ModelRunner,
    prompt: Sequence[int],
    tokens: int,
    sampling: Sampling,
    rule: str,
    epsilon: float,
) -> Outcome:
    decoding = RequestOptions("pearl", "fixed", _WINDOW, rule, (("epsilon", epsilon),))
    submit = Submit(1, tuple(prompt), len(prompt) + tokens, decoding.changed(sampling=sampling))
    for runner in (target, draft):
        runner.rollback(0)
    with torch.inference_mode():
        return simulate(submit, *paired_executors(target, draft), Timing(1.0, lambda _: float(_WINDOW)))


def _priced(rule: str, epsilon: float, along: tuple[float, float], runs: Sequence[Outcome]) -> Price:
    lengths = [len(run.tokens) for run in runs]
    odds = [run.counts.odds for run in runs]
    rejected = [run.counts.rejected / length for run, length in zip(runs, lengths, strict=True)]
    biases = [one.bias / length if one else 0.0 for one, length in zip(odds, lengths, strict=True)]
    foretold = sum(one.rejections for one in odds if one)
    margin = 1.96 * sqrt(sum(one.variance for one in odds if one))
    in_all = sum(lengths)
    return Price(rule, epsilon, *along, _mean(rejected), _mean(biases), foretold / in_all, margin / in_all)


def _mean(values: Sequence[float]) -> Estimate:
    return Estimate(mean(values), 1.96 * stdev(values) / sqrt(len(values)))


@torch.inference_mode()
def prices(
    target: ModelRunner,
    draft: ModelRunner,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    sampling: Sampling,
) -> dict[tuple[str, float], tuple[float, float]]:
    """By rule and epsilon: how likely a token of `texts` is rejected, and how biased the one committed there is."""
    sums = {(rule, epsilon): [0.0, 0.0] for rule in RULES for epsilon in EPSILONS}
    for prompt, text in zip(prompts, texts, strict=True):
        for rows, given in zip(_rows(target, prompt, text), _rows(draft, prompt, text), strict=True):
            given = pad(given, (0, max(0, rows.shape[-1] - given.shape[-1])), value=-torch.inf)[:, : rows.shape[-1]]
            p, q = probabilities(rows, sampling).double(), probabilities(given, sampling).double()
            for (rule, epsilon), sum_ in sums.items():
                rejected, bias = relaxed(p, q, epsilon, corrects=rule == "opt")
                sum_[0] += float(rejected.sum())
                sum_[1] += float(bias.sum())
    in_all = sum(map(len, texts))
    return {key: (rejected / in_all, bias / in_all) for key, (rejected, bias) in sums.items()}


def relaxed(p: torch.Tensor, q: torch.Tensor, epsilon: float, corrects: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows [n, vocab] of target and draft the chance of a rejection [n], and the bias of what is committed [n].

    The same as `theory.expected_relaxed_rejections` has for one position of a chain. `corrects`: see there.
    """
    accepted = torch.minimum(q, p + epsilon * (p > 0))
    rejected = (1 - accepted.sum(-1)).clamp_min(0)
    rest = (p - q).clamp_min(0) if corrects else p
    total = rest.sum(-1, keepdim=True)
    law = accepted + rejected[:, None] * torch.where(total > 0, rest / total.clamp_min(1e-300), 0.0)
    return rejected, (law - p).abs().sum(-1) / 2


def _rows(runner: ModelRunner, prompt: Sequence[int], text: Sequence[int]) -> Iterator[torch.Tensor]:
    """The logits [some, vocab] that each token of the text was drawn from, piece by piece."""
    known = [token if token < runner.vocab_size else 0 for token in (*prompt, *text[:-1])]
    runner.rollback(0)
    if len(prompt) > 1:
        feed_chain(runner, known[: len(prompt) - 1], 0)
    behind = known[len(prompt) - 1 :]
    for first in range(0, len(behind), _PIECE):
        piece = behind[first : first + _PIECE]
        yield feed_chain(runner, piece, len(piece)).float()
