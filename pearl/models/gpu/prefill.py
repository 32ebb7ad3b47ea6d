"""Prompts on a GPU: one recording (a CUDA graph) computes any piece of up to `PREFILL` tokens.

Products, norms and gates are torch's operations. Our kernels in `prefill_kernels` do the rest. With
torch's operations the rest would need many launches, and the host would have to know all lengths.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from pearl.models.feeds import Feed, Tokens
from pearl.models.forward.layers import DecoderLayers, Rope
from pearl.models.forward.slots import Slots
from pearl.models.gpu.check import MOST_OFF, relative_errors, sample_ids, torch_states
from pearl.models.gpu.prefill_kernels import PromptAttention
from pearl.models.gpu.recordings import FED, PREFILL, Record, Rows, joined

_CHECKED = 160  # tokens: more than one tile


class Prompts:
    """Computes the prompt of a slot with `layers`, from any position on, in pieces that end at multiples of `PREFILL`.

    Args:
        ropes: cosines and sines of all positions, by the rope's name; see `DecoderLayers.angles`.
        record: records the forward of a piece, and returns a function that replays it. Layers with
            experts are not recorded, because the host reads which experts are chosen.
    """

    def __init__(
        self,
        layers: DecoderLayers,
        slots: Slots,
        ropes: Mapping[str, Rope],
        record: Record,
    ) -> None:
        self._layers = layers
        self._slots = slots
        self._ropes = ropes
        # Slot, start, count, ids.
        self._inputs = torch.zeros(3 + PREFILL, dtype=torch.long, device=layers.embedding.device)
        self._replay = self._work
        if not layers.has_experts:
            self._replay = record(self._work)

    def _work(self) -> Rows:
        """Compute the piece in `_inputs`.

        Return the last layer's states [rows, hidden], and the hidden states that a head reads.
        """
        attends = PromptAttention(self._inputs, self._slots, self._layers.scoring)
        hidden = self._layers.hidden_states(self._inputs[3:], self._ropes, attends)
        return hidden, self._layers.features

    def _hidden_states(
        self,
        tokens: Tokens,
        slot: int,
        start: int,
    ) -> Rows:
        """Return what `_work` computes for all rows of a piece, padding included.

        The results are in buffers that the next piece overwrites.
        """
        inputs = self._inputs
        count = len(tokens)
        numbers = [slot, start, count]
        if not isinstance(tokens, torch.Tensor):
            numbers += tokens
        numbers += [0] * (len(inputs) - len(numbers))
        inputs.copy_(torch.tensor(numbers, pin_memory=inputs.is_cuda), non_blocking=True)
        if isinstance(tokens, torch.Tensor):
            inputs[3 : 3 + count] = tokens
        self._slots.wrote(slot, start + PREFILL)
        return self._replay()

    def forward(self, feed: Feed) -> Rows:
        """Return the logits that the feed asks for, and the states that a drafting head reads.

        The states are those of all tokens of the feed; None if no head reads states.
        """
        start = self._slots.lengths[feed.slot]
        end = start + len(feed.tokens)
        logits: list[torch.Tensor] = []
        features: list[torch.Tensor] = []
        begin = start
        while begin < end:
            stop = min(end, begin - begin % PREFILL + PREFILL)
            rows = min(stop - begin, max(0, feed.rows - (end - stop)))
            piece = replace(feed, tokens=feed.tokens[begin - start : stop - start], rows=rows)
            piece_logits, piece_features = self._piece(piece, begin)
            logits.append(piece_logits)
            if piece_features is not None:
                features.append(piece_features[: stop - begin].clone())
            begin = stop
        return joined(logits, features)

    def _piece(
        self,
        piece: Feed,
        start: int,
    ) -> Rows:
        """Return the logits that a piece asks for, and the states of all its rows for a head.

        The output head multiplies `FED` rows at a time, from a multiple of `FED` on, so that a row's logits
        always come from the same kernel.
        """
        hidden, features = self._hidden_states(piece.tokens, piece.slot, start)
        if not piece.rows:
            empty = hidden.new_empty(0, self._layers.vocab_size, dtype=self._layers.dtype)
            return empty, features
        count = len(piece.tokens)
        first = count - piece.rows
        begin = first // FED * FED
        parts = [self._layers.logits(hidden[at : at + FED]) for at in range(begin, count, FED)]
        return torch.cat(parts)[first - begin : count - begin], features

    def problem(self) -> str:
        """Check the kernels on a sample text. Return what is wrong with them; "" if nothing is.

        The text is computed in the first and in the last slot. Both must give the same bits, and
        the states must be near those of torch's operations. Both slots are cleared.
        """
        slots = self._slots
        last_slot = len(slots.lengths) - 1
        ids = sample_ids(_CHECKED, self._layers.vocab_size)
        states = []
        for slot in (0, last_slot):
            hidden, _ = self._hidden_states(ids, slot, 0)
            states.append(hidden[:_CHECKED].clone())
        reference = torch_states(self._layers, slots, self._ropes, ids)
        slots.rollback(0, 0)
        slots.rollback(0, last_slot)
        errors = relative_errors(states[0], reference)
        if torch.equal(*states) and errors.median() < MOST_OFF:
            return ""
        return "our kernels of prompts give wrong rows here"
