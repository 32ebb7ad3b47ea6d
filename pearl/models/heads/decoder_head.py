"""The base class of heads that draft token by token.

Such a head has decoder layers.  They are computed by PEARL's own forward pass, and not by
transformers.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from pearl.models.checkpoints.direct import Weight
from pearl.models.checkpoints.rope import rope_of
from pearl.models.cpu import native
from pearl.models.families import Config, Forward
from pearl.models.feeds import Feed, lay_out
from pearl.models.forward.attention import Scoring, whole_blocks
from pearl.models.forward.layers import DecoderLayers
from pearl.models.forward.linear_layers import Matrix, Rounding, matrix
from pearl.models.forward.slot_attention import NativeAttention, TorchAttention
from pearl.models.forward.slots import Slots
from pearl.models.heads.chain import DraftHead
from pearl.models.heads.head import HeadTarget, Tensors
from pearl.models.heads.layers import decoder_of, token_ids

_PIECE = 512  # tokens of a prompt that are computed together


class DecoderHead(DraftHead):
    """The decoder layers of a head, and a cache for each slot; see `DraftHead`.

    Attributes:
        windows: the attention window of each layer, in tokens; 0: none.

    Args:
        forward: how layers of this model family are computed.
        layer: the configuration of the layers, in the form that a whole model's config.json has.
        tensors: the head's tensors, by the names that the package speculators gives them. If the
            embedding or the output matrix is missing, the target's is used.
        rounding: how matrices are rounded; see `linear_layers.matrix`.
    """

    def __init__(
        self,
        forward: Forward,
        layer: Config,
        tensors: Tensors,
        target: HeadTarget,
        rounding: Rounding,
    ) -> None:
        super().__init__()
        self.context = target.context
        self.features = target.features
        self.device: torch.device = target.embedding.device
        on_cpu = self.device.type == "cpu"
        self._is_native = on_cpu and native.takes_model(self.device, layer)
        self._rounding: Rounding = rounding
        embedding = tensors.get("embed_tokens.weight", target.embedding)
        layers = DecoderLayers(
            decoder_of(layer, tensors, embedding),
            self.context,
            rounding,
            self._is_native,
            family=(forward, dict(layer)),
            output=None if "lm_head.weight" in tensors else target.output(),
        )
        self._layers = layers
        self.windows = layers.scoring.windows
        self.dtype = layers.dtype
        self.hidden = layers.embedding.shape[1]
        self.weights = rounding or str(target.embedding.dtype).removeprefix("torch.")
        count = len(tensors.get("lm_head.weight", range(target.vocab_size)))
        self.ids = token_ids(tensors, count, self.device)
        room = whole_blocks(self.context)
        heads = layers.heads
        shape = (target.slots, len(layers), heads.kv, room, heads.dim)
        self._slots = Slots(shape, self.dtype, self.device)
        self.lengths = self._slots.lengths
        positions = torch.arange(room, device=self.device)
        self._ropes = layers.angles(rope_of(layer), positions)

    def _matrix(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
        return matrix(
            Weight(weight, bias),
            dtype=self.dtype,
            is_native=self._is_native,
            rounding=self._rounding,
        )

    def read(
        self, tokens: torch.Tensor, states: torch.Tensor, slot: int, guessed: int = 0
    ) -> torch.Tensor:
        """See `ChainHead.read`."""
        outputs = []
        for piece, before in zip(tokens.split(_PIECE), states.split(_PIECE), strict=True):
            outputs.append(self._outputs(piece, before, slot, guessed))
            self.lengths[slot] += len(piece)
        return torch.cat(outputs)

    @abstractmethod
    def _outputs(
        self, tokens: torch.Tensor, states: torch.Tensor, slot: int, guessed: int
    ) -> torch.Tensor:
        """Run the layers on `tokens` [n], which continue a slot; return the outputs [n, hidden].

        The keys and values of the tokens are added to the cache.  For the arguments see
        `ChainHead.read`.
        """

    def copy(self, slot: int, into: int, start: int, end: int) -> None:
        """See `DraftHead.copy`."""
        for buffer in (self._slots.keys, self._slots.values):
            buffer[into, :, :, start:end] = buffer[slot, :, :, start:end]
        self.lengths[into] = end

    def _attention(
        self, tokens: torch.Tensor, slot: int, guessed: int
    ) -> NativeAttention | TorchAttention:
        """Return the attention of tokens that continue a slot."""
        layers = self._layers
        scoring = _widened(layers.scoring, guessed)
        if self._is_native:
            layout = lay_out([Feed(tokens, 0, slot)], self.lengths)
            return NativeAttention(
                layout.table, layout.end, False, self._slots, scoring, layers.heads, layers.eps
            )
        return TorchAttention(self._slots, slot, self.lengths[slot], scoring)


def _widened(scoring: Scoring, guessed: int) -> Scoring:
    """Widen each window by the number of guesses, so that guesses do not move its start.

    For example, with a window of 8 tokens and 2 guesses, the window becomes 10.  Heads are trained
    like this.  In speculators' trainer, the tokens that the first guess sees stay visible to all
    further guesses, and guesses are visible in addition.
    """
    windows = tuple(window + guessed if window else 0 for window in scoring.windows)
    return scoring._replace(windows=windows)
