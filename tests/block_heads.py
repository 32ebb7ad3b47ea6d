"""Makes tiny heads of all kinds except EAGLE-3, and a target for them.

The files are in the layout of speculators 0.9.0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pearl.models.heads.head import Block
from tests import eagle3

VOCAB, KNOWN, HIDDEN, INNER, HEADS, KV_HEADS = 267, 96, 32, 64, 4, 2
TOKENS = 24
ANCHOR = 9  # position of the last token of the text
_SLIDING = {"use_sliding_window": True, "sliding_window": 4}
ALL_SLIDING = _SLIDING | {"layer_types": ["sliding_attention"]}
_WIDE = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 6}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
_TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}
_MIXED = _SLIDING | {
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"],
}
Settings = tuple[dict[str, Any], dict[str, Any]]  # of a head, and of its layers
# EAGLE-3's settings that change nothing of a P-EAGLE head, or are another name of one.
_NOT_OF_PEAGLE = ("norm_output", "the trainer's defaults", "gelu_new")
# Every setting of each kind that changes its numbers.
FIELDS: dict[str, dict[str, Settings]] = {
    "dflash": {
        "none": ({}, {}),
        "draft_vocab_size": ({"draft_vocab_size": KNOWN}, {}),
        "block_size": ({"block_size": 8}, {}),
        "sample_from_anchor": ({"sample_from_anchor": True}, {}),
        "mask_token_id": ({"mask_token_id": 7}, {}),
        "aux_hidden_state_layer_ids": ({"aux_hidden_state_layer_ids": [4, 1]}, {}),
        "sliding_window": ({}, ALL_SLIDING),
        "sliding_window_non_causal": ({"sliding_window_non_causal": True}, ALL_SLIDING),
        "layer_types": ({}, _MIXED),
        "model_type": ({}, {"model_type": "llama", "mlp_bias": True}),
        "num_hidden_layers": ({}, {"num_hidden_layers": 3}),
        "head_dim": ({}, {"head_dim": 16}),
        "num_key_value_heads": ({}, {"num_key_value_heads": 4}),
        "attention_bias": ({}, {"attention_bias": True}),
        "rms_norm_eps": ({}, {"rms_norm_eps": 0.01}),
        "rope_theta": ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e2}}),
        "llama3 rope": ({}, {"rope_parameters": _LLAMA3}),
        "yarn": ({}, {"rope_parameters": _YARN}),
        "two ropes": ({}, {"rope_parameters": _TWO_ROPES}),
        "gelu": ({}, {"hidden_act": "gelu"}),
        "gelu_pytorch_tanh": ({}, {"hidden_act": "gelu_pytorch_tanh"}),
        "relu": ({}, {"hidden_act": "relu"}),
    },
    "dspark": {
        "none": ({}, {}),
        "draft_vocab_size": ({"draft_vocab_size": KNOWN}, {}),
        "sample_from_anchor": ({"sample_from_anchor": False}, {}),
        "markov_rank": ({"markov_rank": 6}, {}),
        "no Markov head": ({"markov_rank": 0, "confidence_head_with_markov": False}, {}),
        "gated": ({"markov_head_type": "gated"}, {}),
        "rnn": ({"markov_head_type": "rnn"}, {}),
        "rnn after the anchor": ({"markov_head_type": "rnn", "sample_from_anchor": False}, {}),
        "enable_confidence_head": ({"enable_confidence_head": False}, {}),
        "confidence_head_with_markov": ({"confidence_head_with_markov": False}, {}),
        "sliding_window": ({}, ALL_SLIDING),
    },
    "dflash2": {
        "none": ({}, {}),
        "conv_kernel_size": ({"conv_kernel_size": 3}, {}),
        "conv_group_size": ({"conv_group_size": 16}, {}),
        "selector_rank": ({"selector_rank": 9}, {}),
        "selector_top_k": ({"selector_top_k": 60}, {}),
        "sample_from_anchor": ({"sample_from_anchor": True}, {}),
        "sliding_window": ({}, ALL_SLIDING),
        "sliding_window_non_causal": ({"sliding_window_non_causal": False}, ALL_SLIDING),
        "num_hidden_layers": ({}, {"num_hidden_layers": 2}),
    },
    "xpress": {
        "none": ({}, {}),
        "draft_vocab_size": ({"draft_vocab_size": KNOWN}, {}),
        "sample_from_anchor": ({"sample_from_anchor": True}, {}),
        "block_size": ({"block_size": 7}, {}),
        "xpress_rank": ({"xpress_rank": 9}, {}),
        "xpress_mlp_ratio": ({"xpress_mlp_ratio": 3}, {}),
        "sliding_window": ({}, ALL_SLIDING),
        "num_hidden_layers": ({}, {"num_hidden_layers": 2}),
    },
    "peagle": {
        **{name: both for name, both in eagle3.FIELDS.items() if name not in _NOT_OF_PEAGLE},
        "sliding_window": ({}, _WIDE | {"layer_types": ["sliding_attention"]}),
        "layer_types": ({}, _WIDE | _MIXED | {"sliding_window": 6}),
        "mask_token_id": ({"mask_token_id": 7}, {}),
        "speculative_tokens": ({"speculative_tokens": 3}, {}),
    },
    "mtp": {
        "none": ({}, {}),
        "head_dim": ({}, {"head_dim": 16}),
        "num_key_value_heads": ({}, {"num_key_value_heads": 4}),
        "attention_bias": ({}, {"attention_bias": True}),
        "rms_norm_eps": ({}, {"rms_norm_eps": 0.01}),
        "rope_theta": ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e2}}),
        "llama3 rope": ({}, {"rope_parameters": _LLAMA3}),
        "yarn": ({}, {"rope_parameters": _YARN}),
        "gelu": ({}, {"hidden_act": "gelu"}),
        "gelu_pytorch_tanh": ({}, {"hidden_act": "gelu_pytorch_tanh"}),
        "relu": ({}, {"hidden_act": "relu"}),
        "sliding_window": ({}, _SLIDING | {"layer_types": ["sliding_attention"] * 4}),
    },
}
_OWN: dict[str, dict[str, Any]] = {
    "dflash": {"sliding_window_non_causal": False, "sample_from_anchor": False},
    "dspark": {
        "sliding_window_non_causal": False,
        "sample_from_anchor": True,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "dflash2": {
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 8,
        "selector_top_k": 6,
    },
    "xpress": {
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "xpress_rank": 8,
        "xpress_mlp_ratio": 2,
        "num_jacobi_passes": 6,
    },
    "mtp": {"num_nextn_predict_layers": 1},
}
LAYERS = 4  # of the target


def config_of(kind: str, name: str = "none") -> dict[str, Any]:
    """Return a head's config.json with the settings `FIELDS[kind][name]`.

    It is the same as speculators would write.
    """
    top, inner = FIELDS[kind][name]
    if kind == "peagle":
        return _peagle_config(top, inner)
    count = inner.get("num_hidden_layers", LAYERS if kind == "mtp" else 1)
    layer = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INNER,
        "layer_types": ["full_attention"] * count,
        "max_position_embeddings": 512,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": count,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
        **inner,
    }
    block: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [1, 2, 3],
        "block_size": 5,
        "draft_vocab_size": VOCAB,
        "mask_token_id": 3,
        "target_hidden_size": None,
    }
    if kind == "mtp":
        block = {"architectures": ["MTPDraftModel"]}
    return {
        **block,
        "dtype": "float32",
        **_OWN[kind],
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": layer,
        **top,
    }


def _peagle_config(top: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a P-EAGLE head, which has EAGLE-3's settings and a mask token."""
    settings = {"mask_token_id": 3, "embed_requires_grad": True, "speculative_tokens": 5, **top}
    size = settings.pop("speculative_tokens")
    config = eagle3.config_with(settings, inner)
    config["speculators_config"]["algorithm"] = "peagle"
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = size
    return config | {"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle"}


def width_of_states(config: dict[str, Any]) -> int:
    """Return the width of the target's hidden states that a head reads for each token."""
    kind = config["speculators_model_type"]
    if kind == "peagle":
        return eagle3.num_states(config) * HIDDEN
    if kind == "mtp":
        return HIDDEN
    return len(config["aux_hidden_state_layer_ids"]) * HIDDEN


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a head's tensors, except those that map its ids to the target's."""
    known = config["draft_vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(config["aux_hidden_state_layer_ids"]) * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    if known < VOCAB:
        shapes["lm_head.weight"] = (known, HIDDEN)
    for number in range(config["transformer_layer_config"]["num_hidden_layers"]):
        shapes |= _layer_shapes(config, f"layers.{number}.")
    kind = config["speculators_model_type"]
    if kind == "dspark":
        shapes |= _dspark_shapes(config, known)
    if kind == "dflash2":
        shapes |= _dflash2_shapes(config)
    if kind == "xpress":
        shapes |= _xpress_shapes(config, known)
    return shapes


def _layer_shapes(config: dict[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    layer = config["transformer_layer_config"]
    queries, keys = HEADS * layer["head_dim"], layer["num_key_value_heads"] * layer["head_dim"]
    matrices = {
        "self_attn.q_proj": (queries, HIDDEN),
        "self_attn.k_proj": (keys, HIDDEN),
        "self_attn.v_proj": (keys, HIDDEN),
        "self_attn.o_proj": (HIDDEN, queries),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for matrix, shape in matrices.items():
        shapes[f"{prefix}{matrix}.weight"] = shape
        if layer["attention_bias"] and matrix.startswith("self_attn"):
            shapes[f"{prefix}{matrix}.bias"] = shape[:1]
    for norm in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{prefix}{norm}.weight"] = (HIDDEN,)
    for norm in ("q_norm", "k_norm"):
        shapes[f"{prefix}self_attn.{norm}.weight"] = (layer["head_dim"],)
    return shapes


def _mtp_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    prefix = "mtp_layers.0."
    shapes = _layer_shapes(config, prefix)
    for norm in ("hidden_layernorm", "token_layernorm", "final_layernorm"):
        shapes[f"{prefix}{norm}.weight"] = (HIDDEN,)
    shapes[f"{prefix}input_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    return shapes


def _xpress_shapes(config: dict[str, Any], known: int) -> dict[str, tuple[int, ...]]:
    rank, size = config["xpress_rank"], config["block_size"]
    inner = rank * config["xpress_mlp_ratio"]
    return {
        "refiner_head.token_embed.weight": (VOCAB, rank),
        "refiner_head.down_h.weight": (rank, HIDDEN),
        "refiner_head.down_g.weight": (rank, HIDDEN),
        "refiner_head.in_proj.weight": (rank, 3 * rank),
        "refiner_head.mix_l": (rank, size, size),
        "refiner_head.mlp_gate.weight": (inner, rank),
        "refiner_head.mlp_up.weight": (inner, rank),
        "refiner_head.mlp_down.weight": (rank, inner),
        "refiner_head.readout.weight": (known, rank),
    }


def _dspark_shapes(config: dict[str, Any], known: int) -> dict[str, tuple[int, ...]]:
    rank = config["markov_rank"]
    shapes: dict[str, tuple[int, ...]] = {}
    if rank:
        shapes["markov_head.markov_w1.weight"] = (VOCAB, rank)
        shapes["markov_head.markov_w2.weight"] = (known, rank)
    if config["markov_head_type"] == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, HIDDEN + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if config["markov_head_type"] == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, HIDDEN + 2 * rank)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if config["enable_confidence_head"]:
        inputs = HIDDEN + rank * config["confidence_head_with_markov"]
        shapes["confidence_head.proj.weight"] = (1, inputs)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def _dflash2_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    rank, taps = config["selector_rank"], config["conv_kernel_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "candidate_selector.predecessor_codebook": (VOCAB, rank),
        "candidate_selector.successor_codebook": (VOCAB, rank),
        "candidate_selector.hidden_projection.weight": (rank, HIDDEN),
    }
    for number in range(config["transformer_layer_config"]["num_hidden_layers"]):
        for part in ("attention_conv", "mlp_conv"):
            name = f"layers.{number}.{part}"
            outputs = 2 * taps * (HIDDEN // config["conv_group_size"])
            shapes[f"{name}.base_kernel"] = (2, taps, HIDDEN)
            shapes[f"{name}.kernel_projection.weight"] = (outputs, HIDDEN)
    return shapes


def weights_of(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a head with this config.json. They are the same in every call."""
    kind = config["speculators_model_type"]
    random = torch.Generator().manual_seed(0)
    if kind == "peagle":
        mask = torch.randn(1, 1, width_of_states(config), generator=random)
        return eagle3.weights_of(config) | {"mask_hidden": mask}
    tensors = {}
    shapes = _mtp_shapes(config) if kind == "mtp" else _shapes(config)
    for name, shape in sorted(shapes.items()):
        if "norm" in name:
            tensors[name] = torch.rand(shape, generator=random) + 0.5
        else:
            tensors[name] = torch.randn(shape, generator=random) * shape[-1] ** -0.5
        if "codebook" in name:
            tensors[name] *= 2  # so that a selector's scores outweigh some logits
    known = config.get("draft_vocab_size", VOCAB)
    if known < VOCAB:
        ids = torch.arange(known) * 2 + 5
        tensors["d2t"] = ids - torch.arange(known)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def write_block_head(directory: Path, kind: str, name: str = "none") -> Path:
    """Write the checkpoint of a head with the settings `FIELDS[kind][name]`."""
    directory.mkdir(parents=True)
    config = config_of(kind, name)
    save_file(weights_of(config), directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def text_and_states(config: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a text [TOKENS], and the target's hidden states for it [TOKENS, width]."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (TOKENS,), generator=random)
    if config.get("draft_vocab_size", VOCAB) < VOCAB:
        ids = ids // 3 * 2 + 5
    return ids, torch.randn(TOKENS, width_of_states(config), generator=random)


def target_weights() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the embedding and the output matrix of a target, both [VOCAB, HIDDEN]."""
    random = torch.Generator().manual_seed(9)
    embedding = torch.randn(VOCAB, HIDDEN, generator=random)
    return embedding, torch.randn(VOCAB, HIDDEN, generator=random) * HIDDEN**-0.5


def write_all(directory: Path) -> None:
    """Write a checkpoint for each entry of `FIELDS`, for `speculators_logits.py` to read."""
    for kind, fields in FIELDS.items():
        for name in fields:
            head = write_block_head(directory / kind / name, kind, name)
            ids, states = text_and_states(config_of(kind, name))
            save_file({"ids": ids, "states": states}, head / "text")
    embedding, output = target_weights()
    target = {"embedding": embedding, "output": output, "anchor": torch.tensor(ANCHOR)}
    save_file(target, directory / "target")


class Watched(Block):
    """Keeps the logits and confidences of each position of the block.

    Whatever token is drawn, the token of a given text is taken.

    Args:
        tokens: the text's tokens from the block's position on.
    """

    def __init__(self, ids: torch.Tensor, tokens: torch.Tensor) -> None:
        self.logits: list[torch.Tensor] = []
        self.confidences: list[float | None] = []
        super().__init__(ids, lambda logits, position: int(tokens[position]), 0, len(tokens))

    def add(self, logits: torch.Tensor, confidence: float | None = None) -> int:
        self.logits.append(logits)
        self.confidences.append(confidence)
        return super().add(logits, confidence)
