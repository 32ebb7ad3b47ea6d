"""The direct rules: every committed token is the target's own draw, which the draft tries to guess.

The draft draws from its own distribution with the same random numbers as the target.  Above
temperature 0 this is rule `coupled`, drafter-invariant decoding.  Both models run an exponential
race (see `sampling.race`) with the same exponentials, those with the key of `Purpose.DIRECT`.  Let
TV be the total variation distance of the two distributions.  Then the acceptance rate is at least
(1-TV)/(1+TV).  At temperature 0 this is greedy decoding.  The draft sends only tokens, no
distributions.  Source: "Coupling without communication", Daliri, Musco, Suresh 2024.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pearl.config.options import RequestOptions
from pearl.decoding.keys import Purpose, draw_key, exponentials
from pearl.decoding.rules import Drafted, Proposed, Tops
from pearl.decoding.sampling import (
    Shortlist,
    greedy,
    probabilities,
    race,
    race_of_logits,
    race_rows,
    race_rows_of_logits,
    read_draw,
    shares,
)
from pearl.protocol.events import Judged


class DirectDraw:
    """Draws from one model's distribution with keyed random numbers; greedy at temperature 0."""

    def __init__(self, options: RequestOptions) -> None:
        self.options = options
        self.is_filtered = options.top_k > 0 or options.top_p < 1 or options.min_p > 0

    def __call__(self, logits: Tensor, position: int, top: Shortlist | None = None) -> Tensor:
        """Return the draw for `position` from logits [vocab].

        `top`: the shortlist of the logits; None if it is not known.
        """
        if self.options.temperature == 0:
            return greedy(logits)
        if not self.is_filtered:
            return race_of_logits(logits, self.options.temperature, self.key(position), top)
        return race(probabilities(logits, self.options), self.key(position))

    def rows(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """Launch the draws from all rows of logits [n, vocab] together; return them, [n, 2]."""
        if self.options.temperature == 0:
            return greedy(logits)
        keys = [self.key(position) for position in positions]
        if not self.is_filtered:
            return race_rows_of_logits(logits, self.options.temperature, keys)
        return race_rows(probabilities(logits, self.options), keys)

    def key(self, position: int) -> int:
        return draw_key(self.options, position, Purpose.DIRECT)


class DirectDraft:
    """Drafts the draft model's own draws, made with the target's random numbers."""

    def __init__(self, options: RequestOptions) -> None:
        self._draw = DirectDraw(options)

    def draft(
        self, logits: Sequence[Tensor], positions: Sequence[int], tops: Tops = ()
    ) -> list[Drafted]:
        if not logits[0].is_cpu:
            draws = self._draw.rows(torch.stack(list(logits)), positions)
            return [(draw, None) for draw in draws]
        shortlists: Sequence[Shortlist | None] = tops or [None] * len(logits)
        drafted: list[Drafted] = []
        for row, position, top in zip(logits, positions, shortlists, strict=True):
            drafted.append((self._draw(row, position, top), None))
        return drafted

    def likeliest(
        self, top: Shortlist, position: int, count: int, is_root: bool = False
    ) -> tuple[list[int], list[float]]:
        """Rank tokens by their times in the race, which the target runs with the same numbers."""
        ids, logits = top
        temperature = self._draw.options.temperature
        weights = shares(logits, temperature)
        if temperature:
            weights /= exponentials(self._draw.key(position), ids).numpy()
        order = np.argsort(-weights)[:count]
        return ids[order].tolist(), (weights[order] / weights.sum()).tolist()


class DirectTarget:
    """Accepts a draft token if it equals the target's own draw, and otherwise commits that draw."""

    def __init__(self, options: RequestOptions) -> None:
        self._draw = DirectDraw(options)

    def launch(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        return self._draw.rows(logits, positions).to("cpu", non_blocking=True)

    def judge(self, proposed: Proposed) -> Judged:
        launched = proposed.launched
        for i, token in enumerate(proposed.tokens):
            if launched is None:  # on the host, nothing is drawn after a rejection
                draw = self._draw(proposed.logits[i], proposed.start + i)
            else:
                draw = launched[i]
            target_token = read_draw(draw)
            if target_token != token:
                return Judged(i, target_token)
        return Judged(len(proposed.tokens), None)
