"""The direct rules: the target's own draw is always what is committed; the draft guesses it by making the same draw.

With a temperature this is `coupled`, drafter-invariant decoding: both models race with the same exponentials (purpose
DIRECT), and acceptance is at least (1-TV)/(1+TV).  At temperature 0 it is greedy decoding.  Nothing but tokens crosses
the wire.  Source: "Coupling without communication", Daliri, Musco, Suresh 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pearl.config.options import RequestOptions
from pearl.decoding.keys import Purpose, draw_key, exponentials
from pearl.decoding.rules import Drafted, Tops
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
    """The keyed draw from one model's own distribution; greedy at temperature 0."""

    def __init__(self, options: RequestOptions) -> None:
        self.options = options
        self.is_filtered = options.top_k > 0 or options.top_p < 1 or options.min_p > 0

    def __call__(self, logits: Tensor, position: int, top: Shortlist | None = None) -> Tensor:
        """The draw for `position` from logits [vocab], for `sampling.read_draw`. `top`: their shortlist, if known."""
        if self.options.temperature == 0:
            return greedy(logits)
        if not self.is_filtered:
            return race_of_logits(logits, self.options.temperature, self.key(position), top)
        return race(probabilities(logits, self.options), self.key(position))

    def rows(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """The draws [n, 2] from logits [n, vocab], launched together."""
        if self.options.temperature == 0:
            return greedy(logits)
        keys = [self.key(position) for position in positions]
        if not self.is_filtered:
            return race_rows_of_logits(logits, self.options.temperature, keys)
        return race_rows(probabilities(logits, self.options), keys)

    def key(self, position: int) -> int:
        return draw_key(self.options, position, Purpose.DIRECT)


class DirectDraft:
    """Drafts the draft model's direct draw."""

    def __init__(self, options: RequestOptions) -> None:
        self._draw = DirectDraw(options)

    def draft(
        self, logits: Sequence[Tensor], positions: Sequence[int], tops: Tops = ()
    ) -> list[Drafted]:
        if logits[0].is_cpu:
            known: Sequence[Shortlist | None] = tops or [None] * len(logits)
            return [
                (self._draw(*each), None) for each in zip(logits, positions, known, strict=True)
            ]
        return [(draw, None) for draw in self._draw.rows(torch.stack(list(logits)), positions)]

    def likeliest(
        self, top: Shortlist, position: int, count: int, is_root: bool = False
    ) -> tuple[list[int], list[float]]:
        """The first of the race: the target runs it with the same exponentials."""
        ids, logits = top
        temperature = self._draw.options.temperature
        weights = shares(logits, temperature)
        if temperature:
            weights /= exponentials(self._draw.key(position), ids).numpy()
        order = np.argsort(-weights)[:count]
        return ids[order].tolist(), (weights[order] / weights.sum()).tolist()


class DirectTarget:
    """Accepts a token that equals the target's direct draw, and corrects any other to it."""

    def __init__(self, options: RequestOptions) -> None:
        self._draw = DirectDraw(options)

    def launch(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        return self._draw.rows(logits, positions).to("cpu", non_blocking=True)

    def judge(
        self,
        logits: Tensor,
        tokens: Sequence[int],
        rows: Sequence[Tensor],
        start: int,
        launched: Tensor | None = None,
    ) -> Judged:
        # The host draws none behind a rejection.
        draws = (
            (self._draw(row, start + i) for i, row in enumerate(logits))
            if launched is None
            else iter(launched)
        )
        for i, (token, draw) in enumerate(zip(tokens, draws, strict=True)):
            if (own := read_draw(draw)) != token:
                return Judged(i, own)
        return Judged(len(tokens), None)
