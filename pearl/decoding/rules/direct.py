"""The direct rules: the target's own draw is always what is committed; the draft guesses it by making the same draw.

With a temperature this is `coupled`, drafter-invariant decoding: both models race with the same exponentials (purpose
DIRECT), and acceptance is at least (1-TV)/(1+TV).  At temperature 0 it is greedy decoding.  Nothing but tokens crosses
the wire.  Source: "Coupling without communication", Daliri, Musco, Suresh 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pearl.decoding.keys import DrawKeys, Purpose
from pearl.decoding.rules import Judgement
from pearl.decoding.sampling import greedy, probabilities, race, read_draw
from pearl.protocol.messages import Sampling


class DirectDraw:
    """The keyed draw from one model's own distribution; greedy at temperature 0."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._keys = DrawKeys(sampling)

    def __call__(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        """The draw for `position` from logits [vocab], for `sampling.read_draw`."""
        if self.sampling.temperature == 0:
            return greedy(logits)
        return race(probabilities(logits, self.sampling), self._keys(position, Purpose.DIRECT))


class DirectDraft:
    """Drafts the draft model's direct draw."""

    def __init__(self, sampling: Sampling) -> None:
        self._draw = DirectDraw(sampling)

    def draft(self, logits: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._draw(logits, position), None


class DirectTarget:
    """Accepts a token that equals the target's direct draw, and corrects any other to it."""

    def __init__(self, sampling: Sampling) -> None:
        self._draw = DirectDraw(sampling)

    def judge(
        self,
        logits: torch.Tensor,
        tokens: Sequence[int],
        rows: Sequence[torch.Tensor],
        start: int,
    ) -> Judgement:
        draws = (self._draw(row, start + i) for i, row in enumerate(logits))
        if not logits.is_cpu:  # one copy for all; on a CPU none is drawn after a rejection
            draws = iter(torch.stack([*draws]).cpu())
        for i, (token, draw) in enumerate(zip(tokens, draws, strict=True)):
            if (own := read_draw(draw)) != token:
                return Judgement(i, own)
        return Judgement(len(tokens), None)
