"""Helpers to check our kernels when a model is loaded: their rows must be near those of torch's operations."""

from collections.abc import Mapping, Sequence

import torch

from pearl.errors import ModelError
from pearl.models.forward.layers import DecoderLayers, Rope
from pearl.models.forward.slot_attention import TorchAttention
from pearl.models.forward.slots import Slots

# Our kernels are refused if their rows have this relative error or more. Rounding makes a few hundredths.
MOST_OFF = 0.25


class KernelsUnfit(ModelError):
    """Our kernels cannot compute this model here: the message says why."""


def sample_ids(count: int, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of a text with which kernels are checked."""
    return tuple((7 + 11 * position) % vocab_size for position in range(count))


def torch_states(
    layers: DecoderLayers,
    slots: Slots,
    ropes: Mapping[str, Rope],
    ids: Sequence[int],
) -> torch.Tensor:
    """Compute a text in slot 0 with torch's operations; return the last layer's states [n, hidden].

    Args:
        ropes: cosines and sines of all positions, by the rope's name; see `DecoderLayers.angles`.
    """
    attends = TorchAttention(slots, 0, 0, layers.scoring)
    return layers.hidden_states(torch.tensor(ids, device=layers.embedding.device), ropes, attends)


def relative_errors(rows: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return norm(row - reference) / norm(reference) for each row."""
    reference = reference.float()
    return (rows.float() - reference).norm(dim=1) / reference.norm(dim=1)
