"""An EAGLE-3 head: decoder layers that guess what the target writes next from its hidden states.

For each token but the first, the head reads the token and the target's states of the token before
it.  Its output for the last token guesses the next token.  To draft further tokens, it reads its own
outputs in place of the target's states.  The target verifies every guess, so an inexact head costs
acceptance, not correctness.

The layers are those of a Llama or a Qwen3, and `DecoderLayers` computes them.  Only the first layer
differs: with e the token's embedding and h the states, it computes queries, keys and values from
[norm(e), norm(h)], and adds the output of attention to h or norm(h).

There are three trainers.  Heads of the authors and of SpecForge have one layer, called "midlayer".
Heads of vLLM's speculators have "layers.0", "layers.1" ..., described in `transformer_layer_config`.

Source: "EAGLE-3", Li et al. 2025; published checkpoints; speculators 0.9.0; specforge 0.2.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
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
    check_vocabulary,
    forward_of_layers,
    shapes_of_biases,
)

_DEFAULT_LAYERS = 3  # layers of the target that a head reads if its config.json names none
_FIRST = "layers.0."
_MIDLAYER = "midlayer."
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# Settings of config.json that may be true.
_COMPUTED = {
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "use_aux_hidden_state",
    "attention_bias",
    "qkv_bias",
    "mlp_bias",
    "use_sliding_window",
    "use_input_layernorm_in_first_layer",  # this setting's tensor and the next one's must be there
    "use_last_layernorm",
}
_OTHERS = {  # part of a tensor's name -> kind of the checkpoint
    "eh_proj": "a layer for multi-token prediction, which --head NAME takes where NAME is the target",
    "medusa": "Medusa heads",
    "lm_head.0": "Medusa heads",
    "mask_hidden": 'a P-EAGLE head (let config.json say so: "architectures": ["PEagleDraftModel"])',
    "model.layers.1.": "a whole model: use it as --draft",
}


def target_layers(config: Config) -> tuple[int, ...] | None:
    """See `HeadKind`.

    In configurations of speculators and vLLM, number i names the input of layer i, and the number of
    layers names the input of the last norm.  In `eagle_config`, as SGLang and SpecForge write it,
    number i names the output of layer i, which is the input of layer i + 1.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    nested = config.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise ValueError("its eagle_config reads the last hidden states alone, as EAGLE 1 and 2 do")
    inputs = tuple(config.get(name) or ())
    outputs = tuple(nested.get(name) or ())
    numbers = tuple(number + 1 for number in outputs)
    if inputs and numbers and inputs != numbers:
        raise ValueError(
            f"its {name} {list(inputs)} and those of its eagle_config {list(outputs)} name other "
            "states: number i is what layer i reads in the former, and what it outputs in the "
            "latter. Remove the wrong ones"
        )
    return inputs or numbers or None


@dataclass(frozen=True)
class HeadSettings:
    """The settings of a head in its config.json.

    Attributes:
        forward: how decoder layers of the head's model family are computed.
        layer: the configuration of the head's layers, as in a whole model's config.json.
        input_norms: the norms that the target's states pass before `fc`, in this order.  Each entry
            names a norm's weights: one tensor if the norm is over the states of all layers
            together, or a tensor for each layer if each layer's states are normalised alone.
        norms_residual: whether the first layer adds its outputs to norm(h), not to h.
        feeds_normed: whether a drafted token is read with the last norm's output, instead of with
            the last layer's.
        norms_logits: whether `lm_head` reads the output of the last norm.
    """

    forward: Forward
    layer: dict[str, Any]
    input_norms: tuple[tuple[str, ...], ...]
    norms_residual: bool
    feeds_normed: bool
    norms_logits: bool

    @staticmethod
    def of(config: Config, names: Iterable[str]) -> HeadSettings:
        """Read config.json. Raises `ValueError` for settings that are not supported.

        Args:
            names: the names that speculators gives the head's tensors.
        """
        inner = config.get("transformer_layer_config") or config
        check_switches((config, inner, config.get("eagle_config") or {}), _COMPUTED)
        is_of_speculators = "speculators_model_type" in config
        forward, layer = _layers_of(inner, set(names), is_of_speculators)
        # In speculators norm_output says whether the next step reads normalised outputs; in
        # SpecForge, whether there is a norm before lm_head.
        norms_output = config.get("norm_output")
        return HeadSettings(
            forward=forward,
            layer=layer,
            input_norms=_input_norms(config),
            norms_residual=bool(config.get("norm_before_residual")),
            feeds_normed=is_of_speculators and bool(norms_output),
            norms_logits=is_of_speculators or norms_output is None or bool(norms_output),
        )

    def shapes(self, features: int, vocab_size: int) -> Shapes:
        """Return the shape of each tensor that the head needs.

        Args:
            features: width of the target's hidden states that the head reads.
            vocab_size: size of the head's own vocabulary.
        """
        hidden = int(self.layer["hidden_size"])
        model_shapes = weight_shapes(self.forward, self.layer)
        shapes = {name.removeprefix("model."): shape for name, shape in model_shapes.items()}
        del shapes["embed_tokens.weight"]  # optional: a head may read the target's
        for name in _PROJECTIONS:
            outputs, inputs = shapes[f"{_FIRST}{name}.weight"]
            shapes[f"{_FIRST}{name}.weight"] = (outputs, 2 * inputs)
        shapes[f"{_FIRST}hidden_norm.weight"] = (hidden,)
        shapes["fc.weight"] = (hidden, features)
        shapes["lm_head.weight"] = (vocab_size, hidden)
        for names in self.input_norms:
            for name in names:
                shapes[name] = (features // len(names),)
        return shapes


def _input_norms(config: Config) -> tuple[tuple[str, ...], ...]:
    """Return `HeadSettings.input_norms` for a config.json."""
    count = len(target_layers(config) or range(_DEFAULT_LAYERS))
    norms: list[tuple[str, ...]] = []
    if config.get("norm_before_fc"):
        norms.append(("input_norm.weight",))
    if config.get("fc_norm"):
        norms.append(tuple(f"fc_norm.{number}.weight" for number in range(count)))
    return tuple(norms)


def _layers_of(
    config: Config, names: set[str], is_of_speculators: bool
) -> tuple[Forward, dict[str, Any]]:
    """Return how a head's layers are computed, and their settings as in a model's config.json.

    Raises `ValueError` for layers that PEARL cannot compute.

    Args:
        names: the names that the package speculators gives the head's tensors.
    """
    kind = config.get("model_type", "qwen3")
    if not is_of_speculators:  # one Llama layer, whatever model type the file names
        kind = "llama"
        if f"{_FIRST}self_attn.q_norm.weight" in names:
            kind = "qwen3"
    numbers = {int(name.split(".")[1]) for name in names if name.startswith("layers.")}
    if is_of_speculators:
        count = int(config["num_hidden_layers"])
    else:
        count = len(numbers)
    layer = as_a_model(config, count)
    if not is_of_speculators:  # SpecForge ignores these: a head has the biases that its file has
        layer |= {"attention_bias": False, "mlp_bias": False}
    return forward_of_layers(kind, layer), layer


def make(
    config: Config,
    tensors: Tensors,
    target: HeadTarget,
    rounding: Rounding,
) -> Eagle3Head:
    """See `HeadKind`."""
    for part, kind in _OTHERS.items():
        if any(part in name for name in tensors):
            raise ValueError(f"it is {kind}, not an EAGLE-3 head")
    in_file = {_common(name): name for name in tensors}
    if f"{_FIRST}self_attn.q_proj.weight" not in in_file:
        examples = ", ".join(sorted(tensors)[:3])
        raise ValueError(
            f"it is no EAGLE-3 head: {len(tensors)} tensors such as {examples}, and no first layer"
        )
    settings = HeadSettings.of(config, in_file)
    weights = as_weights({name: tensors[source] for name, source in in_file.items()}, target)
    _check_tensors(settings, weights, target, in_file)
    check_vocabulary(weights, target)
    return Eagle3Head(settings, weights, target, rounding)


def _common(name: str) -> str:
    """Return the name that speculators gives a tensor: "layers.0.x" for "midlayer.x"."""
    if name.startswith(_MIDLAYER):
        return _FIRST + name.removeprefix(_MIDLAYER)
    return name


def _check_tensors(
    settings: HeadSettings,
    tensors: Tensors,
    target: HeadTarget,
    in_file: Mapping[str, str],
) -> None:
    """Raise `ValueError` if a tensor is missing, superfluous or of another shape.

    Args:
        in_file: the name that speculators gives a tensor -> the tensor's name in the checkpoint.
    """
    hidden = int(settings.layer["hidden_size"])
    _check_inputs(tensors, hidden, target.features)
    shapes = settings.shapes(target.features, len(tensors.get("lm_head.weight", ())))
    optional = _optional_shapes(shapes, tensors)
    check_biases(tensors, settings.layer["num_hidden_layers"])
    check_shapes(tensors, shapes, optional, partial(_in_layout_of, in_file))
    width = target.embedding.shape[1]
    if "embed_tokens.weight" not in tensors and width != hidden:
        raise ValueError(f"its states have {hidden} numbers, its target's embedding {width}")


def _check_inputs(tensors: Tensors, hidden: int, features: int) -> None:
    """Raise `ValueError` unless `fc` has `features` inputs, the width of the target's states."""
    inputs = tensors["fc.weight"].shape[1] if "fc.weight" in tensors else features
    if inputs == 2 * hidden != features:
        raise ValueError("it is an EAGLE head of the first or second version, not of the third")
    if inputs != features:
        raise ValueError(
            f"it reads {inputs} numbers and its target has {features} hidden states: it is of another model"
        )


def _in_layout_of(in_file: Mapping[str, str], name: str) -> str:
    """Return the checkpoint's name of a tensor whose name in speculators is `name`.

    For "layers.0.x" it is "midlayer.x" if the checkpoint has a "midlayer".  The checkpoint need not
    have the tensor.

    Args:
        in_file: the name that speculators gives a tensor -> the tensor's name in the checkpoint.
    """
    has_midlayer = any(source.startswith(_MIDLAYER) for source in in_file.values())
    if has_midlayer and name.startswith(_FIRST):
        return _MIDLAYER + name.removeprefix(_FIRST)
    return name


def _optional_shapes(needed: Shapes, tensors: Tensors) -> Shapes:
    """Return the shapes of the tensors that a head may have.

    They are biases, an embedding, and `d2t`, which a head with a smaller vocabulary has.
    """
    shapes = shapes_of_biases(needed)
    shapes["d2t"] = needed["lm_head.weight"][:1]
    embedding = tensors.get("embed_tokens.weight")
    if embedding is not None:
        shapes["embed_tokens.weight"] = len(embedding), needed["fc.weight"][0]
    return shapes


class Eagle3Head(DecoderHead):
    """See `DecoderHead`.

    Args:
        tensors: the head's tensors, by the names that the package speculators gives them.  If the
            embedding is missing, the target's is used.
    """

    def __init__(
        self,
        settings: HeadSettings,
        tensors: Tensors,
        target: HeadTarget,
        rounding: Rounding,
    ) -> None:
        super().__init__(settings.forward, settings.layer, tensors, target, rounding)
        self._settings = settings
        self._fuse = self._matrix(tensors["fc.weight"], tensors.get("fc.bias"))
        self._hidden_norm = tensors[f"{_FIRST}hidden_norm.weight"].to(self.dtype)
        self._input_norms: list[list[torch.Tensor]] = []
        for names in settings.input_norms:
            self._input_norms.append([tensors[name].to(self.dtype) for name in names])

    def fused(self, features: torch.Tensor) -> torch.Tensor:
        """See `ChainHead.fused`."""
        x = features.to(self.dtype)
        for norms in self._input_norms:
            parts = map(self._layers.normalise, x.chunk(len(norms), -1), norms)
            x = torch.cat(list(parts), -1)
        return self._fuse(x)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """See `ChainHead.logits`."""
        layers = self._layers
        settings = self._settings
        is_normed = settings.feeds_normed or not settings.norms_logits
        states = layers.normalise(outputs, None if is_normed else layers.norm)
        return layers.head(states).float()

    def _outputs(
        self, tokens: torch.Tensor, states: torch.Tensor, slot: int, guessed: int
    ) -> torch.Tensor:
        """See `DecoderHead._outputs`.

        The outputs [n, hidden] are the last layer's states or, if `feeds_normed`, those after the
        last norm.
        """
        layers = self._layers
        settings = self._settings
        attends = self._attention(tokens, slot, guessed)
        normed = layers.normalise(states, self._hidden_norm)
        embedded = layers.embedding[tokens].to(self.dtype)
        embedded = layers.normalise(embedded, layers.layers[0].attention_norm)
        x = torch.cat((embedded, normed), -1)
        hidden = (normed if settings.norms_residual else states).to(layers.residual_dtype)
        for number, layer in enumerate(layers.layers):
            if number:
                x = layers.normalise(hidden, layer.attention_norm)
            hidden = layers.layer_states(number, hidden, x, self._ropes, attends)
        if settings.feeds_normed:
            return layers.normalise(hidden, layers.norm)
        return hidden
