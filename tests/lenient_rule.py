"""A third acceptance rule, for tests: what the registry asks of whoever adds one, and nothing else.

`lenient` judges as `ratio` does, but against (1 - epsilon) times the draft's probabilities: at epsilon 0 it is `ratio`
bit for bit, at epsilon 1 it accepts every token that the target allows at all. Not exact in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pearl.decoding.rules.ratio import RatioTarget
from pearl.protocol.events import Judged
from pearl.protocol.options import Sampling
from pearl.spec.rules import RULES, Parameter, RuleSpec

LENIENT = RuleSpec(
    "lenient",
    "as ratio, against (1 - epsilon) times the draft's probabilities",
    target=f"{__name__}:LenientTarget",
    parameters=(Parameter("epsilon", float, 0, 1, 0, "how much to forgive"),),
)


class LenientTarget(RatioTarget):
    def __init__(self, sampling: Sampling, epsilon: float) -> None:
        super().__init__(sampling)
        self._share = 1 - epsilon

    def judge(
        self,
        logits: torch.Tensor,
        tokens: Sequence[int],
        rows: Sequence[torch.Tensor],
        start: int,
        launched: torch.Tensor | None = None,
    ) -> Judged:
        return super().judge(logits, tokens, [self._share * row for row in rows], start, launched)


@contextmanager
def registered() -> Iterator[RuleSpec]:
    """The rule is there for as long as the context lasts."""
    try:
        RULES[LENIENT.name] = LENIENT
        yield LENIENT
    finally:
        RULES.pop(LENIENT.name, None)
