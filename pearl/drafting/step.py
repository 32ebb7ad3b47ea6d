"""The state that drafting works on, and the base of its steps.

Three objects share the work, and each fact has one owner:

* `DraftModel`, one a process, owns the runner and the measured forward times.
* `DraftText`, one a request, owns what outlives a forward: the text's slot, the draft's half of the rule, the shaper,
  the stop window, the index of n-grams, the branches, the search for a block.
* `Step`, one a request and forward, owns the feeds and what was drawn from their logits. `proposer.ModelProposer`
  makes it, runs a forward of its feeds (or one of several steps' feeds), calls `draw`, and `collect`s a proposal.

There are three kinds of steps, by what they draw: `drawing.DrawStep` the text's next tokens, `drawing.BranchStep` only
branches, `beams.LevelStep` one level of a search for a block. A step writes what its draws say of the text into its
`DraftText`, and knows nothing of other requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pearl.config.options import RequestOptions
from pearl.decoding.sampling import Shortlist, on_host, read_shortlist, shortlist
from pearl.decoding.shaping import Shaper
from pearl.drafting.branches import Branches
from pearl.drafting.ngram import Anchor, NgramIndex, guess_tree
from pearl.drafting.stops import TOP, StopWindow
from pearl.models.runner import Feed, ModelRunner
from pearl.protocol.events import Draft, Drafted
from pearl.protocol.speeds import ForwardTimes

if TYPE_CHECKING:
    from pearl.drafting.beams import Search

PROMPT_PIECE = 16  # tokens: a forward of more is part of a prompt, and is fed no guesses


class HostMark:
    """Stands in for `torch.cuda.Event` on a CPU, where work is done when the call returns."""

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


@dataclass
class DraftModel:
    """The draft model as steps see it.

    Attributes:
        vocab_size: the target's. A draft with more ids (padding) never emits them; one with fewer gives the others
            probability 0.
        chains: whether a forward is launched before the host knows the token that the last one drew.
        at_once: whether all rows of a forward are drawn from before the first is read, so that a device is waited for
            once; the host would compute draws in vain.
        times: forward times by tokens fed.
        delay: seconds that the device idles if the next forward waits for the host.
    """

    runner: ModelRunner
    vocab_size: int
    chains: bool
    at_once: bool
    times: ForwardTimes = field(default_factory=ForwardTimes)
    delay: float = 0.0

    def fit(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [vocab] over the target's vocabulary."""
        missing = self.vocab_size - self.runner.vocab_size
        if missing == 0:
            return logits
        if missing < 0:
            return logits[: self.vocab_size]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)

    def fit_rows(self, rows: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [self.fit(row) for row in rows]

    def fit_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Return tokens to feed: 0 stands for an id that only the target has, at some cost in acceptance."""
        return [token if token < self.runner.vocab_size else 0 for token in tokens]

    def room(self, fed: int) -> int:
        """Return the rows left in a forward of `fed` tokens: a tree's nodes; without trees there is no bound."""
        nodes = self.runner.capabilities.tree_nodes or 1 << 31
        return max(0, nodes - fed)

    def seconds(self, alone: int) -> Callable[[int], float]:
        """Return forward time by tokens fed; beyond `alone` tokens a chained forward waits for the host."""
        delay = self.delay if self.chains else 0.0
        return lambda fed: self.times.seconds(fed) + delay * (fed > alone)


@dataclass(slots=True)
class DraftText:
    """One request's text, as the draft has it.

    Attributes:
        place: the slot that the request names.
        slot: the runner's slot that holds the text now.
        half: the draft's half of the rule: a `DraftHalf`, or a `JointDraft` where it judges blocks.
        shaper: changes logits; None: nothing changes them.
        window: the window that its stop policy sees; None: no policy.
        index: index of the tokens fed, for guesses; None: no guesses.
        branches: continuations prepared for other outcomes; None: none are.
        ranks: whether the target is sent the runners-up of each token.
        last_drawn: (position, token) of the last draw.
        search: the search for its next block.
        states: hidden states of the target that are still to be read, each with its first position.
    """

    place: int
    slot: int
    half: Any
    options: RequestOptions
    shaper: Shaper | None
    window: StopWindow | None
    index: NgramIndex | None = None
    branches: Branches | None = None
    ranks: bool = False
    last_drawn: tuple[int, int] | None = None
    search: Search | None = None
    states: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    @property
    def is_block(self) -> bool:
        """Whether its rule judges blocks of tokens."""
        return self.options.rule_in_force.judges_blocks

    def read_states(self, runner: Any) -> None:
        for start, states in self.states:
            runner.extend(start, states, self.slot)
        self.states.clear()

    def unfed(self, command: Draft) -> Sequence[int]:
        """Return the command's tokens whose keys and values are still to be computed: a branch may hold some."""
        if self.branches is None:
            return command.tokens
        end = command.start + len(command.tokens)
        held = 0
        if command.tokens:
            self.slot, held = self.branches.adopt(command.start, command.tokens, self.slot)
        self.branches.settle(command.start, command.tokens, end - command.pending)
        if held:
            self.last_drawn = end - 1, command.tokens[-1]
        return command.tokens[held:]

    def guess(self, command: Draft) -> tuple[list[int], list[float]]:
        """Guess a chain of tokens that the draft model will draw next: (tokens, chances of all up to each)."""
        if self.index is None:
            return [], []
        self.index.cut(command.start)
        self.index.extend(command.tokens)
        end = len(self.index)
        self.index.learn(end)
        count = min(self.options.draft_lookup, command.budget - 1)
        if count <= 0 or end - command.start > PROMPT_PIECE:
            return [], []
        tree = guess_tree(self.index, [Anchor(end, 1.0)], count, end + count, branches=False)
        return tree.tokens, tree.chances


@dataclass(frozen=True, slots=True)
class DrawnRow:
    """The draw for a position from logits [vocab] of a forward.

    Attributes:
        top: the logits' shortlist; None where it was not asked for.
        draw: on the host.
        probs: the distribution by which the target judges the token, see `DraftHalf`.
        shape: see `shape_of`; None for a text without a stop policy.
    """

    position: int
    top: Shortlist | None
    draw: torch.Tensor
    probs: torch.Tensor | None
    shape: torch.Tensor | None


def draw_rows(
    text: DraftText, rows: Sequence[torch.Tensor], positions: Sequence[int], is_ranked: bool
) -> list[DrawnRow]:
    """Draw for `positions` from rows [vocab]; waits for a device once, and once more for shortlists if `is_ranked`."""
    if not rows:
        return []
    tops = read_shortlist(*map(shortlist, rows)) if is_ranked else []
    drafted = text.half.draft(rows, positions, tops)
    draws = on_host([draw for draw, _ in drafted])
    drawn_rows: list[DrawnRow] = []
    for i, (device_draw, probs) in enumerate(drafted):
        top = tops[i] if is_ranked else None
        shape = None
        if text.window is not None:
            shape = shape_of(rows[i], device_draw[1:])
        drawn_rows.append(DrawnRow(positions[i], top, draws[i], probs, shape))
    return drawn_rows


def shape_of(row: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Return what stop policies see of logits [vocab]: `TOP` probabilities, the entropy, and that of `token` [1]."""
    probs = torch.softmax(row.float(), -1)
    top = probs.topk(min(TOP, len(probs))).values
    entropy = torch.special.entr(probs).sum()
    token_id = token.long().clamp(0, len(probs) - 1)  # a row that is not finite may draw any number
    return torch.cat((top, entropy[None], probs[token_id]))


class Step:
    """One request's share of a forward. The base feeds tokens and draws nothing.

    Attributes:
        command: the command that it carries out.
        feeds: for the runner.
        tokens: number of tokens in all feeds.
        marks: times before the forward, between it and the draws, and after all, recorded by whoever runs the step.
        fed: tokens that the forward was fed, those of other requests too.
        following: the last token drawn, [1] on the device, which the next forward can be fed before the host knows it;
            None where the host knows it.
    """

    def __init__(
        self, model: DraftModel, text: DraftText, command: Draft, feeds: Sequence[Feed]
    ) -> None:
        self.model = model
        self.text = text
        self.command = command
        self.feeds = feeds
        self.marks = [make_mark(model.runner.device) for _ in range(3)]
        self.tokens = sum(len(feed.tokens) for feed in feeds)
        self.fed = self.tokens
        self.following: torch.Tensor | None = None

    @property
    def end(self) -> int:
        """The position after the command's tokens."""
        return self.command.start + len(self.command.tokens)

    @property
    def done(self) -> bool:
        return bool(self.marks[-1].query())

    def draw(self, logits: Sequence[torch.Tensor]) -> None:
        """Draw from the logits of each feed. Raises `NumericalError` where they are read and not finite."""

    def collect(self) -> Drafted:
        """Return the step's proposal, without times, once the device is done. Raises as `draw`."""
        return Drafted()
