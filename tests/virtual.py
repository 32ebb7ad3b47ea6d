"""One request on toy models under the virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from scipy import stats

from pearl.execution.ahead import Ahead
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import TargetExecutor
from pearl.lab.simulate import Outcome, Timing, VirtualProposer, simulate
from pearl.models.runner import Capabilities, Feed, ModelRunner, WrappedRunner
from pearl.models.toy import NextToken, ToyRunner
from pearl.protocol.messages import Submit
from pearl.protocol.options import RequestOptions, Sampling
from tests.replace import replace

NEVER = 1e-4  # a p-value below this does not come by chance; seeds are fixed, so it either does or does not
FOUR_TO_ONE = Timing(1.0, lambda _: 4.0)
TIMINGS = [
    FOUR_TO_ONE,
    Timing(1.0, lambda n: 2.0 + 0.3 * n, delay=0.7, jitter=0.5, seed=1),
    Timing(1.0, lambda _: 0.5, delay=3.0, jitter=0.9, seed=2),
    Timing(1.0, lambda _: 9.0, delay=0.01, jitter=0.3, seed=3),
]
WARM = Sampling(1.0, seed=3)
Pair = tuple[NextToken, NextToken]


class Chains(WrappedRunner):
    """A runner that takes no trees, as the general path's."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, tree_nodes=0)

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        assert all(feed.parents is None for feed in feeds)
        return super().forward(feeds)


def first_order(*tables: torch.Tensor) -> Any:
    """Target and draft, whose next token depends on the last alone: [vocab, vocab], the distribution after each."""
    return tuple(lambda seen, table=table: table[seen[-1]] for table in tables)


def decoded(
    pair: Pair,
    vocab: int,
    decoding: RequestOptions,
    sampling: Sampling = WARM,
    tokens: int = 100,
    timing: Timing = FOUR_TO_ONE,
    prompt: tuple[int, ...] = (0,),
    wrap: Callable[[ModelRunner], ModelRunner] = lambda runner: runner,
    **options: Any,
) -> Outcome:
    """`wrap`: around both runners. `options`: of the draft's proposer; if that chains, it computes in its thread."""
    target, draft = (wrap(ToyRunner(vocab, each)) for each in pair)
    submit = Submit(1, prompt, len(prompt) + tokens, replace(decoding, sampling=sampling))
    proposer = VirtualProposer(draft, vocab, lambda fed: 1.0, **options)
    executor = DraftExecutor(proposer)
    with Ahead(executor, lambda: True) if proposer.chains else nullcontext(executor) as computing:
        return simulate(submit, TargetExecutor(target), computing, timing)


def likelihood(found: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """The p-value of whole texts by chi-square; those that are expected less than five times are one cell."""
    total = found.total()
    assert set(found) <= set(expected)
    common = [text for text, chance in expected.items() if chance * total >= 5]
    assert len(common) > 5
    observed, wanted = [float(found[text]) for text in common], [expected[text] * total for text in common]
    if (rest := total - sum(observed)) or total - sum(wanted) > 1e-6:
        observed.append(rest)
        wanted.append(total - sum(wanted))
    return float(stats.chisquare(observed, wanted).pvalue)
