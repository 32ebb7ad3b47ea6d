"""Rows of a draft's forward, what is drawn from them, and what a stop policy and a trace see of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pearl.decoding.rules import DraftHalf
from pearl.decoding.sampling import SHORTLIST, Shortlist, on_host, shortlist, shortlists
from pearl.drafting.proposer import TOP
from pearl.drafting.stops import StopWindow


@dataclass(frozen=True, slots=True)
class Row:
    """Logits [vocab] of a forward, and what was drawn from them for a position.

    Attributes:
        top: their shortlist; None where nobody asks.
        draw, told: on the logits' device, and on the host.
        probs: what the target needs to judge the token, see `DraftHalf`.
    """

    logits: torch.Tensor
    position: int
    top: Shortlist | None
    draw: torch.Tensor
    told: torch.Tensor
    probs: torch.Tensor | None

    @property
    def features(self) -> torch.Tensor:
        return shape_of(self.logits, self.draw[1:])


def draw_together(
    rule: DraftHalf, rows: Sequence[torch.Tensor], positions: Sequence[int], is_ranked: bool
) -> list[Row]:
    """Draws for `positions` from rows [vocab]: a device is waited for once and, if `is_ranked`, once for shortlists."""
    if not rows:
        return []
    tops: Sequence[Shortlist | None] = shortlists(rows) if is_ranked else [None] * len(rows)
    drafted = rule.draft_together(rows, positions, tops)
    told = on_host([draw for draw, _ in drafted])
    return [
        Row(logits, position, top, draw, known, probs)
        for logits, position, top, (draw, probs), known in zip(rows, positions, tops, drafted, told, strict=True)
    ]


def shape_of(row: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Of logits [vocab] what stop policies see: the `TOP` largest probabilities, the entropy, and `token`'s [1]."""
    probs = torch.softmax(row.float(), -1)
    top = probs.topk(min(TOP, len(probs))).values
    known = token.long().clamp(0, len(probs) - 1)  # of a row that is not finite it may be anything
    return torch.cat((top, torch.special.entr(probs).sum()[None], probs[known]))


def largest_of(row: torch.Tensor) -> torch.Tensor:
    """[2, SHORTLIST] float64: the largest of logits [vocab], and their ids; nothing waits for a device."""
    if row.is_cpu:
        ids, logits = shortlist(row, SHORTLIST)
        return torch.from_numpy(np.stack((logits, ids)))
    values, indices = row.double().topk(min(SHORTLIST, len(row)))
    return torch.stack((values, indices.double()))


def confidence(window: StopWindow, position: int, features: torch.Tensor) -> float | None:
    *top, entropy, chosen = features.tolist()
    return window.confidence(position, top, entropy, chosen)


def pauses(window: StopWindow, position: int, token: int, features: torch.Tensor) -> bool:
    *top, entropy, chosen = features.tolist()
    return window.stops(position, token, top, entropy, chosen)
