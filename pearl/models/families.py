"""The model families, one record each: what our own forward pass computes, and which GGUF files are read. No torch.

`runner`, `direct` and `memory` read a family's `Forward`; `gguf` reads its `Gguf`.  To add a family whose
layers have the shape of `MATRICES`, add its record.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
_FULL, _SLIDING = "full_attention", "sliding_attention"
_NOT_COMPUTED = "quantization_config", "use_bidirectional_attention"  # settings
CAPS = "attn_logit_softcapping", "final_logit_softcapping"
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
        norms: of a layer, by name: before attention, behind it, before the MLP, behind it; "": none there.
        norm_shift: None: a norm rounds before its weights are applied, as in Llama.  Else they are applied in float32,
            with this added.
        fused: matrices that a checkpoint has as one -> their parts.
        default_window: of all layers, where the configuration names neither a window nor the layers' types; 0: none.
            None: layers without types have no window.
        scales_embedding: whether embeddings are multiplied by the root of the hidden size.
        has_multipliers: whether the configuration has multipliers, as Granite's.
        has_caps: whether scores and logits may have caps, by tanh, as Gemma 2's.
        has_experts: whether layers may have experts.
        clamps_experts: whether experts are gpt-oss's: with biases, and gate and up limited.
        has_sinks: whether each head has one more attention score, of no position.
        rotates: the part of a head that `partial_rotary_factor` names, in "halves" of which one has the partners of
            the other, or in "pairs" of neighbours; "": the whole head, in halves.
        reads_directly: whether config.json says all; else transformers completes it, and loads the model.
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
        architecture: its name there; "": they are not read.
        needed: further keys that a file must have -> their settings in config.json.
        optional: likewise, of keys that some files have; a shape shows where one is missing.
        settings: of config.json, unless a file states them.
        window: (period, tokens): the last of each `period` layers has no sliding window, the others have this one.
        ropeless: the last of each so many layers does not rotate queries and keys.
        has_two_ropes: layers with a window have a rope of their own, which is not scaled.
        layers_of_27b: layers of the family's one model whose attention scores have another scale.
        interleaves: rows of queries and keys have the halves of a head that rope turns in turns.
        rope: of `rope_parameters`, what no file states.
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
        model_type: as in config.json.
        architecture: its class in transformers.
        forward: how our own forward computes it.
    """

    model_type: str
    architecture: str
    forward: Forward
    gguf: Gguf = Gguf()


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ATTENTION, _MLP = (*_QKV, "self_attn.o_proj"), ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
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
# By their architecture there, and whether they have experts.
GGUF = {
    (each.gguf.architecture, each.forward.has_experts): each
    for each in FAMILIES
    if each.gguf.architecture
}


def is_of_own_forward(config: Mapping[str, Any]) -> bool:
    """Whether the model of a config.json, or its language model, is of a family in `OWN_FORWARD`."""
    if not isinstance(text := config.get("text_config"), dict):
        return bool(OWN_FORWARD.keys() & (config.get("architectures") or ()))
    kind = str(text.get("model_type"))
    return TWINS.get(kind, kind) in (family.model_type for family in OWN_FORWARD.values())


def forward_of(
    architecture: str, config: Mapping[str, Any], activations: Collection[str] = ACTIVATIONS
) -> Forward | None:
    """What our own forward needs to compute this model; None where it does not compute it.

    Args:
        architecture: class in transformers.
        config: as in config.json, with `rope_parameters`.
        activations: of the MLP, that the caller computes.
    """
    forward = OWN_FORWARD[architecture].forward if architecture in OWN_FORWARD else None
    rope = config.get("rope_parameters")
    if forward is None or not isinstance(rope, Mapping):
        return None
    ropes = (
        [rope]
        if "rope_type" in rope
        else [each for each in rope.values() if isinstance(each, Mapping)]
    )
    parts = {where.get("partial_rotary_factor", 1.0) for where in (*ropes, config)}
    is_computed = (
        all(each.get("rope_type") in ROPES for each in ropes)
        and (parts == {1.0} or (bool(forward.rotates) and len(ropes) == 1))
        and set(config.get("layer_types") or [_FULL]) <= {_FULL, _SLIDING}
        and bool(config.get("layer_types") or not config.get("use_sliding_window"))
        and config.get("is_causal", True) is True
        and activation_of(config) in activations
        and not any(
            config.get(name) for name in (*_NOT_COMPUTED, *(() if forward.has_caps else CAPS))
        )
    )
    return forward if ropes and is_computed else None


def activation_of(config: Mapping[str, Any]) -> str | None:
    """The name of the MLP's activation."""
    return config.get("hidden_activation") or config.get("hidden_act")


def layer_kinds(forward: Forward, config: Mapping[str, Any]) -> list[tuple[int, str | None]]:
    """(window, rope) of each layer of a model that `forward_of` takes.

    How many positions a token sees, its own included, 0: all earlier ones; and which of the model's rotations, "": its
    only one, None: queries and keys are not rotated.
    """
    count, ropes = config["num_hidden_layers"], config["rope_parameters"]
    window = config.get("sliding_window", forward.default_window) or 0
    if not config.get("use_sliding_window", True):
        window = 0
    types = (
        config.get("layer_types") or [_FULL if forward.default_window is None else _SLIDING] * count
    )
    rotates = config.get("no_rope_layers") or [1] * count
    return [
        (
            window if kind == _SLIDING else 0,
            None if not has_rope else kind if "rope_type" not in ropes else "",
        )
        for kind, has_rope in zip(types, rotates, strict=True)
    ]


def rotated(forward: Forward, config: Mapping[str, Any], dim: int) -> int:
    """How many of a head's `dim` numbers are rotated."""
    return (
        int(dim * config["rope_parameters"].get("partial_rotary_factor", 1.0))
        if forward.rotates
        else dim
    )


def dimensions(config: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that `MATRICES` names. `config`: with `head_dim`."""
    width = config["head_dim"]
    return {
        "hidden": config["hidden_size"],
        "inner": config["intermediate_size"],
        "queries": config["num_attention_heads"] * width,
        "keys": config["num_key_value_heads"] * width,
    }


def weight_shapes(forward: Forward, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a checkpoint, by its name there."""
    size = dimensions(config)
    biased = {
        name
        for setting, names in forward.biases.items()
        if not setting or config.get(setting)
        for name in names
    }
    matrices = {name: (size[outputs], size[inputs]) for name, (outputs, inputs) in MATRICES.items()}
    for name, parts in forward.fused.items():
        some = [matrices.pop(part) for part in parts]
        matrices[name] = sum(outputs for outputs, _ in some), some[0][1]
    experts: dict[str, tuple[int, ...]] = {}
    if forward.has_experts:
        matrices = {name: shape for name, shape in matrices.items() if name not in _MLP}
        experts = _expert_shapes(config, forward.clamps_experts)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], size["hidden"]),
        "model.norm.weight": (size["hidden"],),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], size["hidden"])
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        if forward.has_sinks:
            shapes[f"{layer}self_attn.sinks"] = (config["num_attention_heads"],)
        shapes |= {f"{layer}mlp.{name}": shape for name, shape in experts.items()}
        for name, shape in matrices.items():
            shapes[f"{layer}{name}.weight"] = shape
            if name in biased:
                shapes[f"{layer}{name}.bias"] = shape[:1]
        for name in filter(None, forward.norms):
            shapes[f"{layer}{name}.weight"] = (size["hidden"],)
        for name, width in (
            (("q_norm", "queries"), ("k_norm", "keys")) if forward.head_norms else ()
        ):
            shapes[f"{layer}self_attn.{name}.weight"] = (
                size[width] if forward.head_norms == "all" else config["head_dim"],
            )
    return shapes


def _expert_shapes(config: Mapping[str, Any], are_clamped: bool) -> dict[str, tuple[int, ...]]:
    """Of the tensors of a layer's experts. are_clamped: see `Forward.clamps_experts`."""
    count, hidden = config.get("num_experts") or config["num_local_experts"], config["hidden_size"]
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "router.weight" if are_clamped else "gate.weight": (count, hidden)
    }
    for expert in (f"experts.{number}." for number in range(count)):
        shapes |= {f"{expert}{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{expert}down_proj.weight"] = hidden, inner
    biases = {
        name.replace(".weight", ".bias"): shape[:1] for name, shape in shapes.items() if are_clamped
    }
    return shapes | biases
