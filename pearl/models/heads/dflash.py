"""DFlash: a head that proposes a block of tokens with one forward.

A block has one row for the text's last token, the "anchor", and several rows for mask tokens.  The
anchor's row stands at the anchor's position, the other rows at the positions after it.

The rows attend to keys and values of two kinds.  For the text before the anchor, each layer
computes keys and values directly from the target's hidden states (after `fc` and `hidden_norm`), so
that the text's tokens need not pass through the layers.  For the block itself, they are computed as
usual; in most layers, each row sees all rows of the block.

The row at position p guesses the token at p, so the anchor's row guesses nothing.  In heads that
"sample from the anchor", the row at p guesses the token at p + 1.  The head uses the target's
embedding and output matrix; if the head has a smaller vocabulary, it has an output matrix of its
own.

A checkpoint has one of two layouts: that of vLLM's speculators, or that of SpecForge, whose
config.json has a table `dflash_config`.

Source: "DFlash: Block Diffusion for Flash Speculative Decoding", 2026; speculators 0.9.0; specforge 0.2.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pearl.models.checkpoints.direct import Weight
from pearl.models.checkpoints.rope import rope_of
from pearl.models.cpu import native
from pearl.models.families import Config, Forward, Shapes, layer_kinds, weight_shapes
from pearl.models.forward.attention import whole_blocks
from pearl.models.forward.layers import DecoderLayers
from pearl.models.forward.linear_layers import Rounding, matrix
from pearl.models.forward.slot_attention import (
    BlockAttention,
    BlockMask,
    NativeAttention,
    TorchAttention,
)
from pearl.models.forward.slots import Slots
from pearl.models.heads.head import Block, HeadTarget, Tensors
from pearl.models.heads.layers import (
    as_a_model,
    as_weights,
    check_biases,
    check_shapes,
    check_switches,
    check_vocabulary,
    decoder_of,
    forward_of_layers,
    shapes_of_biases,
    token_ids,
)

_PIECE = 512  # positions of a prompt whose states are read together
_COMPUTED = ("attention_bias", "mlp_bias", "use_sliding_window", "sample_from_anchor")
_NON_CAUSAL = "sliding_window_non_causal"


def target_layers(config: Config) -> tuple[int, ...] | None:
    """See `HeadKind`. SpecForge's number i names the output of layer i, which is the input of layer i + 1."""
    if is_of_speculators(config):
        return tuple(config["aux_hidden_state_layer_ids"])
    return tuple(number + 1 for number in config["dflash_config"]["target_layer_ids"])


def is_of_speculators(config: Config) -> bool:
    return "speculators_model_type" in config


def options_of(config: Config) -> Config:
    """Return the part of a config.json that has settings such as `mask_token_id`."""
    if is_of_speculators(config):
        return config
    options: Config = config["dflash_config"]
    return options


@dataclass(frozen=True)
class BlockSettings:
    """The settings of a block drafter in its config.json.

    Attributes:
        forward: how decoder layers of the drafter's model family are computed.
        layer: the configuration of the drafter's layers, as in a whole model's config.json.
        size: number of rows of a block.
        mask_token: the token id of all rows but the anchor's.
        first: the first row that guesses a token: 0 if heads sample from the anchor, else 1.
        mask: which positions each row of a block attends to.
    """

    forward: Forward
    layer: dict[str, Any]
    size: int
    mask_token: int
    first: int
    mask: BlockMask

    @staticmethod
    def of(
        config: Config, computed: tuple[str, ...] = (), samples_from_anchor: bool = False
    ) -> BlockSettings:
        """Read config.json. Raises `ValueError` for settings that are not supported.

        Args:
            computed: names of settings that may be true for heads of this kind, in addition to
                those that may be true for every DFlash head.
            samples_from_anchor: whether SpecForge's heads of this kind sample from the anchor. For
                heads of speculators, config.json says it.
        """
        options = options_of(config)
        inner = config.get("transformer_layer_config", config)
        non_causal = is_of_speculators(config) and bool(config.get(_NON_CAUSAL))
        check_switches((config, options, inner), (*_COMPUTED, _NON_CAUSAL, *computed))
        forward, layer = _layers_of(inner)
        windows = tuple(window for window, _ in layer_kinds(forward, layer))
        mask = BlockMask(
            windows=windows,
            is_causal=tuple(bool(window) and not non_causal for window in windows),
            has_one_start=is_of_speculators(config),
        )
        if is_of_speculators(config):
            samples_from_anchor = bool(config.get("sample_from_anchor"))
        if options.get("mask_token_id") is None:
            raise ValueError("its config.json has no mask_token_id: set it to the trainer's")
        return BlockSettings(
            forward=forward,
            layer=layer,
            size=int(config["block_size"]),
            mask_token=int(options["mask_token_id"]),
            first=0 if samples_from_anchor else 1,
            mask=mask,
        )

    def shapes(self, features: int) -> Shapes:
        """Return the shape of each tensor that the head needs.

        Args:
            features: width of the target's hidden states that the head reads.
        """
        hidden = int(self.layer["hidden_size"])
        model_shapes = weight_shapes(self.forward, self.layer)
        shapes = {name.removeprefix("model."): shape for name, shape in model_shapes.items()}
        del shapes["embed_tokens.weight"]
        del shapes["lm_head.weight"]
        shapes["hidden_norm.weight"] = (hidden,)
        shapes["fc.weight"] = (hidden, features)
        return shapes


def _layers_of(config: Config) -> tuple[Forward, dict[str, Any]]:
    """Return how a head's layers are computed, and their settings as in a model's config.json.

    The layers are computed as those of Qwen3 without biases in the MLP, even if config.json names
    Llama.  Raises `ValueError` for layers that PEARL cannot compute.
    """
    if config.get("is_causal") is not None:
        raise ValueError("its config.json sets is_causal, which is not computed: remove it")
    layer = as_a_model(config, int(config["num_hidden_layers"])) | {"mlp_bias": False}
    forward_of_layers(config.get("model_type", "qwen3"), layer)
    return forward_of_layers("qwen3", layer), layer


def make(
    config: Config,
    tensors: Tensors,
    target: HeadTarget,
    rounding: Rounding,
) -> DFlashHead:
    """See `HeadKind`."""
    settings = BlockSettings.of(config)
    weights = checked(settings, tensors, target, {})
    return DFlashHead(settings, weights, target, rounding)


def checked(
    settings: BlockSettings, tensors: Tensors, target: HeadTarget, further: Shapes
) -> Tensors:
    """Return a head's tensors, in the dtype and on the device of its target.

    Raises `ValueError` if they do not fit the settings or the target.

    Args:
        further: shapes of the tensors that the head has in addition to those of a DFlash head.
    """
    weights = as_weights(tensors, target)
    hidden = int(settings.layer["hidden_size"])
    if "fc.weight" in weights and weights["fc.weight"].shape[1] != target.features:
        raise ValueError(
            f"it reads {weights['fc.weight'].shape[1]} numbers and its target has {target.features} "
            "hidden states: it is of another model"
        )
    needed = settings.shapes(target.features)
    optional = shapes_of_biases(needed)
    if "lm_head.weight" in weights:
        count = len(weights["lm_head.weight"])
        optional |= {"lm_head.weight": (count, hidden), "d2t": (count,)}
        check_vocabulary(weights, target)
    if "embed_tokens.weight" in weights:
        optional["embed_tokens.weight"] = len(weights["embed_tokens.weight"]), hidden
    check_biases(weights, settings.layer["num_hidden_layers"])
    check_shapes(weights, needed | further, optional)
    width = target.embedding.shape[1]
    if width != hidden:
        raise ValueError(f"its states have {hidden} numbers, its target's embedding {width}")
    if settings.mask_token >= len(weights.get("embed_tokens.weight", target.embedding)):
        raise ValueError(
            f"its mask_token_id {settings.mask_token} is not in its target's vocabulary"
        )
    return weights


class TextEnd(NamedTuple):
    """The last tokens of a text.

    Attributes:
        before: the token before the anchor; the anchor itself if the head was given no earlier
            token.
        anchor: the last token, after which a block is guessed.
    """

    before: int
    anchor: int


class DFlashHead:
    """The weights of a head, and a cache for each slot; see `Head`.

    Args:
        tensors: the head's tensors, by the names that the package speculators gives them.
        rounding: how matrices are rounded; see `linear_layers.matrix`.
    """

    def __init__(
        self,
        settings: BlockSettings,
        tensors: Tensors,
        target: HeadTarget,
        rounding: Rounding,
    ) -> None:
        self._settings = settings
        self.context = target.context
        self.features = target.features
        self.weights = rounding or str(target.embedding.dtype).removeprefix("torch.")
        self.deepest = settings.size - settings.first
        self.device: torch.device = target.embedding.device
        on_cpu = self.device.type == "cpu"
        self._is_native = on_cpu and native.takes_model(self.device, settings.layer)
        embedding = tensors.get("embed_tokens.weight", target.embedding)
        layers = DecoderLayers(
            decoder_of(settings.layer, tensors, embedding),
            self.context,
            rounding,
            self._is_native,
            family=(settings.forward, settings.layer),
            output=None if "lm_head.weight" in tensors else target.output(),
        )
        self._layers = layers
        self._rounding: Rounding = rounding
        self.dtype = layers.dtype
        self._fuse = self._matrix(tensors["fc.weight"])
        self._hidden_norm = tensors["hidden_norm.weight"].to(self.dtype)
        known = len(tensors.get("lm_head.weight", range(target.vocab_size)))
        self.ids = token_ids(tensors, known, self.device)
        self._ends = [TextEnd(0, 0)] * target.slots
        room = whole_blocks(self.context + settings.size)
        heads = layers.heads
        shape = (target.slots, len(layers), heads.kv, room, heads.dim)
        self._slots = Slots(shape, self.dtype, self.device)
        self.lengths = self._slots.lengths
        positions = torch.arange(room, device=self.device)
        self._ropes = layers.angles(rope_of(settings.layer), positions)

    def _matrix(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return matrix(
            Weight(weight, bias),
            dtype=self.dtype,
            is_native=self._is_native,
            rounding=self._rounding,
        )

    def extend(self, tokens: torch.Tensor, features: torch.Tensor, slot: int) -> None:
        """See `Head.extend`."""
        anchor = int(tokens[-1])
        before = anchor  # as in training, where a text begins with its anchor
        if len(tokens) > 1:
            before = int(tokens[-2])
        elif self.lengths[slot]:
            before = self._ends[slot].anchor
        self.cache_states(features, slot)
        self._ends[slot] = TextEnd(before, anchor)

    def cache_states(self, features: torch.Tensor, slot: int) -> None:
        """Read the target's hidden states [n, features] of the slot's next positions."""
        for piece in features.split(_PIECE):
            self._read(piece, slot)

    def copy(self, slot: int, into: int, end: int) -> None:
        """Copy what is cached of the first `end` positions into slot `into`, whose length becomes `end`."""
        for buffer in (self._slots.keys, self._slots.values):
            buffer[into, :, :, :end] = buffer[slot, :, :, :end]
        self.lengths[into] = end

    def _read(self, features: torch.Tensor, slot: int) -> None:
        """Cache each layer's keys and values for the slot's next positions."""
        layers = self._layers
        states = layers.normalise(self._fuse(features.to(self.dtype)), self._hidden_norm)
        attention = TorchAttention(self._slots, slot, self.lengths[slot], layers.scoring)
        for number, layer in enumerate(layers.layers):
            _, keys, values = layers.queries_keys_values(layer, states)
            rope = None if layer.rope is None else self._ropes[layer.rope]
            attention.write(number, keys, values, rope)
        self.lengths[slot] += len(features)

    def propose(self, block: Block, slot: int) -> None:
        """See `Head.propose`."""
        end = self._ends[slot]
        self.add_levels(block, self.block_states([end.anchor], slot), end)

    def block_states(self, first_tokens: Sequence[int], slot: int) -> torch.Tensor:
        """Run a block that continues a slot; return its states [size, hidden] after the last norm.

        Args:
            first_tokens: the anchor and the known tokens after it, which take the places of mask
                tokens. The anchor's position is `lengths[slot]`, the first one for which the slot
                has no states of the target.
        """
        layers = self._layers
        settings = self._settings
        tokens = torch.full((settings.size,), settings.mask_token, device=self.device)
        tokens[: len(first_tokens)] = torch.tensor(first_tokens, device=self.device)
        attends = self._attention(slot)
        hidden = layers.embedding[tokens].to(layers.residual_dtype)
        for number in range(len(layers)):
            hidden = self.layer_states(number, hidden, attends)
        return layers.normalise(hidden, layers.norm)

    def _attention(self, slot: int) -> NativeAttention | BlockAttention:
        """Return the attention of a block that continues the slot."""
        layers = self._layers
        mask = self._settings.mask
        size = self._settings.size
        start = self.lengths[slot]
        scoring = layers.scoring
        if not self._is_native or any(mask.is_causal):
            return BlockAttention(self._slots, slot, start, scoring, mask)
        end = start + size
        table = torch.tensor([(slot, position, end, -1) for position in range(start, end)])
        # All rows end their windows at the end of the block.
        windows = []
        for window in mask.windows:
            windows.append(window + size if window else 0)
        scoring = scoring._replace(windows=tuple(windows))
        return NativeAttention(table, end, False, self._slots, scoring, layers.heads, layers.eps)

    def layer_states(
        self, number: int, hidden: torch.Tensor, attends: NativeAttention | BlockAttention
    ) -> torch.Tensor:
        """Apply layer `number` to a block's states [size, hidden], and return the new states."""
        layers = self._layers
        x = layers.normalise(hidden, layers.layers[number].attention_norm)
        return layers.layer_states(number, hidden, x, self._ropes, attends)

    def add_levels(self, block: Block, states: torch.Tensor, end: TextEnd) -> None:
        """Add a level for each row of `states` that guesses a token, while `block` wants more.

        Args:
            states: [size, hidden], as `block_states` returns them.
            end: the last tokens of the text before the block.
        """
        for logits in self.logits(states[self._settings.first :]):
            block.add(logits)
            if not block.wants_more:
                return

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, len(ids)] of states [n, hidden], float32."""
        return self._layers.head(states)[:, : len(self.ids)].float()
