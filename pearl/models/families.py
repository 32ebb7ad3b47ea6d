"""The model families: which models our own forward pass computes, and which GGUF files are read.

`families.toml` has a table for each family.  The modules that compute or load a model read its
family's `Forward`; `checkpoints.gguf` reads its `Gguf`.  This module must not import torch.
"""

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

Config = Mapping[str, Any]  # as in config.json
Shapes = dict[str, tuple[int, ...]]  # of tensors, by name
# The matrices of a decoder layer: name -> names of its (outputs, inputs), whose sizes `dimensions`
# returns.
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
# Activations that our own forward computes: names in config.json -> in `linear_layers.gated`.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}
# Activations of heads, by the same names. torch computes those that `ACTIVATIONS` lacks, and their
# bits may depend on how many rows are computed.
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
# Language models of vision models -> the family that computes the same for a text without pictures.
# In such a text the three positions of a token are equal.
TWINS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
# Types of rope whose angles do not depend on the length of the text; longrope's do not within a
# runner's context.
ROPES = {"default", "linear", "llama3", "yarn", "longrope"}


class Forward(Struct, frozen=True, forbid_unknown_fields=True):
    """How a family differs from Llama in our own forward pass.

    Attributes:
        biases: which matrices have a bias if a setting of config.json is true: the setting -> the
            beginnings of the matrices' names, such as "mlp_bias" -> ("mlp",). The setting "" is
            always true.
        head_norms: how queries and keys are normalised (RMS): "each" head alone, "all" heads
            together, or "" for not at all.
        norms: names of a layer's norms before attention, after attention, before the MLP and after
            the MLP; "" where there is none.
        norm_shift: a number that is added to a norm's weights, which are then applied in float32.
            None: a norm rounds its input before the weights are applied, as in Llama.
        fused: name of a matrix that checkpoints store -> names of the matrices that are joined in
            it.
        default_window: the attention window if config.json does not state sliding_window. A number
            is a window's positions, 0 is no limit; it holds for all layers if config.json has no
            layer_types. With None, all layers have full attention if it has no layer_types.
        scales_embedding: whether embeddings are multiplied by the square root of the hidden size.
        has_multipliers: whether config.json has multipliers of embeddings, scores, residuals and
            logits, as Granite's has.
        has_caps: whether attention scores and logits may be limited with a tanh, as in Gemma 2.
        has_experts: whether a layer's MLP may be a mixture of experts.
        clamps_experts: whether experts are like gpt-oss's, with biases, and with gate and up
            clamped.
        has_sinks: whether each head has an attention sink: a learned score in its softmax that
            belongs to no position.
        rotates: how rope pairs the first n = `partial_rotary_factor` * head_dim numbers of a head: "halves" (i with
            i + n / 2) or "pairs" (2i with 2i + 1). "": it rotates the whole head, in halves.
        reads_directly: whether config.json states all settings, so that `checkpoints.direct` can
            load the model. Otherwise transformers completes the settings and loads the model.
    """

    biases: Mapping[str, tuple[str, ...]] = {}
    head_norms: str = ""
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    norm_shift: float | None = None
    fused: Mapping[str, tuple[str, ...]] = {}
    default_window: int | None = None
    scales_embedding: bool = False
    has_multipliers: bool = False
    has_caps: bool = False
    has_experts: bool = False
    clamps_experts: bool = False
    has_sinks: bool = False
    rotates: Literal["", "halves", "pairs"] = ""
    reads_directly: bool = True


class Gguf(Struct, frozen=True, forbid_unknown_fields=True):
    """How a family's GGUF files are read, with llama.cpp's defaults for what they do not state.

    Attributes:
        architecture: llama.cpp's name of the family; "": its files are not read.
        needed: the keys that files of this family must have, in addition to the keys that the files
            of all families must have: the key -> its setting in config.json.
        optional: a key that a file may lack -> its setting in config.json. If a size is missing
            that the model does need, the check of the tensors' shapes fails.
        settings: values of config.json for settings that a file does not state.
        window: (period, tokens): each `period`-th layer has full attention, the others a window of `tokens`.
        ropeless: each `ropeless`-th layer does not rotate queries and keys; 0: all layers do.
        has_two_ropes: whether layers with a window have a rope of their own, which is not scaled.
        layers_of_27b: number of layers of the family's 27B model, which scales attention scores by another number than
            the smaller models; 0: the family has no such model.
        interleaves: whether files interleave the two halves of each head in the rows of queries and
            keys.
        rope: settings of `rope_parameters` that no file states.
    """

    architecture: str = ""
    needed: Mapping[str, str] = {}
    optional: Mapping[str, str] = {}
    settings: Mapping[str, Any] = {}
    window: tuple[int, int] = (0, 0)
    ropeless: int = 0
    has_two_ropes: bool = False
    layers_of_27b: int = 0
    interleaves: bool = False
    rope: Mapping[str, Any] = {}


class Family(Struct, frozen=True, forbid_unknown_fields=True):
    """One model family.

    Attributes:
        model_type: its name in config.json.
        architecture: its class in transformers.
        forward: how our own forward computes the family.
        gguf: how its GGUF files are read.
    """

    model_type: str
    architecture: str
    forward: Forward
    gguf: Gguf = Gguf()


_TABLES = tomllib.loads(Path(__file__).with_name("families.toml").read_text())
FAMILIES = msgspec.convert(
    [{"model_type": name, **table} for name, table in _TABLES.items()], tuple[Family, ...]
)
OWN_FORWARD = {family.architecture: family for family in FAMILIES}
# Methods whose weights our own forward reads.
QUANTISED = ("awq", "gptq", "fp8", "auto-round", "compressed-tensors", "bitsandbytes", "mxfp4")
# (GGUF's name of the architecture, whether files have experts) -> the family.
GGUF = {
    (family.gguf.architecture, family.forward.has_experts): family
    for family in FAMILIES
    if family.gguf.architecture
}


def is_of_own_forward(config: Config) -> bool:
    """Return whether a config.json describes a model of a family that our own forward computes.

    For a multimodal model, the family of its language model counts.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        return bool(OWN_FORWARD.keys() & (config.get("architectures") or ()))
    model_type = str(text.get("model_type"))
    model_type = TWINS.get(model_type, model_type)
    return any(family.model_type == model_type for family in FAMILIES)


def reads_weights(config: Config) -> bool:
    """Return whether our own forward can read a checkpoint's weights as they are stored.

    It reads all weights that are not quantised. It reads quantised weights if their method is in
    `QUANTISED` and the model's family has `reads_directly`, but not those of a multimodal model.

    Args:
        config: the checkpoint's config.json.
    """
    scheme = config.get("quantization_config")
    if not isinstance(scheme, Mapping):
        return True
    architectures = config.get("architectures") or [""]
    family = OWN_FORWARD.get(architectures[0])
    is_read = family is not None and family.forward.reads_directly
    return is_read and scheme.get("quant_method") in QUANTISED


def forward_of(architecture: str, config: Config) -> Forward | None:
    """Return how our own forward computes a model; None if it does not, see `not_computed`."""
    if not_computed(architecture, config):
        return None
    return OWN_FORWARD[architecture].forward


def not_computed(
    architecture: str, config: Config, activations: Collection[str] = ACTIVATIONS
) -> str:
    """Return the reason why our own forward does not compute a model; "" if it does.

    Args:
        architecture: the model's class in transformers.
        config: the model's settings as in config.json, with `rope_parameters`.
        activations: names of the MLP activations that the caller can compute.
    """
    if architecture not in OWN_FORWARD:
        return f"our own forward has no family {architecture}"
    forward = OWN_FORWARD[architecture].forward
    activation = activation_of(config)
    is_silu = ACTIVATIONS.get(activation or "") == "silu"  # experts compute no other activation
    if activation not in activations or (forward.has_experts and not is_silu):
        return f"its activation {activation!r} is not computed"
    if config.get("quantization_config"):
        return "it is quantised (quantization_config)"
    return _rope_not_computed(forward, config) or _attention_not_computed(forward, config)


def _ropes(config: Config) -> list[Config]:
    """Return the settings of the model's ropes: there is one, or one for each kind of layer."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return []
    if "rope_type" in rope:
        return [rope]
    return [kind for kind in rope.values() if isinstance(kind, Mapping)]


def _rope_not_computed(forward: Forward, config: Config) -> str:
    ropes = _ropes(config)
    if not ropes:
        return "it has no rope"
    if any(rope.get("rope_type") not in ROPES for rope in ropes):
        return "its rope is of an unknown type, or depends on the length"
    if forward.rotates and len(ropes) == 1:
        return ""
    if any(settings.get("partial_rotary_factor", 1.0) != 1.0 for settings in (*ropes, config)):
        return "its rope turns a part of each head (partial_rotary_factor)"
    return ""


def _attention_not_computed(forward: Forward, config: Config) -> str:
    types = config.get("layer_types") or ()
    if not {_FULL, _SLIDING}.issuperset(types):
        return "layer_types has other layers than full and sliding attention"
    if config.get("use_sliding_window") and not types:
        return "use_sliding_window is set without layer_types"
    if config.get("use_bidirectional_attention") or config.get("is_causal", True) is not True:
        return "its tokens see later ones (is_causal, use_bidirectional_attention)"
    if not forward.has_caps and any(config.get(name) for name in CAPS):
        return "its scores or logits have caps, which its family has not"
    return ""


def activation_of(config: Config) -> str | None:
    """Return the name of the MLP's activation."""
    return config.get("hidden_activation") or config.get("hidden_act")


def layer_kinds(forward: Forward, config: Config) -> list[tuple[int, str | None]]:
    """Return (window, rope) of each layer of a model that `forward_of` accepts.

    The window is the number of tokens that a token attends to, itself included; 0 means all. The
    rope is the name of the layer's rope; it is "" if the model has only one, and None if the layer
    has no rope.
    """
    count = config["num_hidden_layers"]
    has_one_rope = "rope_type" in config["rope_parameters"]
    window = 0
    if config.get("use_sliding_window", True):
        window = config.get("sliding_window", forward.default_window) or 0
    default_type = _SLIDING
    if forward.default_window is None:
        default_type = _FULL
    types = config.get("layer_types") or [default_type] * count
    has_rope = config.get("no_rope_layers") or [1] * count
    kinds = []
    for layer_type, rotates in zip(types, has_rope, strict=True):
        rope = None
        if rotates:
            rope = "" if has_one_rope else layer_type
        layer_window = window if layer_type == _SLIDING else 0
        kinds.append((layer_window, rope))
    return kinds


def rotated(forward: Forward, config: Config, dim: int) -> int:
    """Return how many of a head's `dim` numbers are rotated."""
    if not forward.rotates:
        return dim
    return int(dim * config["rope_parameters"].get("partial_rotary_factor", 1.0))


def dimensions(config: Config) -> dict[str, int]:
    """Return the sizes of a layer's matrices, by the names that the table `MATRICES` uses.

    For example, "queries" is num_attention_heads * head_dim.

    Args:
        config: as in config.json, with `head_dim`.
    """
    width = config["head_dim"]
    return {
        "hidden": config["hidden_size"],
        "inner": config["intermediate_size"],
        "queries": config["num_attention_heads"] * width,
        "keys": config["num_key_value_heads"] * width,
    }


def weight_shapes(forward: Forward, config: Config) -> Shapes:
    """Return the shape of each tensor that a model's checkpoint has, by the tensor's name."""
    sizes = dimensions(config)
    embedding = (config["vocab_size"], sizes["hidden"])
    shapes: Shapes = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": (sizes["hidden"],),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = embedding
    layer = _layer_shapes(forward, config, sizes)
    for number in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            shapes[f"model.layers.{number}.{name}"] = shape
    return shapes


def _layer_shapes(forward: Forward, config: Config, sizes: Mapping[str, int]) -> Shapes:
    """Return the shapes of a layer's tensors, by their names within the layer."""
    shapes: Shapes = {}
    if forward.has_sinks:
        shapes["self_attn.sinks"] = (config["num_attention_heads"],)
    if forward.has_experts:
        shapes |= _expert_shapes(config, forward.clamps_experts)
    biased: tuple[str, ...] = ()
    for setting, names in forward.biases.items():
        if not setting or config.get(setting):
            biased += names
    for name, shape in _matrix_shapes(forward, sizes).items():
        shapes[f"{name}.weight"] = shape
        if name.startswith(biased):
            shapes[f"{name}.bias"] = shape[:1]
    for name in filter(None, forward.norms):
        shapes[f"{name}.weight"] = (sizes["hidden"],)
    if forward.head_norms:
        for name, width in (("q_norm", "queries"), ("k_norm", "keys")):
            count = sizes[width] if forward.head_norms == "all" else config["head_dim"]
            shapes[f"self_attn.{name}.weight"] = (count,)
    return shapes


def _matrix_shapes(forward: Forward, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the shape (outputs, inputs) of each matrix of a layer, by its name in a checkpoint.

    If the family has experts, the matrices of the MLP are left out.
    """
    shapes = {name: (sizes[outputs], sizes[inputs]) for name, (outputs, inputs) in MATRICES.items()}
    for name, parts in forward.fused.items():
        outputs = 0
        for part in parts:
            rows, inputs = shapes.pop(part)
            outputs += rows
        shapes[name] = (outputs, inputs)
    if forward.has_experts:
        return {name: shape for name, shape in shapes.items() if not name.startswith("mlp.")}
    return shapes


def _expert_shapes(config: Config, are_clamped: bool) -> Shapes:
    """Return the shapes of a layer's router and experts.

    Args:
        are_clamped: see `Forward.clamps_experts`.
    """
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
