"""The ratio rule: accept with probability min(1, target/draft), else correct from the residual. Acceptance rate 1 - TV.

Exact: what is committed has the target's distribution, whatever the draft proposed.  Source: Leviathan et al. 2023,
algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pearl.decoding.rules.tokenwise import TokenTarget


def accepts(u: float, target_prob: float, draft_prob: float) -> bool:
    """Whether a token is accepted, given u in [0, 1): u < target_prob / draft_prob, written without the division.

    Strict, so that a token of target probability 0 never passes, not even with u = 0.
    """
    return u * draft_prob < target_prob


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """max(target - draft, 0) [vocab], not normalised; all zero where rounding leaves nothing."""
    return (target_probs - draft_probs).relu_()


class RatioTarget(TokenTarget):
    """Judges by `accepts`, corrects from `residual`."""

    def accepts(self, u: float, target_prob: float, draft_prob: float) -> bool:
        return accepts(u, target_prob, draft_prob)

    def accepted(self, target: Tensor, draft: Tensor) -> Tensor:
        return torch.minimum(draft, target)

    def replacement(self, target: Tensor, draft: Tensor) -> Tensor:
        return residual(target, draft)
