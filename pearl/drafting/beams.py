"""A search for the likeliest block of tokens: for rules that judge blocks as a whole.

One forward a level: what the sequences kept so far consist of is fed as one tree behind the text's last token, and each
sequence is continued by its likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import torch

from pearl.decoding.rules.joint import JointDraft
from pearl.decoding.sampling import probabilities
from pearl.decoding.shaping import Shaper
from pearl.drafting.launch import LaunchedForward, Plan, known
from pearl.errors import NumericalError
from pearl.models.runner import Feed, ModelRunner
from pearl.protocol.events import Draft


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

    @classmethod
    def of(cls, before: Search | None, half: JointDraft, command: Draft) -> Search:
        """The one that goes on, where it is of this text; else one that begins."""
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


def plan_level(
    search: Search,
    command: Draft,
    runner: ModelRunner,
    slot: int,
    shaper: Shaper | None,
    fit: Callable[[torch.Tensor], torch.Tensor],
) -> Plan:
    """What to feed to go on by a level; the block is proposed once it is whole.

    Args:
        slot: of the runner, that holds the text.
        shaper: changes the text's logits.
        fit: logits [vocab] of the runner -> of the target's vocabulary.
    """
    chain, (nodes, parents) = known(command.tokens, runner), search.tree()
    is_tree = 0 < len(nodes) <= runner.capabilities.tree_nodes - len(chain)
    feed = Feed(chain, 1, slot)
    if is_tree:
        below = (parent + len(chain) for parent in parents)  # -1 is the text's last token
        tree = (*range(-1, len(chain) - 1), *below)
        feed = Feed([*chain, *known(nodes, runner)], len(search.sequences), slot, tree)

    def finish(logits: Sequence[torch.Tensor], marks: Sequence[Any], fed: int) -> LaunchedForward:
        rows = logits[0]
        if nodes and not is_tree:
            rows = _one_by_one(search.sequences, runner, slot)
            marks[1].record()
        rows = torch.stack([fit(row) for row in rows])
        if shaper is not None:
            rows = shaper.tree(rows, nodes, parents) if nodes else shaper.shape(rows[0])[None]
        search.grow(rows)
        tokens, probs = search.found or ((), ())
        path = search.path(tokens) if is_tree else []
        if is_tree:
            runner.keep([*range(len(chain)), *(len(chain) + node for node in path)], slot)
            if shaper is not None:
                shaper.extend(tokens[: len(path)])
        marks[-1].record()
        draws = [torch.tensor((0.0, token), dtype=torch.float64) for token in tokens]
        given = [_scalar(token, prob, rows[0]) for token, prob in zip(tokens, probs, strict=True)]
        return LaunchedForward(command, marks, draws, given, None, None, fed, len(path), paused=False)

    return Plan(command.request, [feed], len(feed.tokens), finish)


def _one_by_one(sequences: Sequence[Sequence[int]], runner: ModelRunner, slot: int) -> torch.Tensor:
    """The logits after each of these behind the text, [sequences, vocab], by a runner that takes no such tree."""
    length, rows = runner.length(slot), []
    for tokens in sequences:
        rows += runner.forward([Feed(known(tokens, runner), 1, slot)])
        runner.rollback(length, slot)
    return torch.cat(rows)


def _scalar(token: int, prob: float, like: torch.Tensor) -> torch.Tensor:
    """[vocab] float32, on the host: `prob` at the token, 0 elsewhere. `like`: [vocab]."""
    row = torch.zeros(like.shape, dtype=torch.float32)
    row[token] = prob
    return row
