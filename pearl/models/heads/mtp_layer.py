"""A layer for multi-token prediction in a checkpoint of its own, which our own forward computes.

For each token but the first, the layer reads the token together with the target's state of the
token before it.  This is the state after the target's last layer, before its last norm.  Let e be
the token's embedding and h the state.  Then the decoder layer reads input_proj [token_layernorm e,
hidden_layernorm h].  The layer's output passes `final_layernorm`, and the target's output matrix
makes logits of it.  From these a token is drafted.  To read the drafted token, the layer takes the
same output as h, because the target has no state there yet.

Such checkpoints have neither an embedding nor an output matrix: the head uses the target's.

Training and drafting differ in what a guess attends to.  speculators' trainer makes a first guess,
a second guess and so on after each token of a text.  There a second guess attends only to second
guesses, and a third guess only to third guesses.  In engines, every guess attends to one cache, in
which the text's tokens were read with the target's states.  This head does as engines do.

Source: "FastMTP: Accelerating LLM Inference with Enhanced Multi-Token Prediction", 2025; speculators 0.9.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pearl.models.families import Config, Forward, Shapes, weight_shapes
from pearl.models.forward.linear_layers import Rounding
from pearl.models.heads.decoder_head import DecoderHead
from pearl.models.heads.head import HeadTarget, Tensors
from pearl.models.heads.layers import (
    as_a_model,
    as_weights,
    check_biases,
    check_shapes,
    check_switches,
    forward_of_layers,
    shapes_of_biases,
)

_LAYER = "mtp_layers.0."
_PLACE = "layers.0."  # the layer's name in a model with one layer
_LAST_NORM = f"{_LAYER}final_layernorm.weight"
_HIDDEN_NORM = "hidden_layernorm.weight"
_TOKEN_NORM = "token_layernorm.weight"
_PROJECTION = "input_proj.weight"
_COPIES = ("embed_tokens.weight", "lm_head.weight")  # the target's; old versions saved copies
_COMPUTED = ("attention_bias", "use_sliding_window")


def target_layers(config: Config) -> tuple[int, ...] | None:
    """See `HeadKind`. The head reads the input of the target's last norm.

    This input has the number N if the target has N layers: `transformer_layer_config` states N.
    """
    return (int(config["transformer_layer_config"]["num_hidden_layers"]),)


def layer_of(config: Config) -> tuple[Forward, dict[str, Any]]:
    """Return how the layer is computed, and its settings as those of a model with one layer.

    Raises `ValueError` for a layer that PEARL cannot compute.
    """
    inner = config["transformer_layer_config"]
    kind = inner.get("model_type")
    if kind != "qwen3":
        raise ValueError(
            f"its layer is of model type {kind!r}, and qwen3 alone is computed: write it into its "
            "target's checkpoint (speculators stitch-mtp), and name the target as the head, too"
        )
    if config.get("num_nextn_predict_layers", 1) != 1:
        raise ValueError(f"it has {config['num_nextn_predict_layers']} layers, not one")
    check_switches((config, inner), _COMPUTED)
    # The trainer's mask is causal, whatever windows the target's layers have.
    whole = {"layer_types": None, "sliding_window": None, "use_sliding_window": False}
    layer = as_a_model(inner | whole, 1)
    return forward_of_layers(kind, layer), layer


def make(
    config: Config,
    tensors: Tensors,
    target: HeadTarget,
    rounding: Rounding,
) -> MtpLayerHead:
    """See `HeadKind`."""
    forward, layer = layer_of(config)
    layer_tensors = {name: tensor for name, tensor in tensors.items() if name not in _COPIES}
    weights = as_weights(layer_tensors, target)
    hidden = int(layer["hidden_size"])
    width = target.embedding.shape[1]
    if not hidden == width == target.features:
        raise ValueError(
            f"it reads {hidden} numbers, its target has {target.features} hidden states and an "
            f"embedding of {width}: it is of another model"
        )
    shapes = shapes_of(forward, layer)
    check_shapes(weights, shapes, shapes_of_biases(shapes))
    placed = {_place(name): tensor for name, tensor in weights.items()}
    check_biases(placed, 1)
    return MtpLayerHead(forward, layer, placed, target, rounding)


def _place(name: str) -> str:
    """Return the name of a tensor in a model with one layer: "layers.0.x" for "mtp_layers.0.x"."""
    return name.replace(_LAST_NORM, "norm.weight").replace(_LAYER, _PLACE)


def shapes_of(forward: Forward, layer: Mapping[str, Any]) -> Shapes:
    """Return the shape of each tensor that the layer needs."""
    hidden = int(layer["hidden_size"])
    shapes: Shapes = {_LAST_NORM: (hidden,)}
    for name, shape in weight_shapes(forward, layer).items():
        part = name.removeprefix(f"model.{_PLACE}")
        if part != name:
            shapes[_LAYER + part] = shape
    shapes[_LAYER + _HIDDEN_NORM] = (hidden,)
    shapes[_LAYER + _TOKEN_NORM] = (hidden,)
    shapes[_LAYER + _PROJECTION] = (hidden, 2 * hidden)
    return shapes


class MtpLayerHead(DecoderHead):
    """See `DecoderHead`."""

    def __init__(
        self,
        forward: Forward,
        layer: Config,
        tensors: Tensors,
        target: HeadTarget,
        rounding: Rounding,
    ) -> None:
        super().__init__(forward, layer, tensors, target, rounding)
        self._project = self._matrix(tensors[_PLACE + _PROJECTION])
        self._hidden_norm = tensors[_PLACE + _HIDDEN_NORM].to(self.dtype)
        self._token_norm = tensors[_PLACE + _TOKEN_NORM].to(self.dtype)

    def fused(self, features: torch.Tensor) -> torch.Tensor:
        """See `ChainHead.fused`."""
        return features.to(self.dtype)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """See `ChainHead.logits`."""
        return self._layers.head(outputs)[:, : len(self.ids)].float()

    def _outputs(
        self, tokens: torch.Tensor, states: torch.Tensor, slot: int, guessed: int
    ) -> torch.Tensor:
        """See `DecoderHead._outputs`."""
        layers = self._layers
        attends = self._attention(tokens, slot, guessed)
        embedded = layers.normalise(layers.embedding[tokens].to(self.dtype), self._token_norm)
        normed = layers.normalise(states, self._hidden_norm)
        hidden = self._project(torch.cat((embedded, normed), -1)).to(layers.residual_dtype)
        x = layers.normalise(hidden, layers.layers[0].attention_norm)
        hidden = layers.layer_states(0, hidden, x, self._ropes, attends)
        return layers.normalise(hidden, layers.norm)
