"""Steps that draw token by token: the text's next token, or as many as were guessed right; and branches.

`step` says what a step is, and which state it works on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter

import torch

from pearl.decoding.sampling import read_draw, read_shortlist, shortlist
from pearl.drafting.branches import Branch, Outcome, see
from pearl.drafting.step import (
    PROMPT_PIECE,
    DraftModel,
    DraftText,
    DrawnRow,
    Step,
    draw_rows,
    shape_of,
)
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
        guesses: a chain of tokens that this model may draw after `tokens`.
        continued: branches to continue in the same forward.
    """

    def __init__(
        self,
        model: DraftModel,
        text: DraftText,
        command: Draft,
        tokens: Sequence[int] | torch.Tensor,
        guesses: Sequence[int] = (),
        continued: Sequence[Branch] = (),
    ) -> None:
        fed = tokens
        if not isinstance(tokens, torch.Tensor):
            fed = [*model.fit_tokens(tokens), *guesses]
        feeds = [Feed(fed, 1 + len(guesses), text.slot, prompt=command.prompt)]
        feeds += branch_feeds(model, continued)
        super().__init__(model, text, command, feeds)
        is_drawn_on_device = isinstance(tokens, torch.Tensor)
        is_continued = is_drawn_on_device or text.last_drawn == (self.end - 1, command.tokens[-1])
        self._is_root = not is_continued
        self._is_ranked = text.branches is not None or text.ranks
        self._guesses = guesses
        self._continued = continued
        self._drafted: list[DrawnRow] = []
        self._seen: list[Seen] = []
        self._is_paused = False
        self._proposals: tuple[Proposal, ...] = ()

    def draw(self, logits: Sequence[torch.Tensor]) -> None:
        text_rows = self._text_rows(logits)
        if self.model.chains and not self._guesses and not self._continued:
            (row,) = text_rows
            self._launch(row)
            return
        branch_rows = self.model.fit_rows(row for (row,) in logits[1:])
        self._take(self._drawn_rows(text_rows, branch_rows))
        if self._guesses:
            self.model.runner.rollback(self.end + len(self._drafted) - 1, self.text.slot)
        if self.text.branches is not None:
            self._proposals = self.text.branches.proposals

    def _text_rows(self, logits: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the rows [vocab] of the text's feed: one if it is shaped, because such texts have no guesses."""
        rows = self.model.fit_rows(logits[0])
        shaper = self.text.shaper
        return rows if shaper is None else list(map(shaper.shape, rows))

    def _launch(self, row: torch.Tensor) -> None:
        """Launch the draw from a row [vocab], and its copies to the host."""
        text = self.text
        ((draw, probs),) = text.half.draft([row], [self.end])
        shape = None
        if text.window is not None:
            shape = shape_of(row, draw[1:]).to("cpu", non_blocking=True)
        self._top: torch.Tensor | None = None
        if self._is_ranked:
            self._top = shortlist(row).to("cpu", non_blocking=True)
        host_draw = draw.to("cpu", non_blocking=True)
        self._launched = DrawnRow(self.end, None, host_draw, probs, shape)
        # If logits are not finite the draw may be any number, and a wrong id would abort the process.
        self.following = draw[1:].long().clamp_(0, self.model.runner.vocab_size - 1)

    def _drawn_rows(
        self, text_rows: Sequence[torch.Tensor], branch_rows: Sequence[torch.Tensor]
    ) -> Iterator[DrawnRow]:
        """Draw for branches and extend them, then yield the text's rows with their draws."""
        at_once = len(text_rows) if self.model.at_once else 1
        text_positions = range(self.end, self.end + len(text_rows))
        positions = [branch.end for branch in self._continued]
        positions += text_positions[:at_once]
        rows = [*branch_rows, *text_rows[:at_once]]
        drawn = draw_rows(self.text, rows, positions, self._is_ranked)
        extend_branches(self.text, self._continued, drawn[: len(branch_rows)])
        yield from drawn[len(branch_rows) :]
        for row, position in zip(text_rows[at_once:], text_positions[at_once:], strict=True):
            yield from draw_rows(self.text, [row], [position], self._is_ranked)

    def _take(self, rows: Iterable[DrawnRow]) -> None:
        """Take in the drawn tokens up to the first that was guessed otherwise, or where the window ends."""
        text = self.text
        for i, row in enumerate(rows):
            token = read_draw(row.draw)
            if text.window is not None and row.shape is not None:
                self._is_paused = text.window.stops(row.position, token, row.shape.tolist())
            self._drafted.append(row)
            if row.top is not None:
                is_root = self._is_root and i == 0
                self._seen.append(see(row.top, row.position, token, text.half, is_root))
            if text.branches is not None:
                text.branches.add_drafted(row.position, token, self._seen[-1])
            if self._is_paused or (i < len(self._guesses) and token != self._guesses[i]):
                break
        text.last_drawn = row.position, token

    def collect(self) -> Drafted:
        text = self.text
        if self.following is not None:
            self._collect_launched()
        proposed = self._drafted
        if self._is_paused and text.options.withholds:
            proposed = proposed[:-1]
        return Drafted(
            tuple(read_draw(row.draw) for row in proposed),
            rows=tuple(row.probs for row in proposed if row.probs is not None),
            cached=len(self._drafted) - 1,
            paused=self._is_paused,
            branches=self._proposals,
            seen=tuple(self._seen) if text.ranks else (),
        )

    def _collect_launched(self) -> None:
        row = self._launched
        if self._top is not None:
            (top,) = read_shortlist(self._top)
            row = replace(row, top=top)
        self._take([row])
        index = self.text.index
        if index is not None:  # the next forward may be out without this token
            index.cut(self.end)
            index.extend([read_draw(row.draw)])


class BranchStep(Step):
    """Continues branches only, while the draft is at its look-ahead limit: those that make most tokens a second.

    Args:
        other_tokens: tokens that the forward is fed for other requests.
        sharing: texts that share the rows that are left.
    """

    def __init__(
        self,
        model: DraftModel,
        text: DraftText,
        command: Draft,
        other_tokens: int,
        sharing: int = 1,
    ) -> None:
        unfed = text.unfed(command)
        text.read_states(model.runner)
        feeds: list[Feed] = []
        if unfed:
            feeds.append(Feed(model.fit_tokens(unfed), int(command.bonus), text.slot))
        self._has_text_feed = bool(unfed)
        self._continued: list[Branch] = []
        if text.branches is not None:
            cached = model.runner.length(text.slot)
            until = model.runner.context
            fed = other_tokens + len(unfed)
            worth = text.branches.worth(text.options.branches, cached, until, command.hedge)
            worth = worth[: model.room(fed) // sharing]
            chances = [chance for chance, _ in worth]
            count = worthwhile(chances, fed, float(self._has_text_feed), model.times.seconds)
            outcomes = [outcome for _, outcome in worth[:count]]
            self._continued = text.branches.make(outcomes, text.slot)
        feeds += branch_feeds(model, self._continued)
        super().__init__(model, text, command, feeds)

    def draw(self, logits: Sequence[torch.Tensor]) -> None:
        branches = self.text.branches
        if branches is None:
            return
        if self._has_text_feed and self.command.bonus:
            branches.see_bonus(self.end, self.text.half, self.model.fit(logits[0][0]))
        rows = self.model.fit_rows(row for (row,) in logits[self._has_text_feed :])
        positions = [branch.end for branch in self._continued]
        drawn = draw_rows(self.text, rows, positions, is_ranked=True)
        extend_branches(self.text, self._continued, drawn)

    def collect(self) -> Drafted:
        branches = self.text.branches
        proposals = () if branches is None else branches.proposals
        return Drafted(paused=not self.feeds, branches=proposals)


def branch_feeds(model: DraftModel, branches: Iterable[Branch]) -> list[Feed]:
    return [Feed(model.fit_tokens([branch.unfed]), 1, branch.slot) for branch in branches]


def extend_branches(text: DraftText, branches: Sequence[Branch], rows: Sequence[DrawnRow]) -> None:
    """Add each branch's next token, from its row. A row without a draw ends its branch, and fails no request."""
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
        if row.probs is not None:
            branch.rows.append(row.probs)


def plan_draw(
    model: DraftModel, text: DraftText, command: Draft, other_tokens: int, sharing: int = 1
) -> Step:
    """Make the step that feeds the command's tokens, with the guesses and branches that make most tokens a second.

    Args:
        other_tokens: tokens that the forward is fed for other requests.
        sharing: texts that share the rows that are left.
    """
    tokens = text.unfed(command)
    text.read_states(model.runner)
    guesses, chances = text.guess(command)
    if not command.budget:
        feed = Feed(model.fit_tokens(tokens), 0, text.slot, prompt=command.prompt)
        return Step(model, text, command, [feed])
    chosen: list[Outcome | None] = []
    if len(tokens) <= PROMPT_PIECE:
        chosen = choose(model, text, command, chances, len(tokens), other_tokens, sharing)
    guesses = model.fit_tokens(guesses[: chosen.count(None)])
    continued: list[Branch] = []
    if text.branches is not None:
        outcomes = [outcome for outcome in chosen if outcome is not None]
        continued = text.branches.make(outcomes, text.slot)
    return DrawStep(model, text, command, tokens, guesses, continued)


def choose(
    model: DraftModel,
    text: DraftText,
    command: Draft,
    chances: Sequence[float],
    num_tokens: int,
    other_tokens: int = 0,
    sharing: int = 1,
) -> list[Outcome | None]:
    """Choose what to feed with `num_tokens` tokens of a text, best first: outcomes to continue, and None for a guess.

    Args:
        chances: of the guesses, see `DraftText.guess`.
        other_tokens, sharing: see `plan_draw`.
    """
    branches = text.branches
    fed = other_tokens + num_tokens
    reach = 1.0
    ranked: list[tuple[float, Outcome | None]] = []
    if branches is not None:
        reach = branches.reach()
        until = command.start + len(command.tokens) + command.budget
        ranked += branches.worth(text.options.branches, model.runner.length(text.slot), until)
    for chance in chances:
        ranked.append((reach * chance, None))
    ranked.sort(key=itemgetter(0), reverse=True)
    ranked = ranked[: model.room(fed) // sharing]
    # Forwards of several texts are not chained.
    seconds = model.times.seconds if other_tokens else model.seconds(fed)
    count = worthwhile([chance for chance, _ in ranked], fed, reach, seconds)
    return [outcome for _, outcome in ranked[:count]]
