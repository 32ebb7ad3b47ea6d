"""The direct rules: the target's own draw is always what is committed; the draft guesses it by making the same draw.

With a temperature this is `coupled`, drafter-invariant decoding: both models race with the same exponentials (purpose
DIRECT), and acceptance is at least (1-TV)/(1+TV).  At temperature 0 it is greedy decoding.  Nothing but tokens crosses
the wire.  Source: "Coupling without communication", Daliri, Musco, Suresh 2024.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from pearl.decoding.keys import DrawKeys, Purpose
from pearl.decoding.rules import Judgement
from pearl.decoding.sampling import greedy, greedy_on_device, probabilities, race, race_on_device, read_draw
from pearl.protocol.messages import Sampling


class DirectDraw:
    """The keyed draw from one model's own distribution; greedy at temperature 0."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._keys = DrawKeys(sampling)

    def __call__(self, logits: torch.Tensor, position: int) -> int:
        """The token id for `position`, from logits [vocab]. Raises `NumericalError` where these are not finite."""
        if self.sampling.temperature == 0:
            return greedy(logits)
        return race(probabilities(logits, self.sampling), self._keys(position, Purpose.DIRECT))

    def on_device(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        """The same as a draw on the device, for `sampling.read_draw`."""
        if self.sampling.temperature == 0:
            return greedy_on_device(logits)
        return race_on_device(probabilities(logits, self.sampling), self._keys(position, Purpose.DIRECT))


class DirectDraft:
    """Drafts the draft model's direct draw."""

    def __init__(self, sampling: Sampling) -> None:
        self._draw = DirectDraw(sampling)

    def draft(self, logits: torch.Tensor, position: int) -> tuple[int, torch.Tensor | None]:
        return self._draw(logits, position), None

    def draft_on_device(self, logits: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._draw.on_device(logits, position), None


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
        draws: Iterator[int]
        if logits.is_cpu:
            draws = (self._draw(row, start + i) for i, row in enumerate(logits))  # none after a rejection
        else:
            draws = map(read_draw, self._draw_all(logits, start))
        for i, (token, own) in enumerate(zip(tokens, draws, strict=True)):
            if own != token:
                return Judgement(i, own)
        return Judgement(len(tokens), None)

    def _draw_all(self, logits: torch.Tensor, start: int) -> torch.Tensor:
        """The draw of every row, [n, 2], copied to the host together."""
        return torch.stack([self._draw.on_device(row, start + i) for i, row in enumerate(logits)]).cpu()
