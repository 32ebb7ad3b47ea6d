"""The ratio rule: accept with probability min(1, target/draft), else correct from the residual. Acceptance rate 1 - TV.

Exact: what is committed has the target's distribution, whatever the draft proposed.  Source: Leviathan et al. 2023,
algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pearl.decoding.keys import DrawKeys, Purpose, uniform
from pearl.decoding.rules import Judgement
from pearl.decoding.sampling import pick, probabilities, read_draw
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


class RatioTarget:
    """Judges by `accepts`, corrects from `residual`."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._keys = DrawKeys(sampling)

    def judge(
        self,
        logits: torch.Tensor,
        tokens: Sequence[int],
        rows: Sequence[torch.Tensor],
        start: int,
    ) -> Judgement:
        target = probabilities(logits, self.sampling)
        if not logits.is_cpu:
            rows = [row.to(logits.device) for row in rows]  # some come over the channel, sparse ones through the host
        chances = zip(_chosen(target, tokens), _chosen(rows, tokens), strict=True)
        for i, (target_prob, draft_prob) in enumerate(chances):
            if not accepts(uniform(self._key(start + i, Purpose.ACCEPT)), target_prob, draft_prob):
                rest = residual(target[i], rows[i])
                draw = pick(rest, self._key(start + i, Purpose.CORRECTION), otherwise=target[i])
                return Judgement(i, read_draw(draw))
        return Judgement(len(tokens), None)

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
