"""Yin et al. 2024 on its own ground: two Markov chains, whose rejections and bias theorems 1 to 5 give exactly.

The chains change with the position and look at one token, as the paper's do; it prints none of their values, so these
are drawn from a seed.  The runtime's state machines and rules decode them under the virtual clock; the theorems are
evaluated by recursion over positions, which for such chains sums over all texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

import torch

from pearl.cache import Watcher
from pearl.config.options import RequestOptions
from pearl.lab.studies.figures import Plot, Table
from pearl.lab.studies.simulate import Timing, paired_executors, simulate
from pearl.models.toy import NextToken, ToyRunner
from pearl.protocol.messages import Submit
from pearl.spec.methods import AS_PUBLISHED

STATES, HORIZON = 8, 50
CANDIDATES = (1, 2, 4, 8, 16, 64)
_SIMULATED = (1, 4, 16)  # of these candidates
EPSILONS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
_TIMING = Timing(1.0, lambda fed: 4.0)


@dataclass(frozen=True)
class Chains:
    """Rows of target and draft, each [positions, states, states]: the next token's law behind a token at a position."""

    target: torch.Tensor
    draft: torch.Tensor

    @staticmethod
    def of_seed(seed: int, states: int = STATES, horizon: int = HORIZON) -> Chains:
        """The draft is the target, mixed with other rows."""
        generator = torch.Generator().manual_seed(seed)
        target, other = (
            torch.rand(2, horizon, states, states, generator=generator, dtype=torch.float64) ** 2
        )
        target, other = (rows / rows.sum(-1, keepdim=True) for rows in (target, other))
        return Chains(target, 0.5 * target + 0.5 * other)

    @property
    def horizon(self) -> int:
        return len(self.target)

    def law(self, rows: torch.Tensor) -> NextToken:
        """As a toy's distribution: the text begins with one token, the prompt."""
        return lambda tokens: rows[min(len(tokens), self.horizon) - 1, tokens[-1]].float()


def expected_rejections(chains: Chains, candidates: int = 1) -> float:
    """Theorems 1 (one candidate) and 3 (several, at the root alone): the number in a text of the whole horizon.

    By position, over the text's last token: its law under the target, and the mass of texts whose last token stands in
    place of rejected ones, behind which all candidates are tried. Theorem 2: without more candidates no unbiased rule
    has fewer than theorem 1 says.
    """
    law = torch.zeros(chains.target.shape[-1], dtype=torch.float64)
    law[0] = 1.0
    rooted, total = law.clone(), 0.0  # a text begins with candidates
    for target, draft in zip(chains.target, chains.draft, strict=True):
        first = (target - draft).clamp_min(0)
        left, reached = (
            target,
            torch.ones(len(law), dtype=torch.float64),
        )  # what is left of the target; P(got there)
        for _ in range(candidates):
            residual = (left - draft).clamp_min(0)
            rejected = residual.sum(-1)
            last = reached[:, None] * residual
            reached = reached * rejected
            left = residual / rejected.clamp_min(1e-300)[:, None]
        varied = first.sum(-1)
        total += float(law @ varied - rooted @ (varied - reached))
        rooted, law = rooted @ last + (law - rooted) @ first, law @ target
    return total


def pareto(chains: Chains, epsilon: float, is_optimal: bool) -> tuple[float, float]:
    """Theorems 4 and 5: (probability of a rejection, bias) a position, averaged over the target's texts.

    `is_optimal`: the residual of rule opt; otherwise uno's, which is the target.
    """
    law = torch.zeros(chains.target.shape[-1], dtype=torch.float64)
    law[0] = 1.0
    rejections = bias = 0.0
    for target, draft in zip(chains.target, chains.draft, strict=True):
        accepted = torch.minimum(draft, target + epsilon)  # mass of each token
        missing = 1 - accepted.sum(-1)
        residual = (target - accepted).clamp_min(0) if is_optimal else target
        residual = residual / residual.sum(-1, keepdim=True).clamp_min(1e-300)
        written = accepted + missing[:, None] * residual
        rejections += float(law @ missing)
        bias += float(law @ (written - target).abs().sum(-1)) / 2
        law = law @ target
    return rejections / chains.horizon, bias / chains.horizon


def simulated(chains: Chains, texts: int, candidates: int, seed: int = 0) -> list[int]:
    """Simulate `texts` texts with method `pearl` as published; return the number of rejections in each."""
    options = RequestOptions("pearl", rule="ratio", temperature=1.0, **AS_PUBLISHED).resolved()
    if candidates > 1:
        options = options.changed(rule="batch", parameters=(("candidates", float(candidates)),))
    found = []
    for number in range(texts):
        target, draft = (
            ToyRunner(chains.target.shape[-1], chains.law(rows))
            for rows in (chains.target, chains.draft)
        )
        submit = Submit(1, (0,), 1 + chains.horizon, options.changed(seed=seed + number))
        found.append(
            simulate(submit, *paired_executors(target, draft), _TIMING).counts.num_rejections
        )
    return found


def batch_improvement(u: float, v: float, candidates: int) -> float:
    """Fewer rejections of one token, draft Ber(u) and target Ber(v) <= u. Section 3.2 of the paper."""
    return (u - v) * (1 - u ** (candidates - 1))


def uniform_improvement(share: float, candidates: int) -> float:
    """Likewise, the target uniform on a share of the draft's uniform support."""
    return (1 - share) - (1 - share) ** candidates


def measure(texts: int, watcher: Watcher, seed: int = 0) -> tuple[Table, list[Plot]]:
    """Theorem and simulation side by side, and figures 2 to 4."""
    chains = Chains.of_seed(seed)
    watcher.begin("Markov chains", len(_SIMULATED))
    rows, counted = [], {}
    for candidates in CANDIDATES:
        expected, words = expected_rejections(chains, candidates), ""
        if candidates in _SIMULATED:
            counted[candidates] = found = simulated(chains, texts, candidates)
            error = stdev(found) / sqrt(texts) if texts > 1 else 0.0
            words = f"{fmean(found):.2f} (standard error {error:.2f})"
            watcher.advance(1, f"{candidates} candidates")
        rows.append([str(candidates), f"{expected:.2f}", words])
    bound = expected_rejections(chains)
    table = Table(
        f"Rejections in {HORIZON} tokens, {STATES} states, {texts} simulated texts",
        ("candidates", "theorems 1 and 3", "simulated"),
        rows,
        [
            f"Theorem 2: no unbiased rule with one candidate has fewer than {bound:.2f}. Theirs: no value is printed."
        ],
    )
    points = [(m, expected_rejections(chains, m)) for m in range(1, 65)]
    lines = {
        "theorem 3": points,
        "lower bound of unbiased rules, one candidate (theorem 2)": [(1, bound), (64, bound)],
    }
    title = "Rejections by candidates: they stay above zero (figure 2c)"
    saturating = Plot("theory-candidates", title, "candidates", "rejections a text", lines)
    return table, [_running(chains, counted), saturating, _improvements(), _front(chains)]


def _running(chains: Chains, counted: dict[int, list[int]]) -> Plot:
    lines = {}
    for candidates, found in counted.items():
        means = [(n, fmean(found[:n])) for n in range(1, len(found) + 1)]
        expected = expected_rejections(chains, candidates)
        lines[f"simulated, M = {candidates}"] = means
        lines[f"theorem, M = {candidates}"] = [(1, expected), (len(found), expected)]
    title = "Mean rejections by texts and by theorems 1 and 3, M candidates (figures 2a, 2b)"
    return Plot("theory-rejections", title, "simulated texts", "rejections a text", lines)


def _improvements() -> Plot:
    counts = range(1, 33)
    bernoulli = {
        f"draft Ber({u}), target Ber({v})": (u, v) for u, v in ((0.9, 0.5), (0.7, 0.3), (0.5, 0.1))
    }
    lines = {
        label: [(m, batch_improvement(*pair, m)) for m in counts]
        for label, pair in bernoulli.items()
    }
    lines |= {
        f"uniform, share {r}": [(m, uniform_improvement(r, m)) for m in counts]
        for r in (0.25, 0.5, 0.75)
    }
    title = "Fewer rejections of one token by several candidates (figure 3)"
    return Plot("theory-improvement", title, "candidates", "improvement", lines)


def _front(chains: Chains) -> Plot:
    best, plain = (
        [pareto(chains, epsilon, is_optimal) for epsilon in EPSILONS]
        for is_optimal in (True, False)
    )
    lines = {"pareto front: bias + rejections = TV": [best[0], (0.0, best[0][0])]}
    title = "Bias and rejections a position (figure 4); with unbiased rules the rejections are at least TV"
    return Plot(
        "theory-pareto", title, "P(rejection)", "bias", lines, {"opt": best, "uno": plain}
    )
