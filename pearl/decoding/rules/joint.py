"""The joint rule: what is accepted is decided by the likelihood of tokens together, not one by one.

The draft looks for the likeliest block of `depth` tokens by beam search.  The target scores it whole: the longest part
of which the joint ratio, the product of target / draft over its tokens, exceeds tau is accepted, even where a shorter
part does not pass; then one token is drawn from the target.  So a token that the target finds unlikely is accepted
where what follows makes up for it.

Not exact, on purpose: it prefers texts that are likely as a whole.  Source: Qin et al. 2024, multi-token joint
speculative decoding, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pearl.decoding.keys import DrawKeys, Purpose
from pearl.decoding.rules import Judgement
from pearl.decoding.rules.ratio import RatioDraft
from pearl.decoding.sampling import Shortlist, pick, probabilities, read_draw
from pearl.protocol.events import Odds
from pearl.protocol.options import Sampling


class JointDraft(RatioDraft):
    """Scores what a search for a block finds.

    Attributes:
        depth: tokens of a block.
        width: sequences that the search keeps.
    """

    def __init__(self, sampling: Sampling, tau: float, depth: int, width: int) -> None:
        super().__init__(sampling)
        self.depth, self.width = depth, width

    def draft(
        self, logits: torch.Tensor, position: int, top: Shortlist | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A block of one token: the likeliest."""
        probs = probabilities(logits, self.sampling)
        best, token = probs.max(-1)
        row = torch.zeros_like(probs)
        row[token] = best
        return torch.stack((best.double(), token.double())), row


class JointTarget:
    """Accepts the longest part of a block that is likely enough as a whole.

    Args:
        tau: the joint ratio that must be exceeded; 0 accepts all that the target allows, 1 nothing.
    """

    def __init__(self, sampling: Sampling, tau: float, depth: int, width: int) -> None:
        self.sampling, self._tau = sampling, tau
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
        """`tokens` are a block; `rows` are 0 but at their tokens: what the draft gave each after those before it.

        The block follows from the text before it, by no draw.  So each accepted token was the only one that could be
        committed there, which is 1 - target from the target's distribution; and whether all are accepted was certain.
        """
        target = probabilities(logits, self.sampling) if launched is None else launched
        ids = torch.tensor(tokens, device=target.device).unsqueeze(1)
        likely = target.gather(1, ids).squeeze(1).tolist()
        drafted = [row[token].item() for row, token in zip(rows, tokens, strict=True)]
        accepted, ratio = 0, 1.0
        for count, (own, other) in enumerate(zip(likely, drafted, strict=True), start=1):
            # A broken draft's numbers make a ratio that is not finite, and that times 0 is no number, which would pass.
            ratio = ratio * own / other if own and other else 0.0
            if min(1.0, ratio) > self._tau:
                accepted = count
        is_whole, bias = accepted == len(tokens), sum(max(0.0, 1 - own) for own in likely[:accepted])
        odds = Odds(float(not is_whole), 0.0, bias)
        if is_whole:
            return Judgement(accepted, None, odds)
        own = pick(target[accepted], self._keys(start + accepted, Purpose.CORRECTION))
        return Judgement(accepted, read_draw(own), odds)
