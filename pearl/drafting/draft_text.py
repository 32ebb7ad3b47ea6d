"""The state of drafting: the draft model of this process, and the text of each request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pearl.config.options import RequestOptions
from pearl.decoding.shaping import Shaper
from pearl.drafting.branches import Branches
from pearl.drafting.ngram import Anchor, NgramIndex, guess_tree
from pearl.drafting.stops import StopWindow
from pearl.models.runner import ModelRunner
from pearl.protocol.events import Draft
from pearl.protocol.speeds import ForwardTimes

if TYPE_CHECKING:
    from pearl.drafting.beams import Search

PROMPT_PIECE = 16  # a forward of more tokens is part of a prompt's prefill, and is fed no guesses


@dataclass
class DraftModel:
    """The draft model: its runner, and the measured times of its forwards.

    Attributes:
        vocab_size: size of the target's vocabulary. A draft model with more ids (padding) never
            draws these further ids. A draft model with fewer ids gives the missing ids probability
            0.
        chains: whether a forward may be launched before the host knows the token that the previous
            forward has drawn.
        at_once: whether the draws for all positions of a forward are launched before the first is
            read, so that the host waits for the device only once. On a CPU this is off, so that
            no draw is computed that nobody reads.
        times: forward times by number of tokens fed.
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
        """Replace ids that only the target has by id 0, which lowers acceptance a little."""
        return [token if token < self.runner.vocab_size else 0 for token in tokens]

    def room(self, fed: int) -> int:
        """Return how many more tokens fit into a forward that is fed `fed` tokens.

        Only a runner that takes trees has a limit (`tree_nodes`).
        """
        nodes = self.runner.capabilities.tree_nodes or 1 << 31
        return max(0, nodes - fed)

    def seconds(self, alone: int) -> Callable[[int], float]:
        """Return a function: number of tokens fed -> seconds of the forward.

        If forwards are chained, a forward with guesses or branches still has to wait for the host.
        The function adds `delay` seconds for this wait.

        Args:
            alone: number of tokens that the forward is fed without guesses and branches. A forward
                of more tokens counts as one with guesses or branches.
        """
        delay = self.delay if self.chains else 0.0
        return lambda fed: self.times.seconds(fed) + delay * (fed > alone)


@dataclass(slots=True)
class DraftText:
    """The state of one request's text in the draft.

    Attributes:
        place: the slot that the protocol's commands name for the request.
        slot: the runner's slot that holds the text now. It differs from `place` after the text has
            moved to the slot of a branch.
        half: the draft's half of the acceptance rule: a `DraftHalf`, or a `JointDraft` if the rule
            judges blocks.
        shaper: applies penalties, biases and grammars to logits; None if the request has none.
        window: the window that the stop policy sees; None if the request has no stop policy.
        index: n-gram index of the text, for guesses; None if the draft makes no guesses.
        branches: the branches for other outcomes; None if the draft prepares none.
        ranks: whether the draft sends the runners-up of each token to the target.
        last_drawn: (position, (token,)) of the last draw; None before the first.
        search: the beam search for the next block; None if no search is going on.
        states: (first position, hidden states of the target), still to be read by the draft.
    """

    model: DraftModel
    place: int
    slot: int
    half: Any
    options: RequestOptions
    shaper: Shaper | None
    window: StopWindow | None
    index: NgramIndex | None = None
    branches: Branches | None = None
    ranks: bool = False
    last_drawn: tuple[int, tuple[int, ...]] | None = None
    search: Search | None = None
    states: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    @property
    def is_block(self) -> bool:
        """Whether the request's rule judges blocks of tokens."""
        return self.options.rule_in_force.judges_blocks

    def read_states(self) -> None:
        """Give the runner the states that have come, for the text and for its branches, which share its beginning."""
        runner: Any = self.model.runner
        slots = [self.slot]
        if self.branches is not None:
            slots += self.branches.live_slots
        for start, states in self.states:
            for slot in slots:
                runner.extend(start, states, slot)
        self.states.clear()

    def unfed(self, command: Draft) -> Sequence[int]:
        """Return those of the command's tokens that still have to be fed.

        If a branch was already fed the first of the command's tokens, its slot becomes the text's
        slot, and these tokens are not fed again. Example: the command has the tokens 5 6 7, and a
        branch was fed 5 6; return 7.
        """
        if self.branches is None:
            return command.tokens
        end = command.start + len(command.tokens)
        num_cached = 0
        if command.tokens:
            self.slot, num_cached = self.branches.adopt(command.start, command.tokens, self.slot)
        self.branches.settle(command.start, command.tokens, end - command.pending)
        if num_cached:
            self.last_drawn = end - 1, command.tokens[-1:]
        return command.tokens[num_cached:]

    def guess(self, command: Draft) -> tuple[list[int], list[float]]:
        """Guess which tokens the draft model will draw next; return (tokens, chances).

        The chance of a token is the probability that this guess and all guesses before it are
        right. A command that drafts only branches gets no guesses, but the index has to see its
        tokens too.
        """
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
