"""What drafting works on: the draft model, one a process, and what it has of each request's text."""

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

PROMPT_PIECE = 16  # tokens: a forward of more is part of a prompt, and is fed no guesses


@dataclass
class DraftModel:
    """The draft model: its runner, and the measured times of its forwards.

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
        last_drawn: (position, (token,)) of the last draw.
        search: the search for its next block.
        states: hidden states of the target that are still to be read, each with its first position.
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
        """Whether its rule judges blocks of tokens."""
        return self.options.rule_in_force.judges_blocks

    def read_states(self) -> None:
        runner: Any = self.model.runner
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
            self.last_drawn = end - 1, command.tokens[-1:]
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
