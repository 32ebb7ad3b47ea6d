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
    race_on_device,
    races_of_logits,
    read_draw,
    shares,
    shortlist,
)
from pearl.protocol.options import Sampling

_MANY = 4096  # tokens: of fewer a race of all is as fast


class DirectDraw:
    """The keyed draw from one model's own distribution; greedy at temperature 0."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._keys = DrawKeys(sampling)
        self._raced: list[tuple[npt.NDArray[np.int64], int, npt.NDArray[np.float64]]] = []  # ids, position, times
        self._is_plain = not sampling.top_k and sampling.top_p == 1 and not sampling.min_p

    def __call__(self, logits: torch.Tensor, position: int, top: Shortlist | None = None) -> torch.Tensor:
        """The draw for `position` from logits [vocab], for `sampling.read_draw`. `top`: their shortlist, if known."""
        if self.sampling.temperature == 0:
            return greedy(logits)
        if self._is_raced(logits):
            return self._race([logits], [position], [top or shortlist(logits)])[0]
        return race(probabilities(logits, self.sampling), self._keys(position, Purpose.DIRECT))

    def together(
        self, logits: Sequence[torch.Tensor], positions: Sequence[int], tops: Sequence[Shortlist | None]
    ) -> list[torch.Tensor]:
        """The draws for `positions` from rows [vocab]: one by one they take longer. `tops`: as above, of each."""
        if self.sampling.temperature and self._is_raced(logits[0]):
            known = [top or shortlist(row) for top, row in zip(tops, logits, strict=True)]
            return self._race(logits, positions, known)
        if logits[0].is_cpu:
            return [self(row, position) for row, position in zip(logits, positions, strict=True)]
        return list(self.rows(torch.stack(list(logits)), positions))

    def _is_raced(self, logits: torch.Tensor) -> bool:
        """Whether the likeliest tokens of a row [vocab] make a race of few."""
        return self._is_plain and logits.is_cpu and logits.dtype is torch.float32 and len(logits) >= _MANY

    def _race(
        self, logits: Sequence[torch.Tensor], positions: Sequence[int], tops: Sequence[Shortlist]
    ) -> list[torch.Tensor]:
        keys = [self._keys(position, Purpose.DIRECT) for position in positions]
        draws, times = races_of_logits(logits, keys, self.sampling.temperature, tops)
        self._raced = [(ids, position, of) for (ids, _), position, of in zip(tops, positions, times, strict=True)]
        return draws

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
        temperature = self.sampling.temperature
        raced = next((times for of, at, times in self._raced if of is ids and at == position), None)
        if raced is not None:
            weights = 1 / raced  # what the draw from the same row has found
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

    def draft_together(
        self, logits: Sequence[torch.Tensor], positions: Sequence[int], tops: Sequence[Shortlist | None]
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        return [(draw, None) for draw in self._draw.together(logits, positions, tops)]

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
