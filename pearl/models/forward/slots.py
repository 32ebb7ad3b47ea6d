"""Keys and values of several sequences, in buffers allocated once.

A slot holds one sequence. The keys and values of a tree wait in the slot, or in tensors of their
own, until `keep` chooses the path that continues the sequence.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from pearl.models.feeds import is_path


@dataclass(frozen=True)
class Tree:
    """A tree that was fed to a slot and waits for `keep`.

    Attributes:
        parents: see `Feed`.
        rows: the row of each node in `states`; None: the states are in the slot, in the order of the nodes.
        states: keys and values [2, layers, rows, kv_heads, head_dim]; None: they are in the slot.
    """

    parents: tuple[int, ...]
    rows: Sequence[int] | None = None
    states: torch.Tensor | None = None


class Slots:
    """Holds keys and values [slots, layers, kv_heads, positions, head_dim], all zeros at first.

    Forwards also read positions after the end of a sequence, to which the mask gives weight 0. As 0 times
    NaN is NaN, a rollback zeroes the positions that it removes.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.keys = _zeros(shape, dtype, device)
        self.values = _zeros(shape, dtype, device)
        self.lengths = [0] * shape[0]
        self._written = [0] * shape[0]  # by slot: positions from here on are zeros
        self._trees: list[Tree | None] = [None] * shape[0]

    def wrote(
        self,
        slot: int,
        end: int,
    ) -> None:
        """Record that positions before `end` were written to."""
        self._written[slot] = max(self._written[slot], end)

    def extend(
        self,
        slot: int,
        count: int,
    ) -> None:
        """Extend the sequence by `count` tokens, a chain that was just fed."""
        self._trees[slot] = None
        self.lengths[slot] += count

    def hold(
        self,
        slot: int,
        tree: Tree,
    ) -> None:
        """Remember the tree that was fed, until `keep` chooses one of its paths."""
        self._trees[slot] = tree

    def rollback(
        self,
        length: int,
        slot: int,
    ) -> None:
        assert 0 <= length <= self.lengths[slot]
        has_tree = self._trees[slot] is not None
        needs_clearing = length < self.lengths[slot] or length == 0 or has_tree
        self._trees[slot] = None
        self.lengths[slot] = length
        if needs_clearing:
            self._clear(slot, length)

    def keep(
        self,
        path: Sequence[int],
        slot: int,
    ) -> None:
        """Continue the sequence by the nodes of `path`; forget the rest of the tree."""
        tree = self._trees[slot]
        start = self.lengths[slot]
        assert tree is not None, "no tree was fed to this slot"
        assert is_path(tree.parents, path), (tree.parents, path)
        self._trees[slot] = None
        end = start + len(path)
        with torch.inference_mode():
            if tree.states is not None and tree.rows is not None:
                rows = [tree.rows[node] for node in path]
                keys, values = tree.states[:, :, rows].transpose(2, 3)
                self.keys[slot, :, :, start:end] = keys
                self.values[slot, :, :, start:end] = values
            elif list(path) != list(range(len(path))):
                rows = [start + node for node in path]
                for buffer in (self.keys, self.values):
                    buffer[slot, :, :, start:end] = buffer[slot][:, :, rows]
        self.lengths[slot] = end
        self._clear(slot, end)

    def fork(
        self,
        slot: int,
        into: int,
        length: int,
        shared: int = 0,
    ) -> None:
        """Replace the sequence of slot `into` by the first `length` tokens of `slot`.

        `into` holds the first `shared` of these tokens already.
        """
        assert slot != into
        assert shared <= length <= self.lengths[slot]
        self.rollback(shared, into)
        with torch.inference_mode():
            for buffer in (self.keys, self.values):
                buffer[into, :, :, shared:length] = buffer[slot, :, :, shared:length]
        self.lengths[into] = length
        self._written[into] = length

    def _clear(
        self,
        slot: int,
        length: int,
    ) -> None:
        with torch.inference_mode():
            for buffer in (self.keys, self.values):
                buffer[slot, :, :, length : self._written[slot]].zero_()
        self._written[slot] = length


def _zeros(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return zeros; on a CPU in a fresh mapping, whose pages take no memory until written to."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
