"""An EAGLE-3 head: decoder layers that guess what the target writes next from its hidden states.

For each token but the first the head reads the token and the target's states of the token before
it; its last output guesses the token that follows.  From there on it continues by itself, with its
own output in place of those states.  Guesses are only verified, so nothing here must be exact.

Its layers are those of a Llama or a Qwen3, and `DecoderLayers` computes them.  Only the first one
differs: with e the token's embedding and h the states, it computes queries, keys and values from
[norm(e), norm(h)], and adds the output of attention to h or norm(h).

Three trainers write such heads.  The authors and SpecForge call the one layer "midlayer"; vLLM's
speculators calls the layers "layers.0", "layers.1" ... and describes them in
`transformer_layer_config`.

Source: "EAGLE-3", Li et al. 2025; published checkpoints; speculators 0.9.0; specforge 0.2.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from pearl.models.checkpoints.direct import Weight
from pearl.models.checkpoints.rope import parameters_of_rope, rope_of
from pearl.models.cpu import native
from pearl.models.families import (
    HEAD_ACTIVATIONS,
    OWN_FORWARD,
    Config,
    Forward,
    Shapes,
    not_computed,
    weight_shapes,
)
from pearl.models.feeds import Feed, lay_out
from pearl.models.forward.attention import Scoring, whole_blocks
from pearl.models.forward.decoder import Decoder
from pearl.models.forward.layers import DecoderLayers
from pearl.models.forward.linear_layers import Rounding, matrix
from pearl.models.forward.slot_attention import NativeAttention, TorchAttention
from pearl.models.forward.slots import Slots
from pearl.models.heads.head import HeadTarget, Tensors

_PIECE = 512  # tokens of a prompt that are computed together
_DEFAULT_LAYERS = 3  # of the target, whose states a head reads that names none
_FIRST = "layers.0."
_MIDLAYER = "midlayer."
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_TOGETHER = (
    _PROJECTIONS,
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Tensors that say nothing about a guess: the inverse of d2t, and copies of the target's.
_UNREAD = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
# Settings of config.json that may be true: those that are computed, and those that change no
# number.
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
    "use_input_layernorm_in_first_layer",  # the tensors of these two are asked for
    "use_last_layernorm",
}
_NEUTRAL = {
    "use_cache",
    "tie_word_embeddings",
    "embed_requires_grad",
    "has_no_defaults_at_init",
    "has_lm_head",
    "return_dict",
    "use_return_dict",
    "output_attentions",
    "output_hidden_states",
    "torchscript",
    "do_sample",
    "is_causal",
    "is_decoder",
    "gradient_checkpointing",
    "early_stopping",
}
_OTHERS = {  # what a tensor's name has -> what the checkpoint is
    "eh_proj": "a layer for multi-token prediction, which --head NAME takes where NAME is the target",
    "medusa": "Medusa heads",
    "lm_head.0": "Medusa heads",
    "mask_hidden": "a head that drafts in parallel (P-EAGLE)",
    "model.layers.1.": "a whole model: use it as --draft",
}


def target_layers(config: Config) -> tuple[int, ...] | None:
    """See `HeadKind`.

    speculators and vLLM count states: number i is what layer i reads, and the number of layers is
    what the last norm reads.  SGLang and SpecForge count layers, in `eagle_config`: number i is what
    layer i outputs, which layer i + 1 reads.
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
        forward, layer: the family of its decoder layers, and their configuration.
        input_norms: norms of the target's states before `fc`, one after the other: the weights of
            all states together, or of each by itself.
        norms_residual: whether the first layer adds to the normalised states.
        feeds_normed: whether the next step reads the output of the last norm.
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
        """Read config.json. Raises `ValueError` for what is not computed.

        Args:
            names: of the head's tensors, as speculators has them.
        """
        inner = config.get("transformer_layer_config") or config
        for settings in (config, inner, config.get("eagle_config") or {}):
            for name, value in settings.items():
                if value is True and name not in _COMPUTED | _NEUTRAL:
                    raise ValueError(f"its config.json sets {name}, which is not computed")
        is_of_speculators = "speculators_model_type" in config
        forward, layer = _layers_of(inner, set(names), is_of_speculators)
        # In speculators norm_output says what the next step reads, in SpecForge whether there is a
        # norm before lm_head.
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
            features: numbers of the target's states.
            vocab_size: of the head's own vocabulary.
        """
        hidden = int(self.layer["hidden_size"])
        model_shapes = weight_shapes(self.forward, self.layer)
        shapes = {name.removeprefix("model."): shape for name, shape in model_shapes.items()}
        del shapes["embed_tokens.weight"]  # without one it reads the target's
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
    """See `HeadSettings.input_norms`."""
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
    """Return the family of a head's decoder layers, and their configuration as a model's.

    Raises `ValueError` for layers that are not computed.
    """
    kind = config.get("model_type", "qwen3")
    if not is_of_speculators:  # one Llama layer, whatever model type the file names
        kind = "llama"
        if f"{_FIRST}self_attn.q_norm.weight" in names:
            kind = "qwen3"
    if kind not in _ARCHITECTURES:
        raise ValueError(
            f"its decoder layers are of model type {kind!r}; llama and qwen3 are computed"
        )
    numbers = {int(name.split(".")[1]) for name in names if name.startswith("layers.")}
    if is_of_speculators:
        count = int(config["num_hidden_layers"])
    else:
        count = len(numbers)
    layer = _as_a_model(config, count)
    if not is_of_speculators:  # SpecForge ignores these: a head has the biases that its file has
        layer |= {"attention_bias": False, "mlp_bias": False}
    architecture = _ARCHITECTURES[kind]
    reason = not_computed(architecture, layer, HEAD_ACTIVATIONS)
    if reason:
        raise ValueError(f"its decoder layers are not computed: {reason}")
    return OWN_FORWARD[architecture].forward, layer


def _as_a_model(config: Config, count: int) -> dict[str, Any]:
    """Return the configuration of `count` layers as a model's, with defaults for absent settings."""
    heads = int(config["num_attention_heads"])
    types = config.get("layer_types")
    layer = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": 0,
        **config,
        "rope_parameters": _rope_parameters(config),
        "num_hidden_layers": count,
        "num_key_value_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        "layer_types": types[:count] if types else None,
        "tie_word_embeddings": False,
    }
    if rope_of(layer) is None:
        raise ValueError(f"its rope is not computed: {layer['rope_parameters']}")
    return layer


def _rope_parameters(config: Config) -> dict[str, Any]:
    rope = parameters_of_rope({"rope_theta": 1e4, **config})
    if rope is None:
        raise ValueError("its rope is not computed: it has both rope_parameters and rope_scaling")
    rope = rope.get("sliding_attention", rope)  # speculators uses this one of several in all layers
    if rope.get("partial_rotary_factor", 1.0) != 1.0:  # which trainers ignore and engines apply
        raise ValueError(f"its rope is not computed: {rope}")
    return {"rope_type": "default", "rope_theta": 1e4, **rope}


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
    weights = {}
    for name, source in in_file.items():
        if name not in _UNREAD and "rotary_emb" not in name:
            dtype = None if name == "d2t" else target.embedding.dtype
            weights[name] = tensors[source].to(target.embedding.device, dtype)
    _check_tensors(settings, weights, target, in_file)
    _check_vocabulary(weights, target)
    return Eagle3Head(settings, weights, target, rounding)


def _common(name: str) -> str:
    """Return a tensor's name in speculators."""
    if name.startswith(_MIDLAYER):
        return _FIRST + name.removeprefix(_MIDLAYER)
    return name


def _check_vocabulary(tensors: Tensors, target: HeadTarget) -> None:
    """Raise `ValueError` unless the head's tokens are the target's, or a part of them."""
    count = len(tensors["lm_head.weight"])
    if "d2t" not in tensors and count != target.vocab_size:
        raise ValueError(
            f"it knows {count} tokens and its target {target.vocab_size}, and nothing says which (d2t)"
        )
    embedding = tensors.get("embed_tokens.weight")
    if embedding is not None and len(embedding) < target.vocab_size:
        raise ValueError(
            f"its embed_tokens.weight has {len(embedding)} tokens and its target {target.vocab_size}"
        )


def _check_tensors(
    settings: HeadSettings,
    tensors: Tensors,
    target: HeadTarget,
    in_file: Mapping[str, str],
) -> None:
    """Raise `ValueError` where tensors are missing, superfluous or of another shape.

    Args:
        in_file: name of a tensor -> its name in the checkpoint.
    """
    hidden = int(settings.layer["hidden_size"])
    _check_inputs(tensors, hidden, target.features)
    shapes = settings.shapes(target.features, len(tensors.get("lm_head.weight", ())))
    for name in shapes:
        if name not in tensors:
            raise ValueError(f"it has no {_in_layout_of(in_file, name)}")
    shapes |= _optional_shapes(shapes, tensors, settings.layer["num_hidden_layers"])
    for name, tensor in tensors.items():
        if name not in shapes:
            raise ValueError(f"nothing reads its tensor {in_file[name]}")
        shape = list(shapes[name])
        if list(tensor.shape) != shape:
            raise ValueError(f"its {in_file[name]} has the shape {list(tensor.shape)}, not {shape}")
    width = target.embedding.shape[1]
    if "embed_tokens.weight" not in tensors and width != hidden:
        raise ValueError(f"its states have {hidden} numbers, its target's embedding {width}")


def _check_inputs(tensors: Tensors, hidden: int, features: int) -> None:
    """Raise `ValueError` where `fc` reads other states than those that the target keeps."""
    inputs = tensors["fc.weight"].shape[1] if "fc.weight" in tensors else features
    if inputs == 2 * hidden != features:
        raise ValueError("it is an EAGLE head of the first or second version, not of the third")
    if inputs != features:
        raise ValueError(
            f"it reads {inputs} numbers and its target has {features} hidden states: it is of another model"
        )


def _in_layout_of(in_file: Mapping[str, str], name: str) -> str:
    """Return a tensor's name as this checkpoint would have it."""
    has_midlayer = any(source.startswith(_MIDLAYER) for source in in_file.values())
    if has_midlayer and name.startswith(_FIRST):
        return _MIDLAYER + name.removeprefix(_FIRST)
    return name


def _optional_shapes(needed: Shapes, tensors: Tensors, layers: int) -> Shapes:
    """Return the shapes of tensors that a head may have: biases, a vocabulary, an embedding."""
    hidden = needed["fc.weight"][0]
    shapes: Shapes = {}
    for name, shape in needed.items():
        if len(shape) == 2:
            shapes[f"{name.removesuffix('.weight')}.bias"] = shape[:1]
    shapes["d2t"] = needed["lm_head.weight"][:1]
    embedding = tensors.get("embed_tokens.weight")
    if embedding is not None:
        shapes["embed_tokens.weight"] = len(embedding), hidden
    for number in range(layers):
        for group in _TOGETHER:
            biases = [f"layers.{number}.{name}.bias" for name in group]
            present = [name for name in biases if name in tensors]
            if present and present != biases:
                raise ValueError(
                    f"it has biases {', '.join(present)}, but not all of {', '.join(biases)}"
                )
    return shapes


class Eagle3Head:
    """The weights of a head, and a cache for each slot; see `DraftHead`.

    Args:
        tensors: by their names in speculators; without an embedding, that of the target is used.
        rounding: of the products' weights; see `linear_layers.matrix`.
    """

    def __init__(
        self,
        settings: HeadSettings,
        tensors: Tensors,
        target: HeadTarget,
        rounding: Rounding,
    ) -> None:
        self._settings = settings
        self.context = target.context
        self.features = target.features
        self.device: torch.device = target.embedding.device
        on_cpu = self.device.type == "cpu"
        self._is_native = on_cpu and native.takes_model(self.device, settings.layer)
        decoder = _decoder(settings, tensors, tensors.get("embed_tokens.weight", target.embedding))
        layers = DecoderLayers(
            decoder,
            self.context,
            rounding,
            self._is_native,
            family=(settings.forward, settings.layer),
        )
        self._layers = layers
        self.dtype = layers.dtype
        self.hidden = layers.embedding.shape[1]
        self.weights = rounding or str(target.embedding.dtype).removeprefix("torch.")
        fuse = Weight(tensors["fc.weight"], tensors.get("fc.bias"))
        self._fuse = matrix(fuse, dtype=self.dtype, is_native=self._is_native, rounding=rounding)
        self._hidden_norm = tensors[f"{_FIRST}hidden_norm.weight"].to(self.dtype)
        self._input_norms: list[list[torch.Tensor]] = []
        for names in settings.input_norms:
            self._input_norms.append([tensors[name].to(self.dtype) for name in names])
        self.ids = torch.arange(len(tensors["lm_head.weight"]), device=self.device)
        if "d2t" in tensors:
            self.ids = self.ids + tensors["d2t"]
        room = whole_blocks(self.context)
        heads = layers.heads
        shape = (target.slots, len(layers), heads.kv, room, heads.dim)
        self._slots = Slots(shape, self.dtype, self.device)
        self.lengths = self._slots.lengths
        positions = torch.arange(room, device=self.device)
        self._ropes = layers.angles(rope_of(settings.layer), positions)

    def fused(self, features: torch.Tensor) -> torch.Tensor:
        """See `Head.fused`."""
        x = features.to(self.dtype)
        for norms in self._input_norms:
            parts = map(self._layers.normalise, x.chunk(len(norms), -1), norms)
            x = torch.cat(list(parts), -1)
        return self._fuse(x)

    def read(
        self, tokens: torch.Tensor, states: torch.Tensor, slot: int, guessed: int = 0
    ) -> torch.Tensor:
        """See `Head.read`."""
        outputs = []
        for piece, before in zip(tokens.split(_PIECE), states.split(_PIECE), strict=True):
            outputs.append(self._outputs(piece, before, slot, guessed))
        return torch.cat(outputs)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """See `Head.logits`."""
        layers = self._layers
        settings = self._settings
        is_normed = settings.feeds_normed or not settings.norms_logits
        states = layers.normalise(outputs, None if is_normed else layers.norm)
        return layers.head(states).float()

    def copy(self, slot: int, into: int, start: int, end: int) -> None:
        """See `DraftHead.copy`."""
        for buffer in (self._slots.keys, self._slots.values):
            buffer[into, :, :, start:end] = buffer[slot, :, :, start:end]
        self.lengths[into] = end

    def _outputs(
        self, tokens: torch.Tensor, states: torch.Tensor, slot: int, guessed: int
    ) -> torch.Tensor:
        """Return the last layer's states [n, hidden], normalised where the next step reads them so."""
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
        self.lengths[slot] += len(tokens)
        if settings.feeds_normed:
            return layers.normalise(hidden, layers.norm)
        return hidden

    def _attention(
        self, tokens: torch.Tensor, slot: int, guessed: int
    ) -> NativeAttention | TorchAttention:
        """Return the attention of tokens that continue a slot."""
        layers = self._layers
        scoring = _widened(layers.scoring, guessed)
        if self._is_native:
            table = lay_out([Feed(tokens, 0, slot)], self.lengths).table
            return NativeAttention(table, False, self._slots, scoring, layers.heads, layers.eps)
        return TorchAttention(self._slots, slot, self.lengths[slot], scoring)


def _widened(scoring: Scoring, guessed: int) -> Scoring:
    """Widen windows so that guesses do not move where they begin.

    Heads are trained so: in each step of speculators' trainer a token sees the states that it saw in
    the first step, and all guesses since.
    """
    windows = tuple(window + guessed if window else 0 for window in scoring.windows)
    return scoring._replace(windows=windows)


def _decoder(settings: HeadSettings, tensors: Tensors, embedding: torch.Tensor) -> Decoder:
    """Return the head's layers, last norm and output matrix as a model's, for `DecoderLayers`."""
    decoder = Decoder(SimpleNamespace(**settings.layer))
    decoder.place("model.embed_tokens", Weight(embedding))
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part == "weight" and (module.startswith("layers.") or module in ("norm", "lm_head")):
            if module == "lm_head":
                place = module
            else:
                place = f"model.{module}"
            decoder.place(place, Weight(tensor, tensors.get(f"{module}.bias")))
    return decoder
