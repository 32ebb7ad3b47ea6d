"""The joint rule, which accepts tokens by their joint likelihood and not one by one.

The draft searches for the likeliest block of `depth` tokens.  A token's ratio is its target
probability divided by its draft probability.  The joint ratio of the block's first n tokens is the
product of their ratios.  The target accepts the largest n whose joint ratio exceeds tau, even if a
smaller n does not pass.  So an unlikely token is accepted if the tokens after it make up for it.
If the target does not accept the whole block, it draws one more token itself.  At temperature 0 it
takes its likeliest token, so that the text is a function of the two models.

The rule is not exact, on purpose: it prefers texts that are likely as a whole.  Source: Qin et al.
2024, multi-token joint speculative decoding, algorithm 2.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pearl.config.options import RequestOptions
from pearl.decoding.keys import Purpose, draw_key
from pearl.decoding.rules import Proposed
from pearl.decoding.sampling import greedy, pick, probabilities, read_draw
from pearl.protocol.events import Judged, Odds


class JointDraft:
    """The draft's half of the joint rule: it scores tokens for the search in `drafting.beams`.

    The search is for a block of `depth` tokens, and keeps the `width` likeliest sequences.
    """

    def __init__(self, options: RequestOptions, depth: int, width: int) -> None:
        self.options = unwarped(options)
        self.depth = depth
        self.width = width

    def score(self, logits: Tensor) -> Tensor:
        """Return the probabilities [vocab] float32 by which the search continues a sequence."""
        return probabilities(logits, self.options)


class JointTarget:
    """Accepts as many of a block's first tokens as are likely enough together.

    Args:
        tau: the first tokens are accepted if min(1, their joint ratio) > tau. So 0 accepts
            everything that the target gives a probability above 0, and 1 accepts nothing.
        depth: number of tokens in a block.
    """

    def __init__(self, options: RequestOptions, tau: float, depth: int) -> None:
        self.options = unwarped(options)
        self._tau = tau
        self._is_greedy = options.temperature == 0
        self._is_by_token = depth == 1  # then several blocks, of a token each, are judged at once

    def launch(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        return probabilities(logits, self.options)

    def judge(self, proposed: Proposed) -> Judged:
        """Judge a block of tokens.

        A token's row in `proposed.rows` has the token's draft probability at the token's id, and 0
        at all other ids.

        The text before a block determines the block, because the beam search makes no random draw.
        So at an accepted position the block's token is certain.  The bias is the total variation
        distance of this certainty from the target's distribution: 1 - the token's target
        probability.  At temperature 0 the bias is 0 for the target's likeliest token, and 1 for any
        other.
        """
        tokens = proposed.tokens
        target = proposed.launched
        if target is None:
            target = self.launch(proposed.logits, ())
        ids = torch.tensor(tokens, device=target.device).unsqueeze(1)
        target_probs = target.gather(1, ids).squeeze(1).tolist()
        draft_probs = [row[token].item() for row, token in zip(proposed.rows, tokens, strict=True)]
        accepted = self._accepted(target_probs, draft_probs)
        is_whole = accepted == len(tokens)
        bias = self._bias(target[:accepted], target_probs[:accepted])
        odds = Odds(float(not is_whole), 0.0, bias)
        if is_whole:
            return Judged(accepted, None, odds=odds)
        if self._is_greedy:
            return Judged(accepted, read_draw(greedy(proposed.logits[accepted])), odds=odds)
        key = draw_key(self.options, proposed.start + accepted, Purpose.CORRECTION)
        return Judged(accepted, read_draw(pick(target[accepted], key)), odds=odds)

    def _accepted(self, target_probs: Sequence[float], draft_probs: Sequence[float]) -> int:
        """Return the largest number of first tokens whose joint ratio exceeds tau."""
        accepted = 0
        ratio = 1.0
        pairs = zip(target_probs, draft_probs, strict=True)
        for count, (target_prob, draft_prob) in enumerate(pairs, start=1):
            if self._is_by_token:
                ratio = 1.0
                if accepted < count - 1:
                    break
            # A broken draft's probabilities can make the ratio infinite, and infinity times 0 is NaN, which would pass.
            is_possible = target_prob and draft_prob
            ratio = ratio * target_prob / draft_prob if is_possible else 0.0
            if min(1.0, ratio) > self._tau:
                accepted = count
        return accepted

    def _bias(self, target: Tensor, target_probs: Sequence[float]) -> float:
        """Return the sum of the accepted tokens' biases, see `judge`.

        `target`: the target's distributions [accepted, vocab]. `target_probs`: the tokens'
        probabilities.
        """
        if not self._is_greedy:
            return sum(max(0.0, 1 - prob) for prob in target_probs)
        best = target.amax(-1).tolist()
        return sum(float(prob < most) for prob, most in zip(target_probs, best, strict=True))


def unwarped(options: RequestOptions) -> RequestOptions:
    """Return options by which sequences can be scored.

    At temperature 0 there is no distribution to score by. The result then has temperature 1 and no
    filters. Any other options are returned unchanged.
    """
    if options.temperature:
        return options
    return options.changed(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, sample=0)
