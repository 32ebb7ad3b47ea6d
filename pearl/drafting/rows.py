"""Rows of a draft's forward, what is drawn from them, and what stop policies, branches and a trace see of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pearl.decoding.rules import DraftHalf
from pearl.decoding.sampling import Shortlist, on_host, read_shortlist, shortlist
from pearl.drafting.proposer import TOP


@dataclass(frozen=True, slots=True)
class Row:
    """Logits [vocab] of a forward, and what was drawn from them for a position.

    Attributes:
        top: the logits' shortlist; None where it was not asked for.
        draw: on the host.
        probs: what the target needs to judge the token, see `DraftHalf`.
    """

    logits: torch.Tensor
    position: int
    top: Shortlist | None
    draw: torch.Tensor
    probs: torch.Tensor | None

    @property
    def features(self) -> list[float]:
        return shape_of(self.logits, self.draw[1:].to(self.logits.device)).tolist()


def draw_rows(half: DraftHalf, rows: Sequence[torch.Tensor], positions: Sequence[int], is_ranked: bool) -> list[Row]:
    """Draw for `positions` from rows [vocab]; waits for a device once, and once more for shortlists if `is_ranked`."""
    if not rows:
        return []
    tops = read_shortlist(*map(shortlist, rows)) if is_ranked else []
    known: Sequence[Shortlist | None] = tops or [None] * len(rows)
    drafted = half.draft(rows, positions, tops)
    draws = on_host([draw for draw, _ in drafted])
    return [
        Row(logits, position, top, draw, probs)
        for logits, position, top, draw, (_, probs) in zip(rows, positions, known, draws, drafted, strict=True)
    ]


def shape_of(row: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """What stop policies see of logits [vocab]: the `TOP` largest probabilities, entropy, and that of `token` [1]."""
    probs = torch.softmax(row.float(), -1)
    top = probs.topk(min(TOP, len(probs))).values
    known = token.long().clamp(0, len(probs) - 1)  # a row that is not finite may draw any number
    return torch.cat((top, torch.special.entr(probs).sum()[None], probs[known]))
