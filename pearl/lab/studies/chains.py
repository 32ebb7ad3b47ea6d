"""The experiments of Yin et al. 2024, on models whose rejections and bias are known exactly.

Target and draft are Markov chains: as in the paper, a token's distribution depends on the position
and the previous token. The paper does not print its chains, so ours are drawn from a seed. Theorems
1 to 5 give rejections and bias as sums over all texts; for Markov chains these are computed exactly
by recursion over positions. For comparison, the runtime's state machines and rules decode texts
with these two models under the virtual clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from math import sqrt
from operator import truediv
from statistics import fmean, stdev
from typing import NamedTuple

import torch

from pearl.cache import Watcher
from pearl.config.options import RequestOptions
from pearl.lab.studies.figures import Plot, Report, Table, curve
from pearl.lab.studies.simulate import Timing, paired_executors, simulate
from pearl.models.toy import NextToken, ToyRunner
from pearl.protocol.messages import Submit
from pearl.spec.methods import AS_PUBLISHED

STATES = 8
HORIZON = 50
CANDIDATES = (1, 2, 4, 8, 16, 64)
_SIMULATED = (1, 4, 16)  # numbers of candidates that are also simulated
EPSILONS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
_TIMING = Timing(1.0, lambda fed: 4.0)


@dataclass(frozen=True)
class Chains:
    """The transition probabilities of target and draft, each [positions, states, states].

    Row [i, x] is the distribution of the next token after token x at position i.
    """

    target: torch.Tensor
    draft: torch.Tensor

    @staticmethod
    def of_seed(seed: int, states: int = STATES, horizon: int = HORIZON) -> Chains:
        """Draw a target, and a draft that is the mean of the target and of other random rows."""
        generator = torch.Generator().manual_seed(seed)
        shape = (2, horizon, states, states)
        rows = torch.rand(shape, generator=generator, dtype=torch.float64) ** 2
        target, noise = rows / rows.sum(-1, keepdim=True)
        return Chains(target, 0.5 * target + 0.5 * noise)

    @property
    def horizon(self) -> int:
        return len(self.target)

    def law(self, rows: torch.Tensor) -> NextToken:
        """Return a chain as a toy model: a function from the tokens so far to a distribution.

        The text begins with a prompt of one token.

        Args:
            rows: `target` or `draft`.
        """
        return lambda tokens: rows[min(len(tokens), self.horizon) - 1, tokens[-1]].float()


def expected_rejections(chains: Chains, candidates: int = 1) -> float:
    """Return the expected number of rejections in a text of the whole horizon, by theorems 1 and 3.

    Theorem 1 is for one candidate. Theorem 3 is for several candidates, which are tried only at a
    root: at a text's first position, and after each correction. Theorem 2: with one candidate, no
    unbiased rule has fewer rejections than theorem 1 gives.

    The recursion goes from position to position. It carries two vectors over the last token x of
    the target's texts: `law` is P(x), and `rooted` is P(x and the position is a root).
    """
    law = torch.zeros(chains.target.shape[-1], dtype=torch.float64)
    law[0] = 1.0
    rooted = law.clone()  # candidates are tried at the beginning of a text
    total = 0.0
    for target, draft in zip(chains.target, chains.draft, strict=True):
        excess = (target - draft).clamp_min(0)
        untried = target  # the residual of the target after the candidates so far
        reached = torch.ones(len(law), dtype=torch.float64)  # P(this candidate is tried)
        for _ in range(candidates):
            residual = (untried - draft).clamp_min(0)
            rejected = residual.sum(-1)
            correction = reached[:, None] * residual
            reached = reached * rejected
            untried = residual / rejected.clamp_min(1e-300)[:, None]
        varied = excess.sum(-1)
        total += float(law @ varied - rooted @ (varied - reached))
        rooted = rooted @ correction + (law - rooted) @ excess
        law = law @ target
    return total


class Rejecting(NamedTuple):
    """The probability of a rejection and the bias, both per position."""

    rejections: float
    bias: float


def pareto(chains: Chains, epsilon: float, is_optimal: bool) -> Rejecting:
    """Return rejections and bias per position by theorems 4 and 5: a mean over the target's texts.

    If `is_optimal`, a rejected token is replaced as in rule opt, by a draw from the residual.
    Otherwise it is replaced as in rule uno, by a draw from the target's distribution.
    """
    law = torch.zeros(chains.target.shape[-1], dtype=torch.float64)
    law[0] = 1.0
    rejections = 0.0
    bias = 0.0
    for target, draft in zip(chains.target, chains.draft, strict=True):
        accepted = torch.minimum(draft, target + epsilon)  # P(token is drafted and accepted)
        missing = 1 - accepted.sum(-1)
        residual = target
        if is_optimal:
            residual = (target - accepted).clamp_min(0)
        residual = residual / residual.sum(-1, keepdim=True).clamp_min(1e-300)
        written = accepted + missing[:, None] * residual
        rejections += float(law @ missing)
        bias += float(law @ (written - target).abs().sum(-1)) / 2
        law = law @ target
    return Rejecting(rejections / chains.horizon, bias / chains.horizon)


def simulated(chains: Chains, texts: int, candidates: int, seed: int = 0) -> list[int]:
    """Simulate texts with method `pearl` as published; return the number of rejections in each."""
    options = RequestOptions("pearl", rule="ratio", temperature=1.0, **AS_PUBLISHED).resolved()
    if candidates > 1:
        options = options.changed(rule="batch", parameters=(("candidates", float(candidates)),))
    states = chains.target.shape[-1]
    rejections = []
    for number in range(texts):
        target, draft = paired_executors(
            ToyRunner(states, chains.law(chains.target)),
            ToyRunner(states, chains.law(chains.draft)),
        )
        submit = Submit(1, (0,), 1 + chains.horizon, options.changed(seed=seed + number))
        rejections.append(simulate(submit, target, draft, _TIMING).counts.num_rejections)
    return rejections


def batch_improvement(u: float, v: float, candidates: int) -> float:
    """Return by how much a rejection is less probable with several candidates than with one.

    This is for Bernoulli models: the draft is Ber(u) and the target Ber(v), with v <= u. The
    formula is::

        (u - v) (1 - u^(candidates - 1))

    Source: section 3.2 of the paper.
    """
    return (u - v) * (1 - u ** (candidates - 1))


def uniform_improvement(share: float, candidates: int) -> float:
    """Return by how much a rejection is less probable with several candidates than with one.

    This is for uniform models: the draft is uniform, and the target is uniform on a share of the
    draft's support. The formula is::

        (1 - share) - (1 - share)^candidates
    """
    return (1 - share) - (1 - share) ** candidates


def measure(texts: int, watcher: Watcher, seed: int = 0) -> Report:
    """Return a table of theorems beside simulations, and the paper's figures 2 to 4.

    Args:
        texts: number of simulated texts for each number of candidates.
    """
    chains = Chains.of_seed(seed)
    watcher.begin("Markov chains", len(_SIMULATED))
    rows = []
    rejections = {}
    for candidates in CANDIDATES:
        words = ""
        if candidates in _SIMULATED:
            counts = simulated(chains, texts, candidates)
            rejections[candidates] = counts
            error = stdev(counts) / sqrt(texts)
            words = f"{fmean(counts):.2f} (standard error {error:.2f})"
            watcher.advance(1, f"{candidates} candidates")
        rows.append([str(candidates), f"{expected_rejections(chains, candidates):.2f}", words])
    bound = expected_rejections(chains)
    notes = [
        f"Theorem 2: no unbiased rule with one candidate has fewer than {bound:.2f}. Theirs: no value is printed."
    ]
    title = f"Rejections in {HORIZON} tokens, {STATES} states, {texts} simulated texts"
    table = Table(title, ("candidates", "theorems 1 and 3", "simulated"), rows, notes)
    plots = [
        _running(chains, rejections),
        _saturating(chains, bound),
        _improvements(),
        _front(chains),
    ]
    return Report([table], plots)


def _saturating(chains: Chains, bound: float) -> Plot:
    lines = {
        "theorem 3": curve(partial(expected_rejections, chains), range(1, 65)),
        "lower bound of unbiased rules, one candidate (theorem 2)": [(1, bound), (64, bound)],
    }
    title = "Rejections by candidates: they stay above zero (figure 2c)"
    return Plot("theory-candidates", title, "candidates", "rejections a text", lines)


def _running(chains: Chains, rejections: dict[int, list[int]]) -> Plot:
    lines = {}
    for candidates, counts in rejections.items():
        expected = expected_rejections(chains, candidates)
        means = map(truediv, accumulate(counts), count(1))
        lines[f"simulated, M = {candidates}"] = list(enumerate(means, 1))
        lines[f"theorem, M = {candidates}"] = [(1, expected), (len(counts), expected)]
    title = "Mean rejections by texts and by theorems 1 and 3, M candidates (figures 2a, 2b)"
    return Plot("theory-rejections", title, "simulated texts", "rejections a text", lines)


def _improvements() -> Plot:
    counts = range(1, 33)
    lines = {}
    for u, v in ((0.9, 0.5), (0.7, 0.3), (0.5, 0.1)):
        lines[f"draft Ber({u}), target Ber({v})"] = curve(partial(batch_improvement, u, v), counts)
    for share in (0.25, 0.5, 0.75):
        lines[f"uniform, share {share}"] = curve(partial(uniform_improvement, share), counts)
    title = "Fewer rejections of one token by several candidates (figure 3)"
    return Plot("theory-improvement", title, "candidates", "improvement", lines)


def _front(chains: Chains) -> Plot:
    dots = {}
    for rule in ("opt", "uno"):
        dots[rule] = [pareto(chains, epsilon, rule == "opt") for epsilon in EPSILONS]
    unbiased = dots["opt"][0]
    end = (0.0, unbiased.rejections)
    lines = {"pareto front: bias + rejections = TV": [unbiased, end]}
    title = "Bias and rejections a position (figure 4); with unbiased rules the rejections are at least TV"
    return Plot("theory-pareto", title, "P(rejection)", "bias", lines, dots)
