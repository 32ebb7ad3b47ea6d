"""A search for the likeliest block of tokens: for rules that judge blocks as a whole.

One forward a level: what the sequences kept so far consist of is fed as one tree behind the text's last token, and each
sequence is continued by its likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import torch

from pearl.decoding.rules.joint import JointDraft
from pearl.decoding.sampling import probabilities
from pearl.errors import NumericalError


@dataclass(frozen=True, slots=True)
class _Beam:
    """A sequence: `score` is the sum of its logarithms of `probs`, one for each of `tokens`."""

    score: float = 0.0
    tokens: tuple[int, ...] = ()
    probs: tuple[float, ...] = ()


class Search:
    """For the block that follows a text.

    Args:
        half: says how many sequences are kept, and by which distribution they are scored.
        end: length of the text.
        last: its last token.
        depth: tokens of the block.
    """

    def __init__(self, half: JointDraft, end: int, last: int, depth: int) -> None:
        self.end, self.last = end, last
        self._half, self._depth = half, depth
        self._beams = [_Beam()]
        self._nodes: dict[tuple[int, ...], int] = {}

    @property
    def _level(self) -> int:
        return len(self._beams[0].tokens)

    @property
    def sequences(self) -> list[tuple[int, ...]]:
        """Those that are kept: each is a token longer than at the level before."""
        return [beam.tokens for beam in self._beams]

    @property
    def found(self) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
        """The likeliest block, and what was given to each of its tokens; None: the search has not ended."""
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
            likely, ids = probabilities(row, self._half.sampling).topk(min(width, row.shape[-1]))
            for prob, token in zip(likely.tolist(), ids.tolist(), strict=True):
                if prob > 0:
                    score = beam.score + log(prob)
                    grown.append(_Beam(score, (*beam.tokens, token), (*beam.probs, prob)))
        if not grown:
            raise NumericalError("the draft model's logits are not finite: no block can be drafted from them")
        self._beams = sorted(grown, key=lambda beam: (-beam.score, beam.tokens))[:width]
