"""Three rules that accept more than exactness allows, by a stated amount: opt, uno and bild.

Opt and uno accept a draft token with probability min(1, (target + epsilon) / draft), and none that has no probability
with the target: what a grammar or top-p rules out never becomes text.  They differ in what replaces a rejected one.
Opt draws from max(target - draft, 0), as the ratio rule does: of all replacements that with the least total variation
distance from the target.  What is gained is paid for one by one: bias and rejection probability add up to the distance
between draft and target.  Uno draws from the target itself, and is biased with epsilon 0 too.

Source: Yin et al. 2024, section 4.2.  Their printed code has the draft's distribution in the target's place for uno,
against their text, which is followed here.

Bild accepts a token wherever the target finds it not too unlikely, whatever the draft's probability of it was.  Source:
Kim et al. 2023 (BiLD), rollback policy; its fallback policy is the draft's: `--draft-stop threshold`.
"""

from __future__ import annotations

from math import exp

import torch

from pearl.decoding.rules.ratio import RatioDraft, RatioTarget
from pearl.protocol.options import Sampling


class BiasedDraft(RatioDraft):
    """Drafts as under the ratio rule: what is forgiven is the target's business."""

    def __init__(self, sampling: Sampling, epsilon: float) -> None:
        super().__init__(sampling)


class OptTarget(RatioTarget):
    """With epsilon 0 it is the ratio rule, bit for bit."""

    def _bias(self, target: torch.Tensor, accepted: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        return (accepted - target).relu_().sum(-1)


class UnoTarget(RatioTarget):
    """A rejected token is replaced by a draw from the target."""

    def _after_rejection(self, target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
        return target

    def _bias(self, target: torch.Tensor, accepted: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        return (accepted - mass[..., None] * target).relu_().sum(-1)


class BildDraft(RatioDraft):
    """Drafts as under the ratio rule."""

    def __init__(self, sampling: Sampling, rollback: float) -> None:
        super().__init__(sampling)


class BildTarget(RatioTarget):
    """Accepts a token of which the target's negative log-likelihood is at most `rollback`, in nats.

    A rejected token is replaced by a draw from the target.
    """

    def __init__(self, sampling: Sampling, rollback: float) -> None:
        super().__init__(sampling)
        self._least = exp(-rollback)  # probability of a token that is accepted

    def _accepts(self, position: int, target_prob: float, draft_prob: float) -> bool:
        return target_prob >= self._least

    def _after_rejection(self, target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
        return target

    def _sums(self, target: torch.Tensor, draft: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        accepted = torch.where(target >= self._least, draft, 0.0)
        mass = accepted.sum(-1)
        return mass, (accepted - mass[..., None] * target).relu_().sum(-1)
