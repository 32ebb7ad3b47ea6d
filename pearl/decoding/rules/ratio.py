"""The ratio rule: accept a draft token with probability min(1, target / draft).

`target` and `draft` are the token's probabilities under the two models.  If the token is rejected,
a correction is drawn from the residual max(target - draft, 0).  The rule is exact: committed tokens
have the target's distribution, whatever the draft proposed.  The acceptance rate is 1 - TV, where
TV is the total variation distance of the two distributions.  Source: Leviathan et al. 2023,
algorithm 1.

Several other rules also judge each draft token against the distribution that it was drawn from.
They are subclasses of `RatioTarget` with their own `accepts`, `accepted` and `replacement`, and
share the draft half `SampledDraft`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pearl.config.options import RequestOptions
from pearl.decoding.keys import Purpose, draw_key, uniform
from pearl.decoding.rules import Drafted, Proposed, Tops
from pearl.decoding.sampling import Shortlist, pick, probabilities, read_draw, shares
from pearl.protocol.events import Judged, Odds


def accepts(u: float, target_prob: float, draft_prob: float) -> bool:
    """Return whether a token is accepted: u < target_prob / draft_prob.

    `u` is a uniform random number in [0, 1). The comparison is strict, so that a token of target
    probability 0 is never accepted, not even if u = 0.
    """
    return u * draft_prob < target_prob


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Return max(target - draft, 0) [vocab], not normalised.

    If the two distributions are equal up to rounding, the result may be 0 everywhere.
    """
    return (target_probs - draft_probs).relu_()


class Facts(NamedTuple):
    """The figures by which a draft token is judged, read from the distributions of target and draft.

    Attributes:
        target, draft: the token's probability in the target's and in the draft's distribution.
        mass: probability that a token is accepted at this position. It is a mean over all tokens,
            weighted by the draft's distribution.
        bias: see `RatioTarget.bias`; 0 if the rule is exact.
    """

    target: float
    draft: float
    mass: float
    bias: float = 0.0


class SampledDraft:
    """Samples tokens from the draft's distribution, and returns that distribution with each token."""

    def __init__(self, options: RequestOptions) -> None:
        self.options = options

    def draft(
        self, logits: Sequence[Tensor], positions: Sequence[int], tops: Tops = ()
    ) -> list[Drafted]:
        drafted: list[Drafted] = []
        for row, position in zip(logits, positions, strict=True):
            probs = probabilities(row, self.options)
            key = draw_key(self.options, position, Purpose.DRAFT)
            drafted.append((pick(probs, key), probs))
        return drafted

    def likeliest(
        self, top: Shortlist, position: int, count: int, is_root: bool = False
    ) -> tuple[list[int], list[float]]:
        """Rank the tokens by the draft's own probabilities."""
        ids, logits = top
        return ids[:count].tolist(), shares(logits[:count], self.options.temperature).tolist()


class RatioTarget:
    """Judges draft tokens one by one, up to the first that is rejected.

    In place of the rejected token it draws a correction from the distribution `replacement`.
    """

    def __init__(self, options: RequestOptions) -> None:
        self.options = options

    def accepts(self, u: float, target_prob: float, draft_prob: float) -> bool:
        """Return whether a token with these probabilities is accepted, given a uniform u in [0, 1)."""
        return accepts(u, target_prob, draft_prob)

    def accepted(self, target: Tensor, draft: Tensor) -> Tensor:
        """Return the probability that each token is drafted and accepted: min(draft, target), [..., vocab]."""
        return torch.minimum(draft, target)

    def replacement(self, target: Tensor, draft: Tensor) -> Tensor:
        """Return the distribution [vocab] of the correction, not normalised.

        If it is 0 everywhere, the correction is drawn from `target` instead.
        """
        return residual(target, draft)

    def bias(self, target: Tensor, accepted: Tensor, mass: Tensor) -> Tensor | None:
        """Return how far the distribution of committed tokens is from `target`.

        This is the total variation distance, [..., 1]; None if the rule is exact.

        Args:
            accepted: the result of `accepted`, [..., vocab].
            mass: the sum of `accepted` over the vocabulary, [..., 1].
        """
        return None

    def launch(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        return probabilities(logits, self.options)

    def judge(self, proposed: Proposed) -> Judged:
        # On a CPU tokens are judged one by one, so that nothing is computed after a rejection.  On
        # another device all are computed at once, so that the host waits for it once.
        tokens = proposed.tokens
        batch_size = 1 if proposed.logits.is_cpu else len(tokens)
        masses = []
        biases = []
        for first in range(0, len(tokens), batch_size):
            batch = slice(first, first + batch_size)
            target = self._target(proposed, batch)
            if batch_size == 1:
                draft = proposed.rows[first][None]
            else:
                draft = torch.stack([row.to(target.device) for row in proposed.rows])
            for i, token_facts in enumerate(self.facts(target, draft, tokens[batch])):
                position = proposed.start + first + i
                masses.append(token_facts.mass)
                biases.append(token_facts.bias)
                u = uniform(draw_key(self.options, position, Purpose.ACCEPT))
                if not self.accepts(u, token_facts.target, token_facts.draft):
                    token = self._correction(position, target[i], draft[i])
                    return Judged(first + i, token, odds=odds_of(masses, biases))
        return Judged(len(tokens), None, odds=odds_of(masses, biases))

    def _target(self, proposed: Proposed, part: int | slice) -> Tensor:
        """Return the target's distributions for the tokens at the index or slice `part`."""
        if proposed.launched is None:
            return probabilities(proposed.logits[part], self.options)
        return proposed.launched[part]

    def _correction(self, position: int, target: Tensor, draft: Tensor) -> int:
        """Draw the correction at a position, given both distributions [vocab] there."""
        key = draw_key(self.options, position, Purpose.CORRECTION)
        return read_draw(pick(self.replacement(target, draft), key, otherwise=target))

    def facts(self, target: Tensor, draft: Tensor, tokens: Sequence[int]) -> list[Facts]:
        """Return the `Facts` of each token, from both distributions [n, vocab].

        Waits for the device once.
        """
        accepted = self.accepted(target, draft)
        mass = accepted.sum(-1, keepdim=True)
        bias = self.bias(target, accepted, mass)
        if target.is_cpu and len(tokens) == 1:  # NumPy's scalars are the cheapest to read
            (token,) = tokens
            target_prob = target.numpy().item(token)
            draft_prob = draft.numpy().item(token)
            if bias is None:
                return [Facts(target_prob, draft_prob, mass.item())]
            return [Facts(target_prob, draft_prob, mass.item(), bias.item())]
        ids = torch.tensor(tokens, device=target.device).unsqueeze(1)
        columns = [target.gather(1, ids), draft.gather(1, ids), mass]
        if bias is not None:
            columns.append(bias)
        return [Facts(*values) for values in torch.cat(columns, 1).tolist()]


def odds_of(masses: Sequence[float], biases: Sequence[float] = ()) -> Odds:
    """Return the expected rejections, their variance and the sum of biases over judged positions.

    A rejection has probability p = 1 - mass at each position. So rejections = sum(p), and variance
    = sum(p * (1 - p)).
    """
    rejection_probs = [min(1.0, max(0.0, 1 - mass)) for mass in masses]
    variance = sum(prob * (1 - prob) for prob in rejection_probs)
    return Odds(sum(rejection_probs), variance, sum(biases, 0.0))
