"""What the kinds of heads have in common: decoder layers that a config.json describes, and checks of tensors.

A head's layers are ordinary decoder layers, which our own forward pass computes.  If a head has
anything that we do not compute, a `ValueError` is raised.  Without this error nobody would notice:
the head would only guess badly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from types import SimpleNamespace
from typing import Any

import torch

from pearl.models.checkpoints.direct import Weight
from pearl.models.checkpoints.rope import parameters_of_rope, rope_of
from pearl.models.families import (
    HEAD_ACTIVATIONS,
    OWN_FORWARD,
    Config,
    Forward,
    Shapes,
    not_computed,
)
from pearl.models.forward.decoder import Decoder
from pearl.models.forward.quantised import Embedding
from pearl.models.heads.head import HeadTarget, Tensors

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOGETHER = (  # matrices that are computed as one
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
# Tensors that no guess depends on: the inverse of d2t, and copies of the target's tensors.
UNREAD = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
# Settings of config.json that may be true and change no result.
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


def check_switches(settings: Iterable[Config], computed: Collection[str]) -> None:
    """Raise `ValueError` if a config.json switches on something that we do not compute.

    Args:
        settings: the tables of the config.json.
        computed: names of settings that we compute, and that may therefore be true. Settings that
            change no result may always be true.
    """
    for part in settings:
        for name, value in part.items():
            if value is True and name not in computed and name not in _NEUTRAL:
                raise ValueError(f"its config.json sets {name}, which is not computed")


def forward_of_layers(kind: str, layer: Config) -> Forward:
    """Return how layers of model type `kind` are computed.

    Raises `ValueError` if our own forward does not compute them.

    Args:
        layer: the settings of the layers, as `as_a_model` returns them.
    """
    if kind not in _ARCHITECTURES:
        raise ValueError(
            f"its decoder layers are of model type {kind!r}; llama and qwen3 are computed"
        )
    architecture = _ARCHITECTURES[kind]
    reason = not_computed(architecture, layer, HEAD_ACTIVATIONS)
    if reason:
        raise ValueError(f"its decoder layers are not computed: {reason}")
    return OWN_FORWARD[architecture].forward


def as_a_model(config: Config, count: int) -> dict[str, Any]:
    """Return a head's settings in the form of a whole model's config.json, with `count` layers.

    Absent settings get their defaults. Raises `ValueError` if PEARL cannot compute the rope.
    """
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
    rope = rope.get("sliding_attention", rope)  # if there are several, speculators uses this one
    if rope.get("partial_rotary_factor", 1.0) != 1.0:  # trainers ignore it, and engines apply it
        raise ValueError(f"its rope is not computed: {rope}")
    return {"rope_type": "default", "rope_theta": 1e4, **rope}


def as_weights(tensors: Tensors, target: HeadTarget) -> dict[str, torch.Tensor]:
    """Return the tensors that guesses depend on, in the dtype and on the device of the target's embedding."""
    weights = {}
    for name, tensor in tensors.items():
        if name not in UNREAD and "rotary_emb" not in name:
            dtype = None if name == "d2t" else target.embedding.dtype
            weights[name] = tensor.to(target.embedding.device, dtype)
    return weights


def check_vocabulary(tensors: Tensors, target: HeadTarget) -> None:
    """Raise `ValueError` unless the head has the target's vocabulary, or says which part of it.

    A head with a part of the vocabulary says so by the tensor `d2t`; see `token_ids`. The head's
    embedding, if it has one, must have a row for each of the target's tokens.
    """
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


def check_shapes(
    tensors: Tensors,
    needed: Shapes,
    optional: Shapes,
    in_layout: Callable[[str], str] = str,
) -> None:
    """Raise `ValueError` if a tensor is missing, superfluous or of another shape.

    Args:
        needed: shapes of the tensors that must be there.
        optional: shapes of the tensors that may be there.
        in_layout: returns the name that a tensor has in the checkpoint.
    """
    for name in needed:
        if name not in tensors:
            raise ValueError(f"it has no {in_layout(name)}")
    shapes = needed | optional
    for name, tensor in tensors.items():
        if name not in shapes:
            raise ValueError(f"nothing reads its tensor {in_layout(name)}")
        shape = list(shapes[name])
        if list(tensor.shape) != shape:
            raise ValueError(
                f"its {in_layout(name)} has the shape {list(tensor.shape)}, not {shape}"
            )


def shapes_of_biases(needed: Shapes) -> Shapes:
    """Return the shapes of the biases that the matrices of `needed` may have."""
    shapes: Shapes = {}
    for name, shape in needed.items():
        if len(shape) == 2:
            shapes[f"{name.removesuffix('.weight')}.bias"] = shape[:1]
    return shapes


def check_biases(tensors: Tensors, layers: int) -> None:
    """Raise `ValueError` if a layer has a bias for some of the matrices that are joined into one.

    For example, q_proj, k_proj and v_proj are joined: all three must have a bias, or none.
    """
    for number in range(layers):
        for group in _TOGETHER:
            biases = [f"layers.{number}.{name}.bias" for name in group]
            present = [name for name in biases if name in tensors]
            if present and present != biases:
                raise ValueError(
                    f"it has biases {', '.join(present)}, but not all of {', '.join(biases)}"
                )


def token_ids(tensors: Tensors, count: int, device: torch.device) -> torch.Tensor:
    """Return the target's token id for each of a head's `count` logits."""
    ids = torch.arange(count, device=device)
    if "d2t" in tensors:
        ids = ids + tensors["d2t"]
    return ids


def decoder_of(layer: Config, tensors: Tensors, embedding: Embedding) -> Decoder:
    """Return a model made of a head's layers, last norm and output matrix.

    `DecoderLayers` takes it like a whole model.
    """
    decoder = Decoder(SimpleNamespace(**layer))
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
