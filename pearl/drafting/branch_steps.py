"""Steps that continue branches: what may follow if the target decides otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pearl.decoding.sampling import read_draw
from pearl.drafting.branches import Branch, see
from pearl.drafting.rows import Row, draw_rows
from pearl.drafting.step import DraftModel, Step, Text
from pearl.errors import NumericalError
from pearl.models.runner import Feed
from pearl.protocol.events import Draft, Drafted
from pearl.protocol.window import worthwhile


class BranchStep(Step):
    """Continues branches only, while the draft is at its look-ahead limit: those that make most tokens a second.

    Args:
        beside: tokens that the forward is fed for other requests.
        sharing: texts that share its other rows.
    """

    def __init__(self, model: DraftModel, text: Text, command: Draft, beside: int, sharing: int = 1) -> None:
        unfed, branches = text.unfed(command), text.branches
        text.read_states(model.runner)
        self._has_own, self._continued = bool(unfed), list[Branch]()
        if branches is not None:
            cached, until, fed = model.runner.length(text.slot), model.runner.context, len(unfed)
            worth = branches.worth(text.max_branches, cached, until, command.hedge)
            chances = [chance for chance, _ in worth[: model.room(beside + fed) // sharing]]
            count = worthwhile(chances, beside + fed, float(fed > 0), model.times.seconds)
            self._continued = branches.make([after for _, after in worth[:count]], text.slot)
        feeds = [Feed(model.known(unfed), int(command.bonus), text.slot)] if unfed else []
        feeds += [Feed(model.known([branch.unfed]), 1, branch.slot) for branch in self._continued]
        super().__init__(model, text, command, feeds)

    def draw(self, logits: Sequence[torch.Tensor]) -> None:
        branches = self.text.branches
        if branches is None:
            return
        if self._has_own and self.command.bonus:
            branches.see_bonus(self.end, self.text.half, self.model.fit(logits[0][0]))
        rows = [self.model.fit(row) for (row,) in logits[self._has_own :]]
        ends = [branch.end for branch in self._continued]
        extend_branches(self.text, self._continued, draw_rows(self.text.half, rows, ends, is_ranked=True))

    def collect(self) -> Drafted:
        branches = self.text.branches
        return Drafted(paused=not self.feeds, branches=() if branches is None else branches.proposals)


def extend_branches(text: Text, branches: Sequence[Branch], rows: Sequence[Row]) -> None:
    """Add the next token of each, from its row. One that cannot be drawn ends its branch, and fails no request."""
    for branch, row in zip(branches, rows, strict=True):
        assert text.branches is not None
        try:
            token = read_draw(row.draw)
        except NumericalError:
            text.branches.end(branch)
            continue
        confidence = None if text.window is None else text.window.confidence(row.position, row.features)
        assert row.top is not None
        branch.seen.append(see(row.top, row.position, token, text.half, confidence=confidence))
        branch.tokens.append(token)
        branch.rows += [] if row.probs is None else [row.probs]
