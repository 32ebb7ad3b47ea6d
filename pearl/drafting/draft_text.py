"""What drafting works on: the draft model of this process, and the draft's state of each request's text."""

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

PROMPT_PIECE = 16  # tokens: a forward of more tokens is part of a prompt, and is fed no guesses


@dataclass
class DraftModel:
    """The draft model: its runner, and the measured times of its forwards.

    Attributes:
        vocab_size: the target's. A draft with more ids (padding) never emits the further ids. A draft with fewer ids
            gives the missing ids probability 0.
        chains: whether a forward is launched before the host knows the token that the last one drew.
        at_once: whether the draws from all rows of a forward are launched before the first of them is read, so that the
            host waits for the device once. On a CPU this would compute draws that nobody reads.
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
        """Return the tokens with 0 for each id that only the target has, which lowers acceptance a little."""
        return [token if token < self.runner.vocab_size else 0 for token in tokens]

    def room(self, fed: int) -> int:
        """Return how many tokens still fit into a forward of `fed` tokens. Only runners of trees have a limit."""
        nodes = self.runner.capabilities.tree_nodes or 1 << 31
        return max(0, nodes - fed)

    def seconds(self, alone: int) -> Callable[[int], float]:
        """Return a function: tokens fed -> seconds of a forward. Beyond `alone` tokens it also waits for the host."""
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
        window: the window that the stop policy sees; None: the request has no stop policy.
        index: index of the tokens fed, for guesses; None: the draft makes no guesses.
        branches: continuations prepared for other outcomes; None: the draft prepares none.
        ranks: whether the draft sends the runners-up of each token to the target.
        last_drawn: (position, (token,)) of the last draw.
        search: the search for the next block.
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
        """Return the command's tokens that are still to be fed: a branch may have been fed the first of them."""
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
        """Guess the tokens that the draft model will draw next: (tokens, chances that all up to each are right)."""
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
