"""Steps that draw: the text's next token, or as many as were guessed right; branches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

import torch

from pearl.decoding.sampling import read_draw, read_shortlist, shortlist
from pearl.drafting.branches import Branch, Outcome, see
from pearl.drafting.step import PROMPT_PIECE, DraftModel, Row, Step, Text, draw_rows, shape_of
from pearl.errors import NumericalError
from pearl.models.runner import Feed
from pearl.protocol.acceptance_estimates import Seen
from pearl.protocol.events import Draft, Drafted
from pearl.protocol.proposals import Proposal
from pearl.protocol.window import worthwhile


class DrawStep(Step):
    """Draws the next token, and position after position while each draw is what was guessed; continues branches.

    A chained forward without guesses and branches is not waited for: `collect` reads its draw.

    Args:
        tokens: to feed: ids, or the token that the step before draws on the device.
        guesses: of the tokens that this model draws, a chain behind `tokens`.
        continued: branches to continue in the same forward.
    """

    def __init__(
        self,
        model: DraftModel,
        text: Text,
        command: Draft,
        tokens: Sequence[int] | torch.Tensor,
        guesses: Sequence[int] = (),
        continued: Sequence[Branch] = (),
    ) -> None:
        fed = tokens if isinstance(tokens, torch.Tensor) else [*model.known(tokens), *guesses]
        feeds = [Feed(fed, 1 + len(guesses), text.slot, prompt=command.prompt)]
        feeds += [Feed(model.known([branch.unfed]), 1, branch.slot) for branch in continued]
        super().__init__(model, text, command, feeds)
        self._is_root = fed is not tokens and text.last_drawn != (self.end - 1, command.tokens[-1])
        self._is_ranked = text.branches is not None or text.ranks
        self._guesses, self._continued = guesses, continued
        self._drafted: list[Row] = []
        self._seen: list[Seen] = []
        self._is_paused = False
        self._proposals: tuple[Proposal, ...] = ()

    def draw(self, logits: Sequence[torch.Tensor]) -> None:
        if self.model.chains and not self._guesses and not self._continued:
            self._launch(*self._own(logits))
            return
        self._take(self._rows(logits))
        if self._guesses:
            self.model.runner.rollback(self.end + len(self._drafted) - 1, self.text.slot)
        if self.text.branches is not None:
            self._proposals = self.text.branches.proposals

    def _own(self, logits: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The rows [vocab] of the text's feed."""
        own, shaper = [self.model.fit(row) for row in logits[0]], self.text.shaper
        return (
            own if shaper is None else [shaper.shape(row) for row in own]
        )  # one: shaped texts have no guesses

    def _launch(self, row: torch.Tensor) -> None:
        text = self.text
        ((draw, self._probs),) = text.half.draft([row], [self.end])
        self._shape = (
            None if text.window is None else shape_of(row, draw[1:]).to("cpu", non_blocking=True)
        )
        self._top = shortlist(row).to("cpu", non_blocking=True) if self._is_ranked else None
        self._draw = draw.to("cpu", non_blocking=True)
        # If logits are not finite the draw may be any number, and a wrong id would abort the process.
        self.following = draw[1:].long().clamp_(0, self.model.runner.vocab_size - 1)

    def _rows(self, logits: Sequence[torch.Tensor]) -> Iterator[Row]:
        """The rows of the text's feed with their draws; those of branches are drawn and taken in before the first."""
        own, others = self._own(logits), [self.model.fit(row) for (row,) in logits[1:]]
        ends = [branch.end for branch in self._continued]
        count = len(own) if self.model.at_once else 1
        positions = range(self.end, self.end + len(own))
        rows = draw_rows(
            self.text, [*others, *own[:count]], [*ends, *positions[:count]], self._is_ranked
        )
        extend_branches(self.text, self._continued, rows[: len(others)])
        yield from rows[len(others) :]
        for row, position in zip(own[count:], positions[count:], strict=True):
            yield from draw_rows(self.text, [row], [position], self._is_ranked)

    def _take(self, rows: Iterable[Row]) -> None:
        """Take in the drawn tokens up to the first that was guessed otherwise, or where the window ends."""
        text = self.text
        for i, row in enumerate(rows):
            token = read_draw(row.draw)
            if text.window is not None and row.shape is not None:
                self._is_paused = text.window.stops(row.position, token, row.shape.tolist())
            self._drafted.append(row)
            if row.top is not None:
                self._seen.append(
                    see(row.top, row.position, token, text.half, self._is_root and i == 0)
                )
            if text.branches is not None:
                text.branches.add_drafted(row.position, token, self._seen[-1])
            if self._is_paused or (i < len(self._guesses) and token != self._guesses[i]):
                break
        text.last_drawn = row.position, token

    def collect(self) -> Drafted:
        text = self.text
        if self.following is not None:
            (top,) = [None] if self._top is None else read_shortlist(self._top)
            self._take([Row(self.end, top, self._draw, self._probs, self._shape)])
            if text.index is not None:  # the next forward may be out without this token
                text.index.cut(self.end)
                text.index.extend([read_draw(self._draw)])
        proposed = self._drafted[
            : len(self._drafted) - (self._is_paused and text.options.withholds)
        ]
        return Drafted(
            tuple(read_draw(row.draw) for row in proposed),
            rows=tuple(row.probs for row in proposed if row.probs is not None),
            cached=len(self._drafted) - 1,
            paused=self._is_paused,
            branches=self._proposals,
            seen=tuple(self._seen) if text.ranks else (),
        )


class BranchStep(Step):
    """Continues branches only, while the draft is at its look-ahead limit: those that make most tokens a second.

    Args:
        beside: tokens that the forward is fed for other requests.
        sharing: texts that share its other rows.
    """

    def __init__(
        self, model: DraftModel, text: Text, command: Draft, beside: int, sharing: int = 1
    ) -> None:
        unfed, branches = text.unfed(command), text.branches
        text.read_states(model.runner)
        self._has_own, self._continued = bool(unfed), list[Branch]()
        if branches is not None:
            cached, until, fed = model.runner.length(text.slot), model.runner.context, len(unfed)
            worth = branches.worth(text.options.branches, cached, until, command.hedge)
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
        extend_branches(
            self.text, self._continued, draw_rows(self.text, rows, ends, is_ranked=True)
        )

    def collect(self) -> Drafted:
        branches = self.text.branches
        return Drafted(
            paused=not self.feeds, branches=() if branches is None else branches.proposals
        )


def extend_branches(text: Text, branches: Sequence[Branch], rows: Sequence[Row]) -> None:
    """Add the next token of each, from its row. One that cannot be drawn ends its branch, and fails no request."""
    for branch, row in zip(branches, rows, strict=True):
        assert text.branches is not None
        try:
            token = read_draw(row.draw)
        except NumericalError:
            text.branches.end(branch)
            continue
        assert row.top is not None
        branch.seen.append(see(row.top, row.position, token, text.half))
        branch.tokens.append(token)
        branch.rows += [] if row.probs is None else [row.probs]


def plan_draw(model: DraftModel, text: Text, command: Draft, beside: int, sharing: int = 1) -> Step:
    """Feed the command's tokens, and beside them the guesses and branches that together make most tokens a second.

    Args:
        beside: tokens that the forward is fed for other requests.
        sharing: texts that share its other rows.
    """
    tokens, branches, chosen = text.unfed(command), text.branches, list[Outcome | None]()
    text.read_states(model.runner)
    guesses, chances = text.guess(command)
    if not command.budget:
        return Step(
            model, text, command, [Feed(model.known(tokens), 0, text.slot, prompt=command.prompt)]
        )
    if len(tokens) <= PROMPT_PIECE:
        chosen = choose(model, text, command, chances, len(tokens), beside, sharing)
    guesses, continued = model.known(guesses[: chosen.count(None)]), list[Branch]()
    if branches is not None:
        continued = branches.make([after for after in chosen if after is not None], text.slot)
    return DrawStep(model, text, command, tokens, guesses, continued)


def choose(
    model: DraftModel,
    text: Text,
    command: Draft,
    chances: Sequence[float],
    own: int,
    beside: int = 0,
    sharing: int = 1,
) -> list[Outcome | None]:
    """What to feed beside a text's `own` tokens, the best first: outcomes to continue, and None for each guess.

    Args:
        chances: of the guesses, see `Text.guess`.
        beside, sharing: see `plan_draw`.
    """
    reach, branches, fed = 1.0, text.branches, beside + own
    ranked: list[tuple[float, Outcome | None]] = []
    if branches is not None:
        reach, until = branches.reach(), command.start + len(command.tokens) + command.budget
        ranked += branches.worth(text.options.branches, model.runner.length(text.slot), until)
    ranked += [(reach * chance, None) for chance in chances]
    ranked = sorted(ranked, key=itemgetter(0), reverse=True)[: model.room(fed) // sharing]
    seconds = (
        model.times.seconds if beside else model.seconds(fed)
    )  # forwards of several texts are not chained
    count = worthwhile([chance for chance, _ in ranked], fed, reach, seconds)
    return [after for _, after in ranked[:count]]
