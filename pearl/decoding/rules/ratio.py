"""The ratio rule: accept with probability min(1, target/draft), else correct from the residual. Acceptance rate 1 - TV.

Exact: what is committed has the target's distribution, whatever the draft proposed.  Source: Leviathan et al. 2023,
algorithm 1.

Others that judge each draft token against the distribution that it was drawn from are `RatioTarget` with another
`accepts`, `accepted` and `replacement`; their draft half is `SampledDraft`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pearl.config.options import RequestOptions
from pearl.decoding.keys import Purpose, draw_key, uniform
from pearl.decoding.rules import Drafted, Tops
from pearl.decoding.sampling import Shortlist, pick, probabilities, read_draw, shares
from pearl.protocol.events import Judged, Odds


def accepts(u: float, target_prob: float, draft_prob: float) -> bool:
    """Whether a token is accepted, given u in [0, 1): u < target_prob / draft_prob, written without the division.

    Strict, so that a token of target probability 0 never passes, not even with u = 0.
    """
    return u * draft_prob < target_prob


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """max(target - draft, 0) [vocab], not normalised; all zero where rounding leaves nothing."""
    return (target_probs - draft_probs).relu_()


class SampledDraft:
    """Samples the draft's distribution, and gives it with each token."""

    def __init__(self, options: RequestOptions) -> None:
        self.options = options

    def draft(
        self, logits: Sequence[Tensor], positions: Sequence[int], tops: Tops = ()
    ) -> list[Drafted]:
        every = [probabilities(row, self.options) for row in logits]
        keys = [draw_key(self.options, position, Purpose.DRAFT) for position in positions]
        return [(pick(probs, key), probs) for probs, key in zip(every, keys, strict=True)]

    def likeliest(
        self, top: Shortlist, position: int, count: int, is_root: bool = False
    ) -> tuple[list[int], list[float]]:
        """By the draft's own probabilities: which tokens the target prefers is not known here."""
        ids, logits = top
        return ids[:count].tolist(), shares(logits[:count], self.options.temperature).tolist()


class RatioTarget:
    """Judges draft tokens one by one; where one is rejected, draws a correction from `replacement`."""

    def __init__(self, options: RequestOptions) -> None:
        self.options = options

    def accepts(self, u: float, target_prob: float, draft_prob: float) -> bool:
        """Whether a token with these probabilities is accepted, given a uniform u in [0, 1)."""
        return accepts(u, target_prob, draft_prob)

    def accepted(self, target: Tensor, draft: Tensor) -> Tensor:
        """How likely each token is both drafted and accepted: [..., vocab], as `target` and `draft`."""
        return torch.minimum(draft, target)

    def replacement(self, target: Tensor, draft: Tensor) -> Tensor:
        """What the correction is drawn from, [vocab], not normalised; where it is all zero, the target."""
        return residual(target, draft)

    def bias(self, target: Tensor, accepted: Tensor, mass: Tensor) -> Tensor | None:
        """Total variation distance [..., 1] between the committed distribution and `target`; None: the rule is exact.

        Args:
            accepted: see `accepted`, [..., vocab]; `mass` [..., 1] is its sum.
        """
        return None

    def launch(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        return probabilities(logits, self.options)

    def judge(
        self,
        logits: Tensor,
        tokens: Sequence[int],
        rows: Sequence[Tensor],
        start: int,
        launched: Tensor | None = None,
    ) -> Judged:
        # The host computes nothing behind a rejection; another device computes all at once and is waited for once.
        step = 1 if logits.is_cpu else len(tokens)
        sums: list[tuple[float, float]] = []
        for first in range(0, len(tokens), step):
            part = slice(first, first + step)
            target = (
                probabilities(logits[part], self.options) if launched is None else launched[part]
            )
            draft = (
                torch.stack([row.to(logits.device) for row in rows])
                if step > 1
                else rows[first][None]
            )
            for i, (target_prob, draft_prob, *both) in enumerate(
                self._facts(target, draft, tokens[part])
            ):
                position = start + first + i
                sums.append((both[0], sum(both[1:])))
                u = uniform(draw_key(self.options, position, Purpose.ACCEPT))
                if not self.accepts(u, target_prob, draft_prob):
                    rest = self.replacement(target[i], draft[i])
                    key = draw_key(self.options, position, Purpose.CORRECTION)
                    token = read_draw(pick(rest, key, otherwise=target[i]))
                    return Judged(first + i, token, odds=odds_of(sums))
        return Judged(len(tokens), None, odds=odds_of(sums))

    def _facts(self, target: Tensor, draft: Tensor, tokens: Sequence[int]) -> list[list[float]]:
        """Of each row [n, vocab]: the token's probability with target and draft, acceptance mass, bias if any."""
        accepted = self.accepted(target, draft)
        mass = accepted.sum(-1, keepdim=True)
        bias = self.bias(target, accepted, mass)
        if target.is_cpu and len(tokens) == 1:  # NumPy's scalars are the cheapest to read
            values = [array.numpy().item(token) for array in (target, draft) for token in tokens]
            return [[*values, mass.item(), *([] if bias is None else [bias.item()])]]
        ids = torch.tensor(tokens, device=target.device).unsqueeze(1)
        columns = [target.gather(1, ids), draft.gather(1, ids), mass]
        if bias is not None:
            columns.append(bias)
        facts: list[list[float]] = torch.cat(columns, 1).tolist()
        return facts


def odds_of(sums: Sequence[tuple[float, float]]) -> Odds:
    """Sums (acceptance mass, bias) over positions."""
    chances = [min(1.0, max(0.0, 1 - mass)) for mass, _ in sums]
    return Odds(
        sum(chances),
        sum(chance * (1 - chance) for chance in chances),
        sum(bias for _, bias in sums),
    )
