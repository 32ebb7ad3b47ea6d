"""Our own forward pass as a `ModelRunner`, for the families of `families.OWN_FORWARD`.

It takes chains and trees, and computes what transformers computes: the tests compare the two.

**Rows do not depend on the other rows**: the logits of a position have the same bits however its
sequence was cut into forwards. On a CPU our C ensures that (`CpuRunner`), on a GPU our kernels
(`KernelRunner`). On a GPU a prompt is computed in pieces of one size, and another text reuses the cache
of a prompt in whole pieces only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pearl.cache import Progress, silent
from pearl.models.feeds import Feed
from pearl.models.forward.layers import DecoderLayers
from pearl.models.forward.linear_layers import Rounding
from pearl.models.forward.slots import Slots
from pearl.models.runner import Capabilities, ModelRunner, check_feeds

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pearl.models.forward.decoder import Decoder


class ForwardRunner(ModelRunner):
    """Runs the weights of `model`, a `Decoder` or a model for which `has_own_forward` holds.

    It takes the weights away from the model.

    Args:
        context: the most tokens of a text.
        room: number of positions in a slot's cache, padding included.
        is_native: see `DecoderLayers`.
        slots: how many sequences the cache holds.
        rounding: how matrices are rounded: see `quantised.rounded`.
        rounds_rows: whether rows are rounded to 8 bits on a CPU: see `native.Native`.
        taps: layers whose inputs are kept for a head; see `DecoderLayers`.
        progress: see `DecoderLayers`.
    """

    def __init__(
        self,
        model: PreTrainedModel | Decoder,
        context: int,
        room: int,
        is_native: bool,
        slots: int = 1,
        rounding: Rounding = "",
        rounds_rows: bool = False,
        taps: Sequence[int] = (),
        progress: Progress = silent,
    ) -> None:
        self.context = context
        self.device = model.device
        rotary = model.model.rotary_emb
        with torch.inference_mode():
            layers = DecoderLayers(
                model, context, rounding, is_native, rounds_rows, taps, progress=progress
            )
            # A longrope chooses its angles by the greatest position, which must be in the context.
            positions = torch.arange(room, device=self.device).clamp_max(context - 1)
            self._ropes = layers.angles(rotary, positions)
            heads = layers.heads
            shape = (slots, len(layers), heads.kv, room, heads.dim)
            self.slots = Slots(shape, layers.dtype, self.device)
        self.layers = layers
        self._seen: dict[int, torch.Tensor] = {}  # features of each slot's last feed
        self.vocab_size = layers.vocab_size
        self.dtype = layers.dtype
        self.weights = rounding or layers.weights
        self.rounds_rows = layers.rounds_rows
        self.embedding = layers.embedding
        self.output = layers.head
        self.capabilities = Capabilities(
            slots=slots,
            row_invariant=True,
            features=len(taps) * self.embedding.shape[1],
        )

    def length(self, slot: int = 0) -> int:
        return self.slots.lengths[slot]

    def features(self, slot: int = 0) -> torch.Tensor:
        """Return the kept hidden states [n, capabilities.features] of the slot's last feed."""
        return self._seen[slot]

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        check_feeds(feeds, self, "our own forward")
        logits = self._compute(feeds)
        for feed in feeds:
            if feed.parents is None:
                self.slots.extend(feed.slot, len(feed.tokens))
        return logits

    def _compute(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """Return the logits [rows, vocab] of each feed, float32. The caller may overwrite them.

        Store each feed's hidden states for `features`, and its tree for `keep`.
        """
        raise NotImplementedError

    def rollback(
        self,
        length: int,
        slot: int = 0,
    ) -> None:
        self.slots.rollback(length, slot)

    def keep(
        self,
        path: Sequence[int],
        slot: int = 0,
    ) -> None:
        self.slots.keep(path, slot)

    def fork(
        self,
        slot: int,
        into: int,
        length: int | None = None,
        shared: int = 0,
    ) -> None:
        if length is None:
            length = self.length(slot)
        self.slots.fork(slot, into, length, shared)
