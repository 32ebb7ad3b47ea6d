"""Prompts on a GPU: pieces of `PREFILL` rows by one recording, whatever the slot and the start.

Products, norms and gates are torch's operations. Our kernels in `prefill_kernels` do what would need
many launches, or a length that the host would have to know.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from pearl.models.feeds import Feed
from pearl.models.forward.layers import DecoderLayers, Rope
from pearl.models.forward.slot_attention import PromptAttention
from pearl.models.forward.slots import Slots
from pearl.models.gpu.prefill_kernels import LEAST_DIM
from pearl.models.gpu.recordings import (
    FED,
    MOST_OFF,
    PREFILL,
    PieceInputs,
    Record,
    Reference,
    Rows,
    fill,
    joined,
    relative_errors,
    sample_ids,
)

log = logging.getLogger(__name__)

_CHECKED = 160  # tokens: more than one tile


class Prompts:
    """Computes pieces of prompts by `layers`, of any slot and start.

    Args:
        ropes: tables of all positions, by the layers' ropes; see `DecoderLayers.angles`.
        record: records the piece, to be replayed. Layers with experts are not recorded: the host
            reads which experts are chosen.
        rows: rows of a piece.
    """

    def __init__(
        self,
        layers: DecoderLayers,
        slots: Slots,
        ropes: Mapping[str, Rope],
        record: Record,
        rows: int = PREFILL,
    ) -> None:
        self._layers = layers
        self._slots = slots
        self._ropes = ropes
        self._rows = rows
        # Slot, start, count, ids.
        self._given = torch.zeros(3 + rows, dtype=torch.long, device=layers.embedding.device)
        self._replay = self._work
        if all(layer.experts is None for layer in layers.layers):
            self._replay = record(self._work)

    def _work(self) -> Rows:
        """Compute hidden states [rows, hidden] after the last layer, and features."""
        attends = PromptAttention(self._given, self._slots, self._layers.scoring)
        hidden = self._layers.hidden_states(self._given[3:], self._ropes, attends)
        return hidden, self._layers.features

    def hidden_states(self, feed: Feed, start: int) -> Rows:
        """Return the hidden states of a chain's tokens and of the padding, and their features.

        They are in buffers that the next piece overwrites.
        """
        fill(self._given, (feed.slot, start, len(feed.tokens)), feed.tokens)
        return self._replay()

    def forward(self, feed: Feed, start: int) -> Rows:
        """Return the logits that the feed asks for, and the features of all rows.

        The head multiplies `FED` rows at a time, chosen by their place in the piece, so that one
        kernel computes each row of logits.
        """
        hidden, features = self.hidden_states(feed, start)
        if not feed.rows:
            empty = hidden.new_empty(0, self._layers.vocab_size, dtype=self._layers.dtype)
            return empty, features
        count = len(feed.tokens)
        begin = (count - feed.rows) // FED * FED
        parts = [self._layers.logits(hidden[at : at + FED]) for at in range(begin, count, FED)]
        logits, _ = joined(parts, ())
        return logits[count - feed.rows - begin : count - begin], features

    def is_right(self, expected: Reference) -> bool:
        """Check that the first and the last slot give the same bits, and that torch's are near.

        Both slots are cleared.

        Args:
            expected: computes the hidden states of a piece at position 0 of slot 0.
        """
        count = min(_CHECKED, self._rows)
        last_slot = len(self._slots.lengths) - 1
        ids = sample_ids(count, self._layers.vocab_size)
        states = []
        for slot in (0, last_slot):
            hidden, _ = self.hidden_states(Feed(ids, 0, slot), 0)
            states.append(hidden[:count].clone())
        reference = expected(PieceInputs(self._given[1:2], self._given[3:], None))[:count].float()
        errors = relative_errors(states[0].float(), reference)
        return torch.equal(*states) and bool(errors.median() < MOST_OFF)


def make_prompts(
    layers: DecoderLayers,
    slots: Slots,
    ropes: Mapping[str, Rope],
    record: Record,
    expected: Reference,
) -> Prompts | None:
    """Build the prompts' kernels and check them; return None, and log why, if they do not work.

    They need numbers of two bytes, which tensor cores multiply, and heads of a power of two; other
    models get None without a log line.

    Args:
        expected: see `Prompts.is_right`.
    """
    dim = layers.heads.dim
    device = layers.embedding.device
    if dim < LEAST_DIM or dim & (dim - 1) or (device.type == "cuda" and layers.dtype.itemsize != 2):
        return None
    try:
        prompts = Prompts(layers, slots, ropes, record)
        if prompts.is_right(expected):
            return prompts
        log.warning("our kernels of prompts give wrong rows here: prompts are torch's operations")
    except Exception as problem:  # of Triton: its compilers' errors have no common base
        log.warning(
            "our kernels of prompts do not run here, prompts are torch's operations: %s", problem
        )
    finally:
        for slot in {0, len(slots.lengths) - 1}:
            slots.wrote(slot, PREFILL)
            slots.rollback(0, slot)
    return None
