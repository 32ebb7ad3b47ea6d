"""The direct rules: the target's own draw is always what is committed; the draft guesses it by making the same draw.

With a temperature this is `coupled`, drafter-invariant decoding: both models race with the same exponentials (purpose
DIRECT), and acceptance is at least (1-TV)/(1+TV).  At temperature 0 it is greedy decoding.  Nothing but tokens crosses
the wire.  Source: "Coupling without communication", Daliri, Musco, Suresh 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pearl.decoding.keys import DrawKeys, Purpose, exponentials
from pearl.decoding.rules import Judgement
from pearl.decoding.sampling import (
    Shortlist,
    greedy,
    probabilities,
    race,
    race_of_logits,
    race_on_device,
    read_draw,
    shares,
    shortlist,
)
from pearl.protocol.messages import Sampling

_MANY = 4096  # tokens: of fewer a race of all is as fast


class DirectDraw:
    """The keyed draw from one model's own distribution; greedy at temperature 0."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._keys = DrawKeys(sampling)
        self._raced: tuple[npt.NDArray[np.int64] | None, int, npt.NDArray[np.float64]] = None, 0, np.empty(0)
        self._is_plain = not sampling.top_k and sampling.top_p == 1 and not sampling.min_p

    def __call__(self, logits: torch.Tensor, position: int, top: Shortlist | None = None) -> torch.Tensor:
        """The draw for `position` from logits [vocab], for `sampling.read_draw`. `top`: their shortlist, if known."""
        temperature = self.sampling.temperature
        if temperature == 0:
            return greedy(logits)
        key = self._keys(position, Purpose.DIRECT)
        if self._is_plain and logits.is_cpu and logits.dtype is torch.float32 and len(logits) >= _MANY:
            top = top or shortlist(logits)
            draw, times = race_of_logits(logits, key, temperature, top)
            self._raced = top[0], position, times
            return draw
        return race(probabilities(logits, self.sampling), key)

    def rows(self, logits: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """The draws [n, 2] from logits [n, vocab] on a device other than the host, launched together."""
        if self.sampling.temperature == 0:
            return greedy(logits)
        keys = [self._keys(position, Purpose.DIRECT) for position in positions]
        return race_on_device(probabilities(logits, self.sampling), keys)

    def ranked(
        self, ids: npt.NDArray[np.int64], logits: npt.NDArray[np.float64], position: int, count: int
    ) -> tuple[list[int], list[float]]:
        """The first `count` of the draw for `position` among the likeliest tokens, and their shares of these."""
        temperature, (raced, at, times) = self.sampling.temperature, self._raced
        if raced is ids and at == position:
            weights = 1 / times  # what the draw from the same row has found
        else:
            weights = shares(logits, temperature)
            if temperature:
                weights /= exponentials(self._keys(position, Purpose.DIRECT), ids)
        order = np.argsort(-weights)[:count]
        return ids[order].tolist(), (weights[order] / weights.sum()).tolist()


class DirectDraft:
    """Drafts the draft model's direct draw."""

    def __init__(self, sampling: Sampling) -> None:
        self._draw = DirectDraw(sampling)

    def draft(
        self, logits: torch.Tensor, position: int, top: Shortlist | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._draw(logits, position, top), None

    def likeliest(
        self,
        ids: npt.NDArray[np.int64],
        logits: npt.NDArray[np.float64],
        position: int,
        count: int,
        is_root: bool = False,
    ) -> tuple[list[int], list[float]]:
        """The first of the race: the target runs it with the same exponentials."""
        return self._draw.ranked(ids, logits, position, count)


class DirectTarget:
    """Accepts a token that equals the target's direct draw, and corrects any other to it."""

    def __init__(self, sampling: Sampling) -> None:
        self._draw = DirectDraw(sampling)

    def launch(self, logits: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        return self._draw.rows(logits, positions).to("cpu", non_blocking=True)

    def judge(
        self,
        logits: torch.Tensor,
        tokens: Sequence[int],
        rows: Sequence[torch.Tensor],
        start: int,
        launched: torch.Tensor | None = None,
    ) -> Judgement:
        # On a CPU none is drawn after a rejection.
        draws = (self._draw(row, start + i) for i, row in enumerate(logits)) if launched is None else iter(launched)
        for i, (token, draw) in enumerate(zip(tokens, draws, strict=True)):
            if (own := read_draw(draw)) != token:
                return Judgement(i, own)
        return Judgement(len(tokens), None)
