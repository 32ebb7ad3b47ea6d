"""Prompts on a GPU by our kernels: pieces of `PREFILL` rows by one recording, whatever the slot and the start.

Products, norms and gates are torch's operations; what takes many launches, or a length that the host would have to
know, is in `prompt_kernels`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from pearl.models.feeds import Feed
from pearl.models.forward.layers import DecoderLayers, Rope
from pearl.models.forward.slot_attention import PromptAttention
from pearl.models.forward.slots import Slots
from pearl.models.gpu.prefill_kernels import LEAST_DIM
from pearl.models.gpu.recordings import FED, MOST_OFF, PREFILL, Piece, Record, Rows

log = logging.getLogger(__name__)

_CHECKED = 160  # tokens: more than one tile


class Prompts:
    """Pieces of prompts of `layers`, of any slot and start.

    Args:
        ropes: tables of all positions, by the layers' rotations; see `DecoderLayers.angles`.
        record: records the piece, to be replayed; not where there are experts: the host reads which are chosen.
        rows: of a piece.
    """

    def __init__(
        self,
        layers: DecoderLayers,
        slots: Slots,
        ropes: Mapping[str, Rope],
        record: Record,
        rows: int = PREFILL,
    ) -> None:
        self._layers, self._slots, self._ropes, self._rows = layers, slots, ropes, rows
        self._device = layers.embedding.device
        self._given = torch.zeros(
            3 + rows, dtype=torch.long, device=self._device
        )  # slot, start, count, ids
        self._replay = (
            record(self._work)
            if all(layer.experts is None for layer in layers.layers)
            else self._work
        )

    def _work(self) -> Rows:
        """Hidden states [rows, hidden] after the last layer, and features."""
        attends = PromptAttention(self._given, self._slots, self._layers.scoring)
        return self._layers.hidden_states(
            self._given[3:], self._ropes, attends
        ), self._layers.features

    def hidden_states(self, feed: Feed, start: int) -> Rows:
        """Of the tokens of a chain, in buffers that the next piece overwrites; and features."""
        count, is_known = len(feed.tokens), not isinstance(feed.tokens, torch.Tensor)
        known = list(feed.tokens) if is_known else [0] * count
        given = torch.tensor(
            [feed.slot, start, count, *known, *[0] * (self._rows - count)],
            pin_memory=self._device.type == "cuda",
        )
        self._given.copy_(given, non_blocking=True)
        if isinstance(feed.tokens, torch.Tensor):
            self._given[3 : 3 + count] = feed.tokens
        hidden, features = self._replay()
        return hidden, None if features is None else features[:count]

    def forward(self, feed: Feed, start: int) -> Rows:
        """The logits that the feed asks for, and features.

        The head multiplies `FED` rows at a time, of which a row's place in the piece decides: so by one kernel.
        """
        hidden, features = self.hidden_states(feed, start)
        count = len(feed.tokens)
        first = (count - feed.rows) // FED * FED
        found = [
            self._layers.logits(hidden[at : at + FED])
            for at in range(first, count if feed.rows else 0, FED)
        ]
        if not found:
            return hidden.new_empty(0, self._layers.vocab_size, dtype=self._layers.dtype), features
        logits = found[0] if len(found) == 1 else torch.cat(found)
        return logits[count - feed.rows - first : count - first], features

    def is_right(self, expected: Callable[[Piece], torch.Tensor]) -> bool:
        """Whether hidden states have the same bits in the first and the last slot, and are near those of torch.

        Clears both slots.

        Args:
            expected: hidden states of a piece at position 0 of slot 0.
        """
        count, last = min(_CHECKED, self._rows), len(self._slots.lengths) - 1
        ids = tuple((7 + 11 * i) % self._layers.vocab_size for i in range(count))
        found, again = (
            self.hidden_states(Feed(ids, 0, slot), 0)[0][:count].clone() for slot in (0, last)
        )
        wanted = expected(Piece(self._given[1:2], self._given[3:], None))[:count].float()
        off = (found.float() - wanted).norm(dim=1) / wanted.norm(dim=1)
        return torch.equal(found, again) and bool(off.median() < MOST_OFF)


def make_prompts(
    layers: DecoderLayers,
    slots: Slots,
    ropes: Mapping[str, Rope],
    record: Record,
    expected: Callable[[Piece], torch.Tensor],
) -> Prompts | None:
    """Prompts by our kernels, checked; None where they do not fit the model, and a log line where they should.

    They fit numbers of two bytes, which tensor cores multiply, and heads of a power of two.

    Args:
        expected: see `Prompts.is_right`.
    """
    dim, device = layers.heads.dim, layers.embedding.device
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
