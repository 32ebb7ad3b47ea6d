"""The model families, one record each: what our own forward pass computes, and which GGUF files are read. No torch.

`runner`, `direct` and `memory` read a family's `Forward`; `gguf` reads its `Gguf`.  To add a family whose
layers have the shape of `MATRICES`, add its record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Config = Mapping[str, Any]  # as in config.json
Shapes = dict[str, tuple[int, ...]]  # of tensors, by name
# The matrices of a decoder layer: name -> (outputs, inputs); see `dimensions`.
MATRICES = {
    "self_attn.q_proj": ("queries", "hidden"),
    "self_attn.k_proj": ("keys", "hidden"),
    "self_attn.v_proj": ("keys", "hidden"),
    "self_attn.o_proj": ("hidden", "queries"),
    "mlp.gate_proj": ("inner", "hidden"),
    "mlp.up_proj": ("inner", "hidden"),
    "mlp.down_proj": ("hidden", "inner"),
}
_FULL = "full_attention"
_SLIDING = "sliding_attention"
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
# Activations that our own forward computes, by their names in config.json -> in `matrices.gated`.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}
# Those of heads, which have more: torch computes the others, whose bits may depend on how many rows are computed.
HEAD_ACTIVATIONS = ACTIVATIONS | {
    "gelu": "erf_gelu",
    "gelu_python": "erf_gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_accurate": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
}
# Language models that compute what another family does where a text has no pictures: a token's three positions are one.
TWINS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
# Whose angles do not depend on the length of the text; longrope's do not within a runner's context.
ROPES = {"default", "linear", "llama3", "yarn", "longrope"}


@dataclass(frozen=True)
class Forward:
    """How a family differs from Llama in our own forward pass.

    Attributes:
        biases: setting of the configuration -> matrices that have a bias where it is true; "": always.
        head_norms: RMS norms of queries and keys, over "each" head or "all" of them; "": none.
        norms: names of a layer's norms: before attention, after it, before the MLP, after it; "": none there.
        norm_shift: None: a norm rounds before its weights are applied, as in Llama.  Else they are applied in float32,
            with this added.
        fused: matrices that a checkpoint has as one -> their parts.
        default_window: window of all layers, where the configuration names neither one nor the layers' types; 0:
            unlimited. None: layers without types have no window.
        scales_embedding: whether embeddings are multiplied by the root of the hidden size.
        has_multipliers: whether the configuration has multipliers, as Granite's.
        has_caps: whether scores and logits may have caps, by tanh, as Gemma 2's.
        has_experts: whether layers may have experts.
        clamps_experts: whether experts are gpt-oss's: with biases, and gate and up limited.
        has_sinks: whether the softmax of each head has a learned score without a position.
        rotates: how rope pairs the numbers of a head, "halves" (i with i + dim / 2) or "pairs" (neighbours), in the
            part that `partial_rotary_factor` names; "": the whole head, in halves.
        reads_directly: whether config.json is complete; else transformers completes it, and loads the model.
    """

    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    head_norms: str = ""
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    norm_shift: float | None = None
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    default_window: int | None = None
    scales_embedding: bool = False
    has_multipliers: bool = False
    has_caps: bool = False
    has_experts: bool = False
    clamps_experts: bool = False
    has_sinks: bool = False
    rotates: Literal["", "halves", "pairs"] = ""
    reads_directly: bool = True


@dataclass(frozen=True)
class Gguf:
    """A family's GGUF files, with llama.cpp's defaults for what they leave open.

    Attributes:
        architecture: llama.cpp's name of the family; "": its files are not read.
        needed: further keys that a file must have -> their settings in config.json.
        optional: keys that some files have -> their settings; a shape shows where one is missing.
        settings: defaults of config.json for what a file does not state.
        window: (period, tokens): each `period`-th layer has full attention, the others a window of `tokens`.
        ropeless: each `ropeless`-th layer does not rotate queries and keys; 0: all do.
        has_two_ropes: layers with a window have a rope of their own, which is not scaled.
        layers_of_27b: number of layers of the family's one model whose attention scores have another scale.
        interleaves: files interleave the two halves of each head in the rows of queries and keys.
        rope: settings of `rope_parameters` that no file states.
    """

    architecture: str = ""
    needed: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    window: tuple[int, int] = (0, 0)
    ropeless: int = 0
    has_two_ropes: bool = False
    layers_of_27b: int = 0
    interleaves: bool = False
    rope: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        model_type: its name in config.json.
        architecture: its class in transformers.
        forward: how our own forward computes it.
    """

    model_type: str
    architecture: str
    forward: Forward
    gguf: Gguf = Gguf()


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ATTENTION = (*_QKV, "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}

_BEHIND = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_AROUND = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_GEMMA = Forward(
    {"attention_bias": _ATTENTION},
    norms=_AROUND,
    norm_shift=1.0,
    scales_embedding=True,
    reads_directly=False,
)
_GLM = Forward(
    {"attention_bias": _QKV},
    fused={"mlp.gate_up_proj": _MLP[:2]},
    rotates="pairs",
    reads_directly=False,
)

FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        Forward({"attention_bias": _ATTENTION, "mlp_bias": _MLP}),
        Gguf("llama", interleaves=True),
    ),
    Family("mistral", "MistralForCausalLM", Forward(default_window=4096)),
    Family("qwen2", "Qwen2ForCausalLM", Forward({"": _QKV}), Gguf("qwen2")),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        Forward({"attention_bias": _ATTENTION}, head_norms="each"),
        Gguf("qwen3"),
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        replace(_GEMMA, has_caps=True),
        Gguf(
            "gemma2",
            optional=dict(zip(CAPS, CAPS, strict=True)),
            settings={**_GELU, **dict(zip(CAPS, (50.0, 30.0), strict=True))},
            window=(2, 4096),
            layers_of_27b=46,
        ),
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        replace(_GEMMA, head_norms="each"),
        Gguf(
            "gemma3",
            optional={CAPS[1]: CAPS[1]},
            settings=_GELU,
            window=(6, 0),
            has_two_ropes=True,
            layers_of_27b=62,
        ),
    ),
    Family("glm", "GlmForCausalLM", _GLM),
    Family(
        "glm4",
        "Glm4ForCausalLM",
        replace(
            _GLM,
            norms=(
                "input_layernorm",
                "post_self_attn_layernorm",
                "post_attention_layernorm",
                "post_mlp_layernorm",
            ),
        ),
        Gguf("glm4"),
    ),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        Forward(
            {"attention_bias": _ATTENTION},
            norm_shift=0.0,
            has_experts=True,
            clamps_experts=True,
            has_sinks=True,
        ),
        Gguf("gpt-oss", window=(2, 128), settings={"swiglu_limit": 7.0}, rope={"truncate": False}),
    ),
    Family(
        "granite",
        "GraniteForCausalLM",
        Forward({"attention_bias": _ATTENTION, "mlp_bias": _MLP}, has_multipliers=True),
        Gguf("granite", _MULTIPLIERS, interleaves=True),
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        Forward(default_window=0, has_experts=True, reads_directly=False),
        Gguf("llama", interleaves=True),
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        Forward({"attention_bias": _ATTENTION}, head_norms="all", norms=_BEHIND, norm_shift=0.0),
        Gguf("olmo2"),
    ),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        Forward(
            {"attention_bias": _ATTENTION},
            head_norms="all",
            norms=_BEHIND,
            norm_shift=0.0,
            reads_directly=False,
        ),
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        Forward(
            fused={"self_attn.qkv_proj": _QKV, "mlp.gate_up_proj": _MLP[:2]},
            default_window=0,
            rotates="halves",
            reads_directly=False,
        ),
        Gguf("phi3"),
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        Forward({"attention_bias": _ATTENTION}, head_norms="each", has_experts=True),
        Gguf(
            "qwen3moe",
            optional={"expert_feed_forward_length": "moe_intermediate_size"},
            settings={"norm_topk_prob": True},
        ),
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        Forward({"attention_bias": _ATTENTION, "mlp_bias": _MLP}, reads_directly=False),
        Gguf("smollm3", ropeless=4, interleaves=True),
    ),
)
OWN_FORWARD = {family.architecture: family for family in FAMILIES}
# Methods whose weights our own forward reads.
QUANTISED = ("awq", "gptq", "fp8", "auto-round", "compressed-tensors", "bitsandbytes", "mxfp4")
# GGUF's name of the architecture, and whether files have experts -> the family.
GGUF = {
    (family.gguf.architecture, family.forward.has_experts): family
    for family in FAMILIES
    if family.gguf.architecture
}


def is_of_own_forward(config: Config) -> bool:
    """Return whether the model of a config.json, or its language model, is of a family in `OWN_FORWARD`."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return bool(OWN_FORWARD.keys() & (config.get("architectures") or ()))
    model_type = str(text.get("model_type"))
    model_type = TWINS.get(model_type, model_type)
    return any(family.model_type == model_type for family in FAMILIES)


def forward_of(
    architecture: str, config: Config, activations: Collection[str] = ACTIVATIONS
) -> Forward | None:
    """Return what our own forward needs to compute a model; None if it does not compute it: see `not_computed`."""
    if not_computed(architecture, config, activations):
        return None
    return OWN_FORWARD[architecture].forward


def not_computed(
    architecture: str, config: Config, activations: Collection[str] = ACTIVATIONS
) -> str:
    """Return the reason why our own forward does not compute a model; "" if it does.

    Args:
        architecture: class in transformers.
        config: as in config.json, with `rope_parameters`.
        activations: of the MLP, that the caller computes.
    """
    if architecture not in OWN_FORWARD:
        return f"our own forward has no family {architecture}"
    if activation_of(config) not in activations:
        return f"its activation {activation_of(config)!r} is not computed"
    forward = OWN_FORWARD[architecture].forward
    for reason, holds in _REASONS.items():
        if holds(forward, config):
            return reason
    return ""


def _ropes(config: Config) -> list[Config]:
    """Return the model's rope, or that of each kind of layer."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return []
    if "rope_type" in rope:
        return [rope]
    return [kind for kind in rope.values() if isinstance(kind, Mapping)]


def _has_no_rope(forward: Forward, config: Config) -> bool:
    return not _ropes(config)


def _has_unknown_rope(forward: Forward, config: Config) -> bool:
    return any(rope.get("rope_type") not in ROPES for rope in _ropes(config))


def _rotates_part(forward: Forward, config: Config) -> bool:
    ropes = _ropes(config)
    if forward.rotates and len(ropes) == 1:
        return False
    return any(place.get("partial_rotary_factor", 1.0) != 1.0 for place in (*ropes, config))


def _has_unknown_layers(forward: Forward, config: Config) -> bool:
    return not {_FULL, _SLIDING}.issuperset(config.get("layer_types") or ())


def _has_unplaced_window(forward: Forward, config: Config) -> bool:
    return bool(config.get("use_sliding_window") and not config.get("layer_types"))


def _sees_later_tokens(forward: Forward, config: Config) -> bool:
    if config.get("use_bidirectional_attention"):
        return True
    return config.get("is_causal", True) is not True


def _has_unknown_caps(forward: Forward, config: Config) -> bool:
    return not forward.has_caps and any(config.get(name) for name in CAPS)


def _is_quantised(forward: Forward, config: Config) -> bool:
    return bool(config.get("quantization_config"))


_REASONS: dict[str, Callable[[Forward, Config], bool]] = {
    "it has no rope": _has_no_rope,
    "its rope is of an unknown type, or depends on the length": _has_unknown_rope,
    "its rope turns a part of each head (partial_rotary_factor)": _rotates_part,
    "layer_types has other layers than full and sliding attention": _has_unknown_layers,
    "use_sliding_window is set without layer_types": _has_unplaced_window,
    "its tokens see later ones (is_causal, use_bidirectional_attention)": _sees_later_tokens,
    "its scores or logits have caps, which its family has not": _has_unknown_caps,
    "it is quantised (quantization_config)": _is_quantised,
}


def activation_of(config: Config) -> str | None:
    """Return the name of the MLP's activation."""
    return config.get("hidden_activation") or config.get("hidden_act")


def layer_kinds(forward: Forward, config: Config) -> list[tuple[int, str | None]]:
    """Return (window, rope) of each layer of a model that `forward_of` accepts.

    window: tokens attended, itself included (0 = all). rope: name ("" = the only one, None = no rope).
    """
    count = config["num_hidden_layers"]
    has_one_rope = "rope_type" in config["rope_parameters"]
    window = 0
    if config.get("use_sliding_window", True):
        window = config.get("sliding_window", forward.default_window) or 0
    default_type = _FULL if forward.default_window is None else _SLIDING
    types = config.get("layer_types") or [default_type] * count
    has_rope = config.get("no_rope_layers") or [1] * count
    kinds: list[tuple[int, str | None]] = []
    for layer_type, rotates in zip(types, has_rope, strict=True):
        rope = None
        if rotates:
            rope = "" if has_one_rope else layer_type
        kinds.append((window if layer_type == _SLIDING else 0, rope))
    return kinds


def rotated(forward: Forward, config: Config, dim: int) -> int:
    """Return how many of a head's `dim` numbers are rotated."""
    if not forward.rotates:
        return dim
    return int(dim * config["rope_parameters"].get("partial_rotary_factor", 1.0))


def dimensions(config: Config) -> dict[str, int]:
    """Return the sizes that `MATRICES` names, of a configuration that has `head_dim`."""
    width = config["head_dim"]
    return {
        "hidden": config["hidden_size"],
        "inner": config["intermediate_size"],
        "queries": config["num_attention_heads"] * width,
        "keys": config["num_key_value_heads"] * width,
    }


def weight_shapes(forward: Forward, config: Config) -> Shapes:
    """Return the shape of each tensor of a checkpoint, by its name there."""
    size = dimensions(config)
    embedding = (config["vocab_size"], size["hidden"])
    shapes: Shapes = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": (size["hidden"],),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = embedding
    layer = _layer_shapes(forward, config, size)
    for number in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            shapes[f"model.layers.{number}.{name}"] = shape
    return shapes


def _layer_shapes(forward: Forward, config: Config, size: Mapping[str, int]) -> Shapes:
    """Return the shapes of the tensors of a layer."""
    shapes: Shapes = {}
    if forward.has_sinks:
        shapes["self_attn.sinks"] = (config["num_attention_heads"],)
    if forward.has_experts:
        shapes |= _expert_shapes(config, forward.clamps_experts)
    biased: set[str] = set()
    for setting, names in forward.biases.items():
        if not setting or config.get(setting):
            biased.update(names)
    for name, shape in _matrix_shapes(forward, size).items():
        shapes[f"{name}.weight"] = shape
        if name in biased:
            shapes[f"{name}.bias"] = shape[:1]
    for name in filter(None, forward.norms):
        shapes[f"{name}.weight"] = (size["hidden"],)
    if forward.head_norms:
        for name, width in (("q_norm", "queries"), ("k_norm", "keys")):
            count = size[width] if forward.head_norms == "all" else config["head_dim"]
            shapes[f"self_attn.{name}.weight"] = (count,)
    return shapes


def _matrix_shapes(forward: Forward, size: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the (outputs, inputs) of a layer's matrices as a checkpoint has them, without experts."""
    shapes = {name: (size[outputs], size[inputs]) for name, (outputs, inputs) in MATRICES.items()}
    for name, parts in forward.fused.items():
        outputs = 0
        for part in parts:
            rows, inputs = shapes.pop(part)
            outputs += rows
        shapes[name] = (outputs, inputs)
    if forward.has_experts:
        for name in _MLP:
            shapes.pop(name, None)
    return shapes


def _expert_shapes(config: Config, are_clamped: bool) -> Shapes:
    """Return the shapes of a layer's router and experts. are_clamped: see `Forward.clamps_experts`."""
    count = config.get("num_experts") or config["num_local_experts"]
    hidden = config["hidden_size"]
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    matrices = {"router" if are_clamped else "gate": (count, hidden)}
    for number in range(count):
        matrices[f"experts.{number}.gate_proj"] = (inner, hidden)
        matrices[f"experts.{number}.up_proj"] = (inner, hidden)
        matrices[f"experts.{number}.down_proj"] = (hidden, inner)
    shapes: Shapes = {}
    for name, shape in matrices.items():
        shapes[f"mlp.{name}.weight"] = shape
        if are_clamped:
            shapes[f"mlp.{name}.bias"] = shape[:1]
    return shapes
