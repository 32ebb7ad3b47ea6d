"""A search for the likeliest block of tokens, for rules that judge blocks.

One forward a level: it feeds the tokens of all sequences kept so far as one tree behind the text's last token, and
continues each sequence by its likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import torch

from pearl.decoding.rules.joint import JointDraft
from pearl.drafting.step import DraftModel, Step, Text
from pearl.errors import NumericalError
from pearl.models.feeds import paths
from pearl.models.runner import Feed
from pearl.protocol.events import Draft, Drafted


@dataclass(frozen=True, slots=True)
class _Beam:
    """A sequence: `score` is the sum of the logarithms of `probs`, which has one for each of `tokens`."""

    score: float = 0.0
    tokens: tuple[int, ...] = ()
    probs: tuple[float, ...] = ()


class Search:
    """For the block that follows a text.

    Args:
        half: the number of sequences kept, and what scores them.
        end: length of the text.
        last: its last token.
        depth: tokens of the block.
    """

    def __init__(self, half: JointDraft, end: int, last: int, depth: int) -> None:
        self.end, self.last = end, last
        self._half, self._depth = half, depth
        self._beams = [_Beam()]
        self._nodes: dict[tuple[int, ...], int] = {}

    @classmethod
    def resumed(cls, before: Search | None, half: JointDraft, command: Draft) -> Search:
        """`before`, if it is an unfinished search for what follows this text; otherwise a new one."""
        end, last = command.start + len(command.tokens), command.tokens[-1]
        if before is not None and (before.end, before.last) == (end, last) and not before.found:
            return before
        return cls(half, end, last, min(half.depth, command.budget))

    @property
    def _level(self) -> int:
        return len(self._beams[0].tokens)

    @property
    def sequences(self) -> list[tuple[int, ...]]:
        """Those that are kept: each is a token longer than at the level before."""
        return [beam.tokens for beam in self._beams]

    @property
    def found(self) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
        """The likeliest block, and the probability of each of its tokens; None: the search goes on."""
        return (self._beams[0].tokens, self._beams[0].probs) if self._level == self._depth else None

    def tree(self) -> tuple[list[int], list[int]]:
        """The tokens that all sequences consist of, each once, and the parent of each; -1: the text."""
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
        """The nodes of the last `tree` that begin with `tokens`, as far as it has them."""
        paths = (tuple(tokens[:length]) for length in range(1, len(tokens) + 1))
        return [self._nodes[path] for path in paths if path in self._nodes]

    def grow(self, logits: torch.Tensor) -> None:
        """Continue the sequences by a token each.

        Args:
            logits: [sequences, vocab], after each of `sequences`, which are the last nodes of the tree.

        Raises `NumericalError` where they are not finite.
        """
        width = self._half.width
        grown: list[_Beam] = []
        for beam, row in zip(self._beams, logits, strict=True):
            likely, ids = self._half.score(row).topk(min(width, row.shape[-1]))
            for prob, token in zip(likely.tolist(), ids.tolist(), strict=True):
                if prob > 0:
                    grown.append(
                        _Beam(beam.score + log(prob), (*beam.tokens, token), (*beam.probs, prob))
                    )
        if not grown:
            raise NumericalError(
                "the draft model's logits are not finite: no block can be drafted from them"
            )
        self._beams = sorted(grown, key=lambda beam: (-beam.score, beam.tokens))[:width]


class LevelStep(Step):
    """Searches on by a level, and proposes the block once it is whole."""

    def __init__(self, model: DraftModel, text: Text, command: Draft) -> None:
        text.search = self._search = Search.resumed(text.search, text.half, command)
        chain = model.known(command.tokens)
        self._chain = len(chain)
        self._nodes, self._parents = self._search.tree()
        self._is_tree = 0 < len(self._nodes) <= model.runner.capabilities.tree_nodes - len(chain)
        feed = Feed(chain, 1, text.slot)
        if self._is_tree:
            parents = (
                *range(-1, len(chain) - 1),
                *(parent + len(chain) for parent in self._parents),
            )
            feed = Feed(
                [*chain, *model.known(self._nodes)], len(self._search.sequences), text.slot, parents
            )
        super().__init__(model, text, command, [feed])

    def draw(self, logits: Sequence[torch.Tensor]) -> None:
        model, search, shaper = self.model, self._search, self.text.shaper
        rows = logits[0]
        if self._nodes and not self._is_tree:
            rows = self._one_by_one()
            self.marks[1].record()
        rows = torch.stack([model.fit(row) for row in rows])
        if shaper is not None:
            rows = (
                shaper.tree(rows, self._nodes, paths(self._parents))
                if self._nodes
                else shaper.shape(rows[0])[None]
            )
        search.grow(rows)
        self._tokens, self._probs = search.found or ((), ())
        self._vocab_size = rows.shape[-1]
        path = search.path(self._tokens) if self._is_tree else []
        self._cached = len(path)
        if self._is_tree:
            model.runner.keep(
                [*range(self._chain), *(self._chain + node for node in path)], self.text.slot
            )
            if shaper is not None:
                shaper.extend(self._tokens[: len(path)])

    def _one_by_one(self) -> torch.Tensor:
        """The logits after each sequence behind the text, [sequences, vocab], by a runner that takes no such tree."""
        runner, slot, rows = self.model.runner, self.text.slot, list[torch.Tensor]()
        length = runner.length(slot)
        for tokens in self._search.sequences:
            rows += runner.forward([Feed(self.model.known(tokens), 1, slot)])
            runner.rollback(length, slot)
        return torch.cat(rows)

    def collect(self) -> Drafted:
        """Each token's row [vocab] is 0 but at the token, where it has its probability."""
        rows = torch.zeros(len(self._tokens), self._vocab_size)
        for row, token, prob in zip(rows, self._tokens, self._probs, strict=True):
            row[token] = prob
        return Drafted(self._tokens, rows=tuple(rows), cached=self._cached)
