"""Tiny block drafters in the layout of speculators 0.9.0, and a target for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pearl.models.heads.head import Block

VOCAB, KNOWN, HIDDEN, INNER, HEADS, KV_HEADS = 267, 96, 32, 64, 4, 2
TOKENS = 24
ANCHOR = 9  # position of the last token of the text
_SLIDING = {"use_sliding_window": True, "sliding_window": 4}
_ALL_SLIDING = _SLIDING | {"layer_types": ["sliding_attention"]}
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
# Every setting of each kind that changes its numbers.
FIELDS: dict[str, dict[str, Settings]] = {
    "dflash": {
        "none": ({}, {}),
        "draft_vocab_size": ({"draft_vocab_size": KNOWN}, {}),
        "block_size": ({"block_size": 8}, {}),
        "sample_from_anchor": ({"sample_from_anchor": True}, {}),
        "mask_token_id": ({"mask_token_id": 7}, {}),
        "aux_hidden_state_layer_ids": ({"aux_hidden_state_layer_ids": [4, 1]}, {}),
        "sliding_window": ({}, _ALL_SLIDING),
        "sliding_window_non_causal": ({"sliding_window_non_causal": True}, _ALL_SLIDING),
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
        "sliding_window": ({}, _ALL_SLIDING),
    },
    "dflash2": {
        "none": ({}, {}),
        "conv_kernel_size": ({"conv_kernel_size": 3}, {}),
        "conv_group_size": ({"conv_group_size": 16}, {}),
        "selector_rank": ({"selector_rank": 9}, {}),
        "selector_top_k": ({"selector_top_k": 60}, {}),
        "sample_from_anchor": ({"sample_from_anchor": True}, {}),
        "sliding_window": ({}, _ALL_SLIDING),
        "sliding_window_non_causal": ({"sliding_window_non_causal": False}, _ALL_SLIDING),
        "num_hidden_layers": ({}, {"num_hidden_layers": 2}),
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
}


def config_of(kind: str, name: str = "none") -> dict[str, Any]:
    """The config.json of a head with the settings of `FIELDS[kind][name]`, as speculators writes it."""
    top, inner = FIELDS[kind][name]
    count = inner.get("num_hidden_layers", 1)
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
    return {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [1, 2, 3],
        "block_size": 5,
        "draft_vocab_size": VOCAB,
        "dtype": "float32",
        "mask_token_id": 3,
        **_OWN[kind],
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "transformer_layer_config": layer,
        **top,
    }


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of a head's tensors; those of its vocabulary are not among them."""
    layer = config["transformer_layer_config"]
    known = config["draft_vocab_size"]
    queries, keys = HEADS * layer["head_dim"], layer["num_key_value_heads"] * layer["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(config["aux_hidden_state_layer_ids"]) * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    if known < VOCAB:
        shapes["lm_head.weight"] = (known, HIDDEN)
    for number in range(layer["num_hidden_layers"]):
        matrices = {
            "self_attn.q_proj": (queries, HIDDEN),
            "self_attn.k_proj": (keys, HIDDEN),
            "self_attn.v_proj": (keys, HIDDEN),
            "self_attn.o_proj": (HIDDEN, queries),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        for matrix, shape in matrices.items():
            shapes[f"layers.{number}.{matrix}.weight"] = shape
            if layer["attention_bias"] and matrix.startswith("self_attn"):
                shapes[f"layers.{number}.{matrix}.bias"] = shape[:1]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{number}.{norm}.weight"] = (HIDDEN,)
        for norm in ("q_norm", "k_norm"):
            shapes[f"layers.{number}.self_attn.{norm}.weight"] = (layer["head_dim"],)
    kind = config["speculators_model_type"]
    if kind == "dspark":
        shapes |= _dspark_shapes(config, known)
    if kind == "dflash2":
        shapes |= _dflash2_shapes(config)
    return shapes


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
    """The tensors of such a head, always the same."""
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in sorted(_shapes(config).items()):
        if "norm" in name:
            tensors[name] = torch.rand(shape, generator=random) + 0.5
        else:
            tensors[name] = torch.randn(shape, generator=random) * shape[-1] ** -0.5
        if "codebook" in name:
            tensors[name] *= 2  # so that a selector's scores outweigh some logits
    known = config["draft_vocab_size"]
    if known < VOCAB:
        ids = torch.arange(known) * 2 + 5
        tensors["d2t"] = ids - torch.arange(known)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def write_block_head(directory: Path, kind: str, name: str = "none") -> Path:
    """A head with the settings of `FIELDS[kind][name]`."""
    directory.mkdir(parents=True)
    config = config_of(kind, name)
    save_file(weights_of(config), directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def text_and_states(config: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """A text [TOKENS] and hidden states of a target [TOKENS, states]."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (TOKENS,), generator=random)
    if config["draft_vocab_size"] < VOCAB:
        ids = ids // 3 * 2 + 5
    width = len(config["aux_hidden_state_layer_ids"]) * HIDDEN
    return ids, torch.randn(TOKENS, width, generator=random)


def target_weights() -> tuple[torch.Tensor, torch.Tensor]:
    """The embedding and the output matrix of a target, both [VOCAB, HIDDEN]."""
    random = torch.Generator().manual_seed(9)
    embedding = torch.randn(VOCAB, HIDDEN, generator=random)
    return embedding, torch.randn(VOCAB, HIDDEN, generator=random) * HIDDEN**-0.5


def write_all(directory: Path) -> None:
    """A checkpoint for each field of each kind, as `speculators_logits.py` reads them."""
    for kind, fields in FIELDS.items():
        for name in fields:
            head = write_block_head(directory / kind / name, kind, name)
            ids, states = text_and_states(config_of(kind, name))
            save_file({"ids": ids, "states": states}, head / "text")
    embedding, output = target_weights()
    target = {"embedding": embedding, "output": output, "anchor": torch.tensor(ANCHOR)}
    save_file(target, directory / "target")


class Watched(Block):
    """Keeps the logits and confidences of the levels; each token is the text's own, drawn or not.

    Args:
        tokens: those of the text from the block's position on.
    """

    def __init__(self, ids: torch.Tensor, tokens: torch.Tensor) -> None:
        self.logits: list[torch.Tensor] = []
        self.confidences: list[float | None] = []
        super().__init__(ids, lambda logits, position: int(tokens[position]), 0, len(tokens))

    def add(self, logits: torch.Tensor, confidence: float | None = None) -> int:
        self.logits.append(logits)
        self.confidences.append(confidence)
        return super().add(logits, confidence)
