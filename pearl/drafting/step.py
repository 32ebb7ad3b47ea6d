"""A step is one request's share of a draft forward: the tokens to feed, and the draws.

Three objects share the work, and each fact has one owner:

* `DraftModel`, one per process, owns the runner and the measured forward times.
* `DraftText`, one per request, owns the state that outlives a forward: the text's slot, the draft's
  half of the acceptance rule, the shaper of logits, the stop window, the n-gram index, the
  branches, and the search for a block.
* `Step`, one per request and forward, owns the feeds (what the runner is fed) and the draws from
  their logits. `plan` makes a step. `proposer.ModelProposer` runs one forward with the feeds of one
  or more steps, calls `draw`, and gets a proposal from `collect`.

A step draws the next tokens of the text and of the text's branches; a `beams.LevelStep` draws one
level of a beam search for a block.  Each step records its draws in the `DraftText`, and knows
nothing of other requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch

from pearl.decoding.sampling import Shortlist, on_host, read_draw, read_shortlist, shortlist
from pearl.drafting.branches import Branch, Outcome, see
from pearl.drafting.draft_text import PROMPT_PIECE, DraftText
from pearl.drafting.stops import TOP
from pearl.errors import NumericalError
from pearl.models.runner import Feed
from pearl.protocol.acceptance_estimates import Seen
from pearl.protocol.events import Draft, Drafted
from pearl.protocol.proposals import Proposal
from pearl.protocol.window import worthwhile


class HostMark:
    """Stands in for `torch.cuda.Event` on a CPU, where a forward is done when its call returns."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: HostMark, /) -> float:
        return 1000 * (end.at - self.at)


def make_mark(device: torch.device) -> Any:
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else HostMark()


@dataclass(frozen=True, slots=True)
class DrawnRow:
    """The draw for one position, from the logits [vocab] for it.

    Attributes:
        top: the likeliest tokens; None if neither branches nor runners-up need them.
        draw: the draw (see `decoding.sampling`), on the host.
        probs: the distribution that the token was drawn from; None if the rule needs none.
        shape: what a stop policy sees of the logits (see `shape_of`); None if the text has no stop
            policy.
    """

    position: int
    top: Shortlist | None
    draw: torch.Tensor
    probs: torch.Tensor | None
    shape: torch.Tensor | None


def draw_rows(
    text: DraftText, rows: Sequence[torch.Tensor], positions: Sequence[int], is_ranked: bool
) -> list[DrawnRow]:
    """Draw a token for each of `positions` from its logits [vocab] in `rows`.

    Waits for the device once. If `is_ranked`, waits once more, for the likeliest tokens of each
    row.
    """
    if not rows:
        return []
    tops = []
    if is_ranked:
        tops = read_shortlist(*map(shortlist, rows))
    drafted = text.half.draft(rows, positions, tops)
    draws = on_host([draw for draw, _ in drafted])
    drawn_rows = []
    for i, (device_draw, probs) in enumerate(drafted):
        top = tops[i] if is_ranked else None
        shape = None
        if text.window is not None:
            shape = shape_of(rows[i], device_draw[1:])
        drawn_rows.append(DrawnRow(positions[i], top, draws[i], probs, shape))
    return drawn_rows


def shape_of(row: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Return what a stop policy sees of the logits `row` [vocab], from which `token` [1] was drawn.

    The result is [the `TOP` largest probabilities, the entropy in nats, the token's probability].
    """
    probs = torch.softmax(row.float(), -1)
    top = probs.topk(min(TOP, len(probs))).values
    entropy = torch.special.entr(probs).sum()
    token_id = token.long().clamp(0, len(probs) - 1)  # a row that is not finite may draw any number
    return torch.cat((top, entropy[None], probs[token_id]))


@dataclass(eq=False)
class Step:
    """One request's share of a draft forward: tokens of the text, guesses, and branches' tokens.

    A step draws the text's next token.  As long as a draw equals the guess for its position, the
    step also draws for the position after it.  If forwards are chained (see `DraftModel.chains`)
    and the step has neither guesses nor branches, `draw` does not wait for the device, and
    `collect` reads the draw.

    Attributes:
        text: the state of the request's text.
        command: the command that the step carries out.
        feed: what the runner is fed of the text; None if the step continues only branches.
        guesses: the guesses, which are the last tokens of `feed`.
        continued: branches to continue in the same forward.
        feeds: all that the runner is fed for this step.
        marks: the times before the forward, between the forward and the draws, and after the draws.
            The code that runs the step records them.
        fed: number of tokens that the forward was fed, including those of other requests.
        has_prompt: whether any of these tokens belong to a prefix that a request began with.
        following: the token drawn, [1] on the device, if the host does not know it yet. The next
            forward can be fed this tensor. None if the host knows the token.
        failure: the error that kept the step from drawing; it is raised when the step is collected.
        is_paused: whether drafting pauses after this step.
    """

    text: DraftText
    command: Draft
    feed: Feed | None
    guesses: Sequence[int] = ()
    continued: Sequence[Branch] = ()
    feeds: list[Feed] = field(default_factory=list)
    marks: Sequence[Any] = ()
    fed: int = 0
    has_prompt: bool = False
    following: torch.Tensor | None = None
    failure: NumericalError | None = None
    is_paused: bool = False
    _drafted: list[DrawnRow] = field(default_factory=list)
    _seen: list[Seen] = field(default_factory=list)
    _proposals: tuple[Proposal, ...] = ()

    def __post_init__(self) -> None:
        is_drawn_on_device = False
        if self.feed is not None:
            self.feeds.append(self.feed)
            is_drawn_on_device = isinstance(self.feed.tokens, torch.Tensor)
        for branch in self.continued:
            fed = self.text.model.fit_tokens([branch.unfed])
            self.feeds.append(Feed(fed, 1, branch.slot))
        self.is_paused = not self.feeds
        last = (self.end - 1, self.command.tokens[-1:])
        self._is_root = not is_drawn_on_device and self.text.last_drawn != last
        self._is_ranked = self.text.branches is not None or self.text.ranks

    @property
    def tokens(self) -> int:
        """The number of tokens in all feeds."""
        return sum(len(feed.tokens) for feed in self.feeds)

    @property
    def end(self) -> int:
        """The position after the command's tokens."""
        return self.command.start + len(self.command.tokens)

    @property
    def done(self) -> bool:
        return bool(self.marks[-1].query())

    def draw(self, logits: Sequence[torch.Tensor]) -> None:
        """Draw from the logits [rows, vocab] of each feed.

        Raises `NumericalError` if a draw is read here and its logits are not finite.
        """
        text = self.text
        rows = list(logits)
        text_rows = [] if self.feed is None else self._text_rows(rows.pop(0))
        if self.command.hedge:
            if text_rows and text.branches is not None:
                text.branches.see_bonus(self.end, text.half, text_rows[0])
            text_rows = []
        elif text.model.chains and len(text_rows) == 1 and not self.continued:
            self._launch(text_rows[0])
            return
        branch_rows = text.model.fit_rows(row for (row,) in rows)
        self._take(self._drawn_rows(text_rows, branch_rows))
        if self.guesses:
            text.model.runner.rollback(self.end + len(self._drafted) - 1, text.slot)
        if text.branches is not None:
            self._proposals = text.branches.proposals

    def _text_rows(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows [vocab] of the text's feed, after penalties, biases and grammar."""
        rows = self.text.model.fit_rows(logits)
        shaper = self.text.shaper
        if shaper is None:
            return rows
        return [shaper.shape(row) for row in rows]

    def _launch(self, row: torch.Tensor) -> None:
        """Launch the draw from a row [vocab], and the copying of its results to the host."""
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
        # If logits are not finite, the draw may be any number; a wrong id would abort the process.
        self.following = draw[1:].long().clamp_(0, text.model.runner.vocab_size - 1)

    def _drawn_rows(
        self, text_rows: Sequence[torch.Tensor], branch_rows: Sequence[torch.Tensor]
    ) -> Iterator[DrawnRow]:
        """Draw for the branches and extend them; then yield the draws for the text."""
        at_once = len(text_rows) if self.text.model.at_once else 1
        text_positions = range(self.end, self.end + len(text_rows))
        positions = [branch.end for branch in self.continued]
        positions += text_positions[:at_once]
        rows = list(branch_rows) + list(text_rows[:at_once])
        drawn = draw_rows(self.text, rows, positions, self._is_ranked)
        self._extend_branches(drawn[: len(branch_rows)])
        yield from drawn[len(branch_rows) :]
        for row, position in zip(text_rows[at_once:], text_positions[at_once:], strict=True):
            yield from draw_rows(self.text, [row], [position], self._is_ranked)

    def _extend_branches(self, rows: Sequence[DrawnRow]) -> None:
        """Append to each branch the token drawn for it; end a branch whose draw is not finite."""
        text = self.text
        for branch, row in zip(self.continued, rows, strict=True):
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

    def _take(self, rows: Iterable[DrawnRow]) -> None:
        """Record the draws, up to the first that differs from its guess or ends the window."""
        text = self.text
        for i, row in enumerate(rows):
            token = read_draw(row.draw)
            if text.window is not None and row.shape is not None:
                self.is_paused = text.window.stops(row.position, token, row.shape.tolist())
            self._drafted.append(row)
            if row.top is not None:
                is_root = self._is_root and i == 0
                self._seen.append(see(row.top, row.position, token, text.half, is_root))
            if text.branches is not None:
                text.branches.add_drafted(row.position, token, self._seen[-1])
            text.last_drawn = row.position, (token,)
            if self.is_paused or (i < len(self.guesses) and token != self.guesses[i]):
                break
        if text.index is not None:
            # Now, because guesses that turned out right are not among the next command's tokens.
            text.index.cut(self.end)
            text.index.extend(read_draw(row.draw) for row in self._drafted)

    def collect(self) -> Drafted:
        """Return the step's proposal. The device must have finished the draws.

        The proposal lacks the times of the forward; the caller adds them.

        Raises `NumericalError` if a draw is not finite.
        """
        text = self.text
        if self.following is not None:
            self._collect_launched()
        proposed = self._drafted
        if self.is_paused and text.options.withholds:
            proposed = proposed[:-1]
        return Drafted(
            tuple(read_draw(row.draw) for row in proposed),
            rows=tuple(row.probs for row in proposed if row.probs is not None),
            cached=max(0, len(self._drafted) - 1),
            paused=self.is_paused,
            branches=self._proposals,
            seen=tuple(self._seen) if text.ranks else (),
        )

    def _collect_launched(self) -> None:
        row = self._launched
        if self._top is not None:
            (top,) = read_shortlist(self._top)
            row = replace(row, top=top)
        self._take([row])


def plan(text: DraftText, command: Draft, other_tokens: int = 0, sharing: int = 1) -> Step:
    """Make the step that feeds the command's tokens, with those guesses and branches that pay.

    Args:
        other_tokens: number of tokens that the forward is fed for other requests.
        sharing: number of texts, this one included, that share the forward's remaining capacity.
    """
    tokens = text.unfed(command)
    text.read_states()
    rows = int(command.bonus)
    guesses, chances = text.guess(command)
    chosen = []
    if len(tokens) <= PROMPT_PIECE and (command.budget or command.hedge):
        chosen = choose(text, command, chances, len(tokens), other_tokens, sharing)
    guesses = text.model.fit_tokens(guesses[: chosen.count(None)])
    if command.budget:
        rows = 1 + len(guesses)
    feed = None
    if tokens:
        fed = text.model.fit_tokens(tokens) + guesses
        feed = Feed(fed, rows, text.slot, prompt=command.prompt)
    continued = []
    if text.branches is not None:
        outcomes = [outcome for outcome in chosen if outcome is not None]
        continued = text.branches.make(outcomes, text.slot)
    return Step(text, command, feed, guesses, continued)


def choose(
    text: DraftText,
    command: Draft,
    chances: Sequence[float],
    num_tokens: int,
    other_tokens: int = 0,
    sharing: int = 1,
) -> list[Outcome | None]:
    """Choose the branches and guesses to feed together with `num_tokens` tokens of a text.

    The forward then yields the most expected tokens per second.

    Args:
        chances: the chances of the guesses, see `DraftText.guess`.
        other_tokens, sharing: see `plan`.

    Returns:
        The outcome of each branch to continue, and None for each guess to feed, the likeliest
        first.
    """
    model = text.model
    fed = other_tokens + num_tokens
    reach = 1.0
    ranked: list[tuple[float, Outcome | None]] = []
    if text.branches is not None:
        until = command.start + len(command.tokens) + command.budget
        if command.hedge:
            until = model.runner.context
        cached = model.runner.length(text.slot)
        depth = command.hedge or until
        ranked += text.branches.worth(text.options.branches, cached, until, depth)
        reach = text.branches.reach()
    if command.hedge:
        reach = float(num_tokens > 0)
    for chance in chances:
        ranked.append((reach * chance, None))
    ranked.sort(key=itemgetter(0), reverse=True)
    ranked = ranked[: model.room(fed) // sharing]
    # Forwards of several texts, or of branches alone, are not chained.
    seconds = model.seconds(fed)
    if other_tokens or command.hedge:
        seconds = model.times.seconds
    count = worthwhile([chance for chance, _ in ranked], fed, reach, seconds)
    return [outcome for _, outcome in ranked[:count]]
