"""Our own forward on a CPU, where our C computes all feeds of a forward at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pearl.models.cpu import native
from pearl.models.cpu.native_layers import NativeLayers
from pearl.models.feeds import Feed, lay_out
from pearl.models.forward.attention import whole_blocks
from pearl.models.forward.runner import ForwardRunner
from pearl.models.forward.slot_attention import NativeAttention
from pearl.models.forward.slots import Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pearl.models.forward.decoder import Decoder

_TREE_NODES = 256  # most nodes of a tree


class CpuRunner(ForwardRunner):
    """Runs a model with our C; for the options see `ForwardRunner`."""

    def __init__(
        self,
        model: PreTrainedModel | Decoder,
        context: int,
        **options: Any,
    ) -> None:
        room = whole_blocks(context)
        super().__init__(model, context, room, is_native=True, **options)
        self.layers.in_one_call = NativeLayers.of(self.layers, self._ropes)
        self.capabilities = replace(self.capabilities, tree_nodes=_TREE_NODES)

    def _compute(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        with torch.inference_mode():
            hidden = self._needed_states(feeds)
        if not len(hidden):
            return [torch.empty(0, self.vocab_size) for _ in feeds]
        with torch.no_grad():  # in inference mode, the logits would not be writable later
            logits = self.layers.logits(hidden).float()
        return list(logits.split([feed.rows for feed in feeds]))

    def _needed_states(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Compute all layers; return the states [rows, hidden] of the rows whose logits are needed.

        Also store what `features` and `keep` read later.
        """
        layers = self.layers
        layout = lay_out(feeds, self.slots.lengths)
        has_trees = False
        for feed in feeds:
            self.slots.wrote(feed.slot, self.slots.lengths[feed.slot] + feed.depth)
            has_trees |= feed.parents is not None
        attends = NativeAttention(
            layout.table,
            layout.end,
            has_trees,
            self.slots,
            layers.scoring,
            layers.heads,
            layers.eps,
        )
        hidden = layers.hidden_states(layout.ids, self._ropes, attends)
        needed_rows: list[int] = []
        for feed, rows in zip(feeds, layout.fed, strict=True):
            if feed.parents is not None:
                self.slots.hold(feed.slot, Tree(feed.parents, rows, attends.states))
            if layers.features is not None:
                self._seen[feed.slot] = layers.features[rows.start : rows.stop]
            needed_rows += rows[len(rows) - feed.rows :]
        if len(needed_rows) == len(hidden):
            return hidden
        return hidden[needed_rows]

    def use_threads(self, count: int) -> Sequence[int]:
        return native.use_threads(count)
