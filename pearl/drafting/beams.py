"""Beam search for the likeliest block of tokens, for rules that judge whole blocks.

Each level of the search is one step of the draft (see `step`) and takes one forward.  The forward
is fed the tokens of all sequences kept so far, as one tree after the text's last token.  Then each
sequence is extended by its likeliest tokens.  `DraftText.search` keeps the search between two
steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import torch

from pearl.decoding.rules.joint import JointDraft
from pearl.drafting.draft_text import DraftText
from pearl.drafting.step import Step
from pearl.errors import NumericalError
from pearl.models.feeds import paths
from pearl.models.runner import Feed
from pearl.protocol.events import Draft, Drafted


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence of tokens with the probability of each token; `score` is sum(log(probs))."""

    score: float = 0.0
    tokens: tuple[int, ...] = ()
    probs: tuple[float, ...] = ()


class Search:
    """A beam search for the block that follows a text.

    Args:
        half: the draft's half of the acceptance rule. It scores tokens, and sets how many sequences
            the search keeps (`width`).
        end: length of the text, which is the position where the block begins.
        last_token: the last token of the text.
        depth: number of tokens in the block.
    """

    def __init__(self, half: JointDraft, end: int, last_token: int, depth: int) -> None:
        self.end = end
        self.last_token = last_token
        self._half = half
        self._depth = depth
        self._beams = [Beam()]
        #: path of tokens -> its node in the tree that `tree` returned last
        self._nodes: dict[tuple[int, ...], int] = {}

    @property
    def _level(self) -> int:
        return len(self._beams[0].tokens)

    @property
    def sequences(self) -> list[tuple[int, ...]]:
        """The sequences kept at this level. All have the same length, the number of the level."""
        return [beam.tokens for beam in self._beams]

    @property
    def is_done(self) -> bool:
        """Whether the sequences have the length of the block."""
        return self._level == self._depth

    @property
    def block(self) -> Beam:
        """The likeliest block; an empty `Beam` until the search is done."""
        return self._beams[0] if self.is_done else Beam()

    def tree(self) -> tuple[list[int], list[int]]:
        """Merge the sequences into a tree, sharing their common prefixes; return (tokens, parents).

        A parent is the index of a token in `tokens`. A token that directly follows the text has
        parent -1.

        Example: the sequences (5, 7) and (5, 8) give the tokens [5, 7, 8] and the parents [-1, 0, 0].
        """
        self._nodes = {}
        parents: list[int] = []
        for length in range(1, self._level + 1):
            for beam in self._beams:
                path = beam.tokens[:length]
                if path not in self._nodes:
                    self._nodes[path] = len(parents)
                    parents.append(self._nodes.get(path[:-1], -1))
        return [path[-1] for path in self._nodes], parents

    def path(self, tokens: Sequence[int]) -> list[int]:
        """Return the nodes of `tokens` in the last `tree`, as far as the tree has them."""
        nodes = []
        for length in range(1, len(tokens) + 1):
            node = self._nodes.get(tuple(tokens[:length]))
            if node is not None:
                nodes.append(node)
        return nodes

    def grow(self, logits: torch.Tensor) -> None:
        """Extend each sequence by one token in several ways, and keep the likeliest of the results.

        Args:
            logits: [sequences, vocab], the logits after each of `sequences`.

        Raises `NumericalError` if the logits after every sequence are not finite.
        """
        width = self._half.width
        candidates = []
        for beam, row in zip(self._beams, logits, strict=True):
            probs, ids = self._half.score(row).topk(min(width, row.shape[-1]))
            for prob, token in zip(probs.tolist(), ids.tolist(), strict=True):
                if prob > 0:
                    score = beam.score + log(prob)
                    candidates.append(Beam(score, (*beam.tokens, token), (*beam.probs, prob)))
        if not candidates:
            raise NumericalError(
                "the draft model's logits are not finite: no block can be drafted from them"
            )
        self._beams = sorted(candidates, key=lambda beam: (-beam.score, beam.tokens))[:width]


class LevelStep(Step):
    """A step that extends the search by one level, and proposes the block after the last level."""

    def __init__(self, text: DraftText, command: Draft) -> None:
        model = text.model
        end = command.start + len(command.tokens)
        last_token = command.tokens[-1]
        search = text.search
        if search is None or (search.end, search.last_token) != (end, last_token) or search.is_done:
            search = Search(text.half, end, last_token, min(text.half.depth, command.budget))
        self._search = search
        text.search = search
        tokens = model.fit_tokens(command.tokens)
        self._chain = len(tokens)
        self._nodes, self._parents = self._search.tree()
        room = model.runner.capabilities.tree_nodes - self._chain
        self._is_tree = 0 < len(self._nodes) <= room
        feed = Feed(tokens, 1, text.slot)
        if self._is_tree:
            tokens += model.fit_tokens(self._nodes)
            parents = list(range(-1, self._chain - 1))
            parents += [self._chain + parent for parent in self._parents]
            feed = Feed(tokens, len(self._search.sequences), text.slot, tuple(parents))
        super().__init__(text, command, feed)

    def draw(self, logits: Sequence[torch.Tensor]) -> None:
        rows = logits[0]
        if self._nodes and not self._is_tree:
            rows = self._one_by_one()
            self.marks[1].record()
        rows = self._shaped(torch.stack(self.text.model.fit_rows(rows)))
        self._search.grow(rows)
        self._block = self._search.block
        self._vocab_size = rows.shape[-1]
        self._cached = self._keep_block() if self._is_tree else 0

    def _shaped(self, rows: torch.Tensor) -> torch.Tensor:
        shaper = self.text.shaper
        if shaper is None:
            return rows
        if self._nodes:
            return shaper.tree(rows, self._nodes, paths(self._parents))
        return shaper.shape(rows[0])[None]

    def _keep_block(self) -> int:
        """Drop the tree's tokens from the KV cache, except the block's; return how many stay.

        The block's last token does not stay, because it was never fed. While the search goes on,
        the block is empty, so no token of the tree stays.
        """
        path = self._search.path(self._block.tokens)
        nodes = list(range(self._chain))
        nodes += [self._chain + node for node in path]
        self.text.model.runner.keep(nodes, self.text.slot)
        if self.text.shaper is not None:
            self.text.shaper.extend(self._block.tokens[: len(path)])
        return len(path)

    def _one_by_one(self) -> torch.Tensor:
        """Return the logits [sequences, vocab] after each sequence.

        Feeds the sequences one by one, because the runner cannot take the whole tree in one
        forward.
        """
        runner = self.text.model.runner
        slot = self.text.slot
        length = runner.length(slot)
        rows = []
        for tokens in self._search.sequences:
            rows += runner.forward([Feed(self.text.model.fit_tokens(tokens), 1, slot)])
            runner.rollback(length, slot)
        return torch.cat(rows)

    def collect(self) -> Drafted:
        """Return the block as a proposal; it is empty until the search is done.

        A token's row [vocab] has the token's probability at the token's id, and 0 at all other ids.
        """
        block = self._block
        rows = torch.zeros(len(block.tokens), self._vocab_size)
        for row, token, prob in zip(rows, block.tokens, block.probs, strict=True):
            row[token] = prob
        return Drafted(block.tokens, rows=tuple(rows), cached=self._cached)
