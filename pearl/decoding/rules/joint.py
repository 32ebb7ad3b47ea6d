"""The joint rule: accepts by the likelihood of tokens together, not one by one.

The draft searches for the likeliest block of `depth` tokens.  The target scores the block as a whole and accepts its
longest part whose joint ratio, the product of target / draft over its tokens, exceeds tau, even where a shorter part
does not pass; then it draws one token.  So an unlikely token is accepted where what follows makes up for it.

Not exact, on purpose: it prefers texts that are likely as a whole.  Source: Qin et al. 2024, multi-token joint
speculative decoding, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pearl.decoding.keys import DrawKeys, Purpose
from pearl.decoding.rules import Judgement
from pearl.decoding.sampling import pick, probabilities, read_draw
from pearl.protocol.events import Odds
from pearl.protocol.options import Sampling


class JointDraft:
    """What a search for a block goes by; see `pearl.decoding.rules.BlockHalf`."""

    def __init__(self, sampling: Sampling, depth: int, width: int) -> None:
        self.sampling, self.depth, self.width = sampling, depth, width

    def score(self, logits: Tensor) -> Tensor:
        return probabilities(logits, self.sampling)


class JointTarget:
    """Accepts the longest part of a block that is likely enough as a whole.

    Args:
        tau: the joint ratio that must be exceeded; 0 accepts all that the target allows, 1 nothing.
    """

    def __init__(self, sampling: Sampling, tau: float) -> None:
        self.sampling, self._tau = sampling, tau
        self._keys = DrawKeys(sampling)

    def launch(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        return probabilities(logits, self.sampling)

    def judge(
        self, logits: Tensor, tokens: Sequence[int], rows: Sequence[Tensor], start: int, launched: Tensor | None = None
    ) -> Judgement:
        """`tokens` are a block; `rows` are 0 but at their tokens, where they have the draft's probability.

        A block follows from the text before it, without a draw.  So only one token could be committed at an accepted
        position, at a distance of 1 - target from the target's distribution.
        """
        target = probabilities(logits, self.sampling) if launched is None else launched
        ids = torch.tensor(tokens, device=target.device).unsqueeze(1)
        target_probs = target.gather(1, ids).squeeze(1).tolist()
        draft_probs = [row[token].item() for row, token in zip(rows, tokens, strict=True)]
        accepted, ratio = 0, 1.0
        for count, (own, other) in enumerate(zip(target_probs, draft_probs, strict=True), start=1):
            # A broken draft's probabilities can make the ratio infinite, and infinity times 0 is NaN, which would pass.
            ratio = ratio * own / other if own and other else 0.0
            if min(1.0, ratio) > self._tau:
                accepted = count
        is_whole, bias = accepted == len(tokens), sum(max(0.0, 1 - own) for own in target_probs[:accepted])
        odds = Odds(float(not is_whole), 0.0, bias)
        if is_whole:
            return Judgement(accepted, None, odds)
        own = pick(target[accepted], self._keys(start + accepted, Purpose.CORRECTION))
        return Judgement(accepted, read_draw(own), odds)
