"""The ratio rule: accept with probability min(1, target/draft), else correct from the residual. Acceptance rate 1 - TV.

Exact: what is committed has the target's distribution, whatever the draft proposed.  Source: Leviathan et al. 2023,
algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pearl.decoding.keys import DrawKeys, Purpose, uniform
from pearl.decoding.rules import Judgement
from pearl.decoding.sampling import Shortlist, pick, probabilities, read_draw, shares
from pearl.protocol.events import Odds
from pearl.protocol.options import Sampling


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

    def draft(
        self, logits: torch.Tensor, position: int, top: Shortlist | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        probs = probabilities(logits, self.sampling)
        return pick(probs, self._keys(position, Purpose.DRAFT)), probs

    def draft_together(
        self, logits: Sequence[torch.Tensor], positions: Sequence[int], tops: Sequence[Shortlist | None]
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        return [self.draft(*each) for each in zip(logits, positions, tops, strict=True)]

    def likeliest(
        self,
        ids: npt.NDArray[np.int64],
        logits: npt.NDArray[np.float64],
        position: int,
        count: int,
        is_root: bool = False,
    ) -> tuple[list[int], list[float]]:
        """By the draft's own probabilities: what the target gives more is not known here."""
        return ids[:count].tolist(), shares(logits[:count], self.sampling.temperature).tolist()


class RatioTarget:
    """Judges by `accepts`, corrects from `residual`.

    Args:
        epsilon: is added to the target's probability of a draft token that is possible at all; above 0 the rule is not
            exact (see `biased`).
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
        if logits.is_cpu:
            return self._judge_on_host(logits, tokens, rows, start, launched)
        target = probabilities(logits, self.sampling) if launched is None else launched
        draft = torch.stack([row.to(logits.device) for row in rows])  # some come sparse, through the host
        ids = torch.tensor(tokens, device=logits.device).unsqueeze(1)
        sums = torch.stack(self._sums(target, draft), -1)
        chosen = torch.cat((target.gather(1, ids), draft.gather(1, ids), sums), 1)  # read in one copy
        each: list[tuple[float, float]] = []
        for i, (target_prob, draft_prob, *both) in enumerate(chosen.tolist()):
            each.append((both[0], both[1]))
            if not self._accepts(start + i, target_prob, draft_prob):
                return Judgement(i, self._correct(start + i, target[i], draft[i]), odds_of(each))
        return Judgement(len(tokens), None, odds_of(each))

    def _judge_on_host(
        self,
        logits: torch.Tensor,
        tokens: Sequence[int],
        rows: Sequence[torch.Tensor],
        start: int,
        launched: torch.Tensor | None,
    ) -> Judgement:
        """Row by row: none behind a rejection is computed, and large temporaries cost ten times as much."""
        each: list[tuple[float, float]] = []
        for i, (token, draft) in enumerate(zip(tokens, rows, strict=True)):
            target = probabilities(logits[i], self.sampling) if launched is None else launched[i]
            mass, bias = self._sums(target, draft)
            each.append((mass.item(), bias.item()))
            # Through numpy, whose scalars are cheapest.
            if not self._accepts(start + i, target.numpy().item(token), draft.numpy().item(token)):
                return Judgement(i, self._correct(start + i, target, draft), odds_of(each))
        return Judgement(len(tokens), None, odds_of(each))

    def _accepts(self, position: int, target_prob: float, draft_prob: float) -> bool:
        forgiven = self._epsilon if target_prob > 0 else 0.0
        return accepts(uniform(self._key(position, Purpose.ACCEPT)), target_prob + forgiven, draft_prob)

    def _correct(self, position: int, target: torch.Tensor, draft: torch.Tensor) -> int:
        """The token in place of a rejected one, by the distributions [vocab] at its position."""
        rest = self._after_rejection(target, draft)
        return read_draw(pick(rest, self._key(position, Purpose.CORRECTION), otherwise=target))

    def _after_rejection(self, target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
        """What the correction is drawn from [vocab], not normalised."""
        return residual(target, draft)

    def _sums(self, target: torch.Tensor, draft: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How likely what is drafted from each row is accepted, and the bias: [...]. target, draft: [..., vocab]."""
        forgiving = target + self._epsilon * (target > 0) if self._epsilon else target
        accepted = torch.minimum(draft, forgiving)
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


def odds_of(sums: Sequence[tuple[float, float]]) -> Odds:
    """Of positions of which each has (how likely what is drafted is accepted, bias)."""
    chances = [min(1.0, max(0.0, 1 - mass)) for mass, _ in sums]
    return Odds(sum(chances), sum(chance * (1 - chance) for chance in chances), sum(bias for _, bias in sums))
