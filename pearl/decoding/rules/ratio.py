"""The ratio rule: accept with probability min(1, target/draft), else correct from the residual. Acceptance rate 1 - TV.

Exact: what is committed has the target's distribution, whatever the draft proposed.  Source: Leviathan et al. 2023,
algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pearl.decoding.keys import DrawKeys, Purpose, uniform
from pearl.decoding.rules import Judgement
from pearl.decoding.sampling import pick, probabilities, read_draw, shortlist
from pearl.protocol.events import Odds
from pearl.protocol.messages import Sampling


def accepts(u: float, target_prob: float, draft_prob: float) -> bool:
    """Whether a token is accepted, given u in [0, 1): u < target_prob / draft_prob, written without the division.

    Strict, so that a token of target probability 0 never passes, not even with u = 0.
    """
    return u * draft_prob < target_prob


def residual(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """max(target - draft, 0) [vocab], not normalised; all zero where rounding leaves nothing."""
    return (target_probs - draft_probs).relu_()


class RatioDraft:
    """Samples the draft's distribution, and sends it along."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._keys = DrawKeys(sampling)

    def draft(self, logits: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        probs = probabilities(logits, self.sampling)
        return pick(probs, self._keys(position, Purpose.DRAFT)), probs

    def likeliest(self, logits: torch.Tensor, position: int, count: int) -> tuple[list[int], list[float]]:
        """By the draft's own probabilities: what the target gives more is not known here."""
        ids, probs = shortlist(logits, self.sampling.temperature, count)
        return ids.tolist(), probs.tolist()


class RatioTarget:
    """Judges by `accepts`, corrects from `residual`.

    Args:
        epsilon: is added to the target's probability of a draft token; above 0 the rule is not exact (see `biased`).
    """

    def __init__(self, sampling: Sampling, epsilon: float = 0.0) -> None:
        self.sampling = sampling
        self._epsilon = epsilon
        self._keys = DrawKeys(sampling)

    def launch(self, logits: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        return probabilities(logits, self.sampling)

    def judge(
        self,
        logits: torch.Tensor,
        tokens: Sequence[int],
        rows: Sequence[torch.Tensor],
        start: int,
        launched: torch.Tensor | None = None,
    ) -> Judgement:
        target = probabilities(logits, self.sampling) if launched is None else launched
        if not logits.is_cpu:
            rows = [row.to(logits.device) for row in rows]  # some come over the channel, sparse ones through the host
        chances = zip(_chosen(target, tokens), _chosen(rows, tokens), strict=True)
        for i, (target_prob, draft_prob) in enumerate(chances):
            u = uniform(self._key(start + i, Purpose.ACCEPT))
            if not accepts(u, target_prob + self._epsilon, draft_prob):
                rest = self._after_rejection(target[i], rows[i])
                draw = pick(rest, self._key(start + i, Purpose.CORRECTION), otherwise=target[i])
                return Judgement(i, read_draw(draw), self._odds(target, rows[: i + 1]))
        return Judgement(len(tokens), None, self._odds(target, rows))

    def _after_rejection(self, target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
        """What the correction is drawn from [vocab], not normalised."""
        return residual(target, draft)

    def _odds(self, target: torch.Tensor, rows: Sequence[torch.Tensor]) -> Odds:
        """Of the positions of `rows`."""
        if target.is_cpu:  # row by row: large temporaries cost ten times as much
            each = [one for pair in zip(target, rows, strict=False) for one in self._sums(*pair)]
            sums = torch.stack(each).view(-1, 2)
        else:
            sums = torch.stack(self._sums(target[: len(rows)], torch.stack([*rows])), -1)
        numbers = sums.tolist()
        chances = [min(1.0, max(0.0, 1 - mass)) for mass, _ in numbers]
        return Odds(sum(chances), sum(chance * (1 - chance) for chance in chances), sum(bias for _, bias in numbers))

    def _sums(self, target: torch.Tensor, draft: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How likely what is drafted from each row is accepted, and the bias: [...]. target, draft: [..., vocab]."""
        accepted = torch.minimum(draft, target + self._epsilon if self._epsilon else target)
        mass = accepted.sum(-1)
        return mass, self._bias(target, accepted, mass)

    def _bias(self, target: torch.Tensor, accepted: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        """Total variation distance [...] between the distribution that is committed by and `target` [..., vocab].

        Args:
            accepted: [..., vocab], the chance of each token to be drafted and accepted; `mass` [...] its sum.
        """
        return torch.zeros_like(mass)

    def _key(self, position: int, purpose: Purpose) -> int:
        return self._keys(position, purpose)


def _chosen(rows: torch.Tensor | Sequence[torch.Tensor], tokens: Sequence[int]) -> list[float]:
    """rows[i][tokens[i]] for all i: from a GPU in one copy, on the host through numpy, whose scalars are cheapest."""
    if not rows[0].is_cpu:
        ids = torch.tensor(tokens, device=rows[0].device).unsqueeze(1)
        together = rows if isinstance(rows, torch.Tensor) else torch.stack([*rows])
        return together.gather(1, ids).squeeze(1).tolist()
    if isinstance(rows, torch.Tensor):
        numbers = rows.numpy()
        return [numbers.item(i, token) for i, token in enumerate(tokens)]
    return [row.numpy().item(token) for row, token in zip(rows, tokens, strict=True)]
