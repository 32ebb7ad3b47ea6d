"""Three rules that are not exact, opt, uno and bild: they accept more, and report the bias.

The bias is the total variation distance between the distribution of committed tokens and the
target's.

Opt and uno accept a draft token with probability min(1, (target + epsilon) / draft).  They never
accept a token whose target probability is 0, so a token that a grammar or top-p rules out is never
committed. The two differ in how they replace a rejected token.  Opt draws from max(target - draft,
0), as the ratio rule does; of all replacements, this one has the least bias.  Under opt, bias and
rejection probability add up to the total variation distance between draft and target.  Uno draws
from the target's distribution, and is biased even if epsilon is 0.

Source: Yin et al. 2024, section 4.2.  For uno, the paper's text draws the replacement from the
target's distribution, but the paper's printed code draws it from the draft's.  We follow the text.

Bild accepts a token if its target probability is high enough, whatever its draft probability.
Source: Kim et al. 2023 (BiLD), rollback policy.  The paper's fallback policy is `--draft-stop
threshold` here. The paper decodes greedily.  So does bild at temperature 0, where it commits either
the draft's likeliest token or the target's.
"""

from collections.abc import Sequence
from math import exp

import torch
from torch import Tensor

from pearl.config.options import RequestOptions
from pearl.decoding.rules import Proposed
from pearl.decoding.rules.ratio import RatioTarget, accepts, residual
from pearl.decoding.sampling import greedy, read_draw
from pearl.protocol.events import Judged, Odds


class UnoTarget(RatioTarget):
    """Rule uno: draws corrections from the target's distribution.

    Args:
        epsilon: is added to each target probability that is not 0.
    """

    def __init__(self, options: RequestOptions, epsilon: float) -> None:
        super().__init__(options)
        self._epsilon = epsilon

    def accepts(self, u: float, target_prob: float, draft_prob: float) -> bool:
        if target_prob > 0:
            target_prob += self._epsilon
        return accepts(u, target_prob, draft_prob)

    def accepted(self, target: Tensor, draft: Tensor) -> Tensor:
        return torch.minimum(draft, target + self._epsilon * (target > 0))

    def replacement(self, target: Tensor, draft: Tensor) -> Tensor:
        return target

    def bias(self, target: Tensor, accepted: Tensor, mass: Tensor) -> Tensor:
        return (accepted - mass * target).relu_().sum(-1, keepdim=True)


class OptTarget(UnoTarget):
    """Rule opt: draws corrections from the residual. With epsilon 0 it is the ratio rule, bit for bit."""

    def replacement(self, target: Tensor, draft: Tensor) -> Tensor:
        return residual(target, draft)

    def bias(self, target: Tensor, accepted: Tensor, mass: Tensor) -> Tensor:
        return (accepted - target).relu_().sum(-1, keepdim=True)


class BildTarget(UnoTarget):
    """Rule bild: accepts a token whose negative log-likelihood under the target is at most `rollback` nats."""

    def __init__(self, options: RequestOptions, rollback: float) -> None:
        super().__init__(options, 0.0)
        self._min_prob = exp(-rollback)

    def accepts(self, u: float, target_prob: float, draft_prob: float) -> bool:
        return target_prob >= self._min_prob

    def accepted(self, target: Tensor, draft: Tensor) -> Tensor:
        return torch.where(target >= self._min_prob, draft, 0.0)


class GreedyBildTarget:
    """Rule bild at temperature 0: replaces a rejected token by the target's likeliest token."""

    def __init__(self, options: RequestOptions, rollback: float) -> None:
        self._rollback = rollback

    def launch(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        return torch.log_softmax(logits.float(), -1)

    def judge(self, proposed: Proposed) -> Judged:
        """Judge the draft tokens.

        The bias is the number of accepted tokens that are not the target's likeliest token.
        """
        logits = proposed.logits
        scores = proposed.launched
        if scores is None:
            scores = self.launch(logits, ())
        ids = torch.tensor(proposed.tokens, device=scores.device).unsqueeze(1)
        token_scores = scores.gather(1, ids).squeeze(1).tolist()
        best_scores = scores.amax(-1).tolist()
        odds = Odds(0.0, 0.0, 0.0)
        for i, (score, best) in enumerate(zip(token_scores, best_scores, strict=True)):
            if not -score <= self._rollback:  # also rejects NaN
                return Judged(i, read_draw(greedy(logits[i])), odds=odds + Odds(1.0, 0.0, 0.0))
            odds += Odds(0.0, 0.0, float(score < best))
        return Judged(len(proposed.tokens), None, odds=odds)
