"""Tiny EAGLE-3 heads in the layout of speculators 0.9.0, and a reference for what they compute.

The reference follows the documented mathematics.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import gelu, linear, relu, silu, softmax

PLAIN_ROPES = ("default", "linear")  # those that `reference` computes
VOCAB, KNOWN, HIDDEN, INNER, HEADS, KV_HEADS = 267, 96, 32, 64, 4, 2
TOKENS, STEPS = 14, 4
_WINDOW: dict[str, Any] = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4}
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
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 2.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 64,
}
_TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}
# Every setting of a head's config.json that changes its numbers: (its own, those of its layers).
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "draft_vocab_size": ({"draft_vocab_size": VOCAB}, {}),
    "norm_before_residual": ({"norm_before_residual": True}, {}),
    "norm_before_fc": ({"norm_before_fc": True}, {}),
    "fc_norm": ({"fc_norm": True}, {}),
    "norm_output": ({"norm_output": True}, {}),
    "the trainer's defaults": (
        {"norm_output": True, "norm_before_residual": True, "norm_before_fc": True},
        {},
    ),
    "eagle_aux_hidden_state_layer_ids": (
        {"eagle_aux_hidden_state_layer_ids": [4, 1], "fc_norm": True},
        {},
    ),
    "model_type": ({}, {"model_type": "qwen3"}),
    "num_hidden_layers": ({}, {"num_hidden_layers": 2}),
    "three layers of qwen3": (
        {"norm_output": True},
        {"model_type": "qwen3", "num_hidden_layers": 3},
    ),
    "sliding_window": ({}, _WINDOW | {"layer_types": ["sliding_attention"]}),
    "layer_types": (
        {},
        _WINDOW | {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "head_dim": ({}, {"head_dim": 16}),
    "num_key_value_heads": ({}, {"num_key_value_heads": 4}),
    "attention_bias": ({}, {"attention_bias": True}),
    "mlp_bias": ({}, {"mlp_bias": True}),
    "rms_norm_eps": ({}, {"rms_norm_eps": 0.01}),
    "rope_theta": ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e2}}),
    "linear rope": (
        {},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}},
    ),
    "llama3 rope": ({}, {"rope_parameters": _LLAMA3}),
    "yarn": ({}, {"rope_parameters": _YARN}),
    "longrope": ({}, {"rope_parameters": _LONGROPE, "max_position_embeddings": 128}),
    "two ropes": ({}, {"rope_parameters": _TWO_ROPES}),
    "gelu": ({}, {"hidden_act": "gelu"}),
    "gelu_new": ({}, {"hidden_act": "gelu_new"}),
    "gelu_pytorch_tanh": ({}, {"hidden_act": "gelu_pytorch_tanh"}),
    "quick_gelu": ({}, {"hidden_act": "quick_gelu"}),
    "relu": ({}, {"hidden_act": "relu"}),
    "relu2": ({}, {"hidden_act": "relu2"}),
}


def config_of(name: str) -> dict[str, Any]:
    """Return a head's config.json with the settings `FIELDS[name]`, as speculators writes it."""
    return config_with(*FIELDS[name])


def config_with(top: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
    """Return a head's config.json with settings of the head (`top`) and of its layers (`inner`)."""
    layer = {
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INNER,
        "max_position_embeddings": 512,
        "mlp_bias": False,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCAB,
        **inner,
    }
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": 3,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": KNOWN,
        "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": None,
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        **top,
    }


def num_states(config: dict[str, Any]) -> int:
    return len(config["eagle_aux_hidden_state_layer_ids"] or (0, 0, 0))


def weights_of(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a head with this config.json. They are the same in every call."""
    layer, known = config["transformer_layer_config"], config["draft_vocab_size"]
    queries, keys = HEADS * layer["head_dim"], layer["num_key_value_heads"] * layer["head_dim"]
    states = num_states(config) * HIDDEN
    matrices = {"embed_tokens": (VOCAB, HIDDEN), "fc": (HIDDEN, states), "lm_head": (known, HIDDEN)}
    norms = {"norm": HIDDEN}
    biases: dict[str, int] = {}
    if config["norm_before_fc"]:
        norms["input_norm"] = states
    if config["fc_norm"]:
        norms |= {f"fc_norm.{number}": HIDDEN for number in range(num_states(config))}
    for number in range(layer["num_hidden_layers"]):
        prefix = f"layers.{number}."
        inputs = HIDDEN if number else 2 * HIDDEN
        attention = {
            "q_proj": (queries, inputs),
            "k_proj": (keys, inputs),
            "v_proj": (keys, inputs),
        }
        attention["o_proj"] = (HIDDEN, queries)
        mlp = {
            "gate_proj": (INNER, HIDDEN),
            "up_proj": (INNER, HIDDEN),
            "down_proj": (HIDDEN, INNER),
        }
        named = {f"{prefix}self_attn.{name}": shape for name, shape in attention.items()}
        matrices |= named
        if layer["attention_bias"]:
            biases |= {name: shape[0] for name, shape in named.items()}
        named = {f"{prefix}mlp.{name}": shape for name, shape in mlp.items()}
        matrices |= named
        if layer["mlp_bias"]:
            biases |= {name: shape[0] for name, shape in named.items()}
        norms |= {f"{prefix}input_layernorm": HIDDEN, f"{prefix}post_attention_layernorm": HIDDEN}
        if not number:
            norms[f"{prefix}hidden_norm"] = HIDDEN
        if layer["model_type"] == "qwen3":
            norms |= {f"{prefix}self_attn.{name}_norm": layer["head_dim"] for name in "qk"}
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in sorted(matrices.items()):
        tensors[f"{name}.weight"] = torch.randn(shape, generator=random) * shape[1] ** -0.5
    for name, width in sorted(norms.items()):
        tensors[f"{name}.weight"] = torch.rand(width, generator=random) + 0.5
    for name, width in sorted(biases.items()):
        tensors[f"{name}.bias"] = torch.randn(width, generator=random) * 0.3
    if known < VOCAB:
        ids = torch.arange(known) * 2 + 5
        tensors["d2t"] = ids - torch.arange(known)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def write_head(directory: Path, name: str) -> Path:
    """Write the checkpoint of a head with the settings `FIELDS[name]`."""
    directory.mkdir()
    config = config_of(name)
    save_file(weights_of(config), directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def text_and_states(config: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a text [TOKENS], and the target's hidden states for it [TOKENS, width]."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (TOKENS,), generator=random)
    return ids, torch.randn(TOKENS, num_states(config) * HIDDEN, generator=random)


def reference(config: dict[str, Any], weights: dict[str, torch.Tensor], cut: int) -> torch.Tensor:
    """Return a head's logits [STEPS, draft_vocab_size] for the tokens after position `cut`.

    Each step reads the text's own token, whatever the head would draw. The token at position p is
    read together with the target's states at p - 1 if p <= cut, and otherwise with the output of
    the last step. All is computed token by token, and shares neither a cache nor functions with the
    runtime.
    """
    return Reference(config, weights).steps(cut)


class Reference:
    def __init__(self, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        self.config, self.layer, self.weights = config, config["transformer_layer_config"], weights
        layers = range(self.layer["num_hidden_layers"])
        self.keys: list[list[torch.Tensor]] = [[] for _ in layers]
        self.values: list[list[torch.Tensor]] = [[] for _ in layers]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        mean_square = x.pow(2).mean(-1, keepdim=True)
        return (
            x / (mean_square + self.layer["rms_norm_eps"]).sqrt() * self.weights[f"{name}.weight"]
        )

    def product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def steps(self, cut: int) -> torch.Tensor:
        ids, states = text_and_states(self.config)
        if self.config["norm_before_fc"]:
            states = self.norm(states, "input_norm")
        if self.config["fc_norm"]:
            parts = states.chunk(num_states(self.config), -1)
            states = torch.cat(
                [self.norm(part, f"fc_norm.{number}") for number, part in enumerate(parts)], -1
            )
        before = self.product(states, "fc")
        rows = []
        output = before[0]
        for position in range(1, cut + STEPS):
            state = before[position - 1] if position <= cut else output
            output = self.read(int(ids[position]), state, position, min(position, cut))
            normed = self.norm(output, "norm")
            if position >= cut:
                rows.append(self.product(normed, "lm_head"))
            if self.config["norm_output"]:
                output = normed
        return torch.stack(rows)

    def read(self, token: int, state: torch.Tensor, position: int, anchor: int) -> torch.Tensor:
        """Return the head's hidden state for the token at `position`.

        `anchor`: the last position that was read with the target's states; windows are counted from
        it.
        """
        embedded = self.norm(self.weights["embed_tokens.weight"][token], "layers.0.input_layernorm")
        normed = self.norm(state, "layers.0.hidden_norm")
        hidden = normed if self.config["norm_before_residual"] else state
        x = torch.cat((embedded, normed))
        for number in range(len(self.keys)):
            if number:
                x = self.norm(hidden, f"layers.{number}.input_layernorm")
            hidden = hidden + self.attend(number, x, position, anchor)
            fed = self.norm(hidden, f"layers.{number}.post_attention_layernorm")
            gate = self.activate(self.product(fed, f"layers.{number}.mlp.gate_proj"))
            up = self.product(fed, f"layers.{number}.mlp.up_proj")
            hidden = hidden + self.product(gate * up, f"layers.{number}.mlp.down_proj")
        return hidden

    def attend(self, number: int, x: torch.Tensor, position: int, anchor: int) -> torch.Tensor:
        prefix, dim = f"layers.{number}.self_attn.", self.layer["head_dim"]
        queries, keys, values = (
            self.product(x, f"{prefix}{name}_proj").view(-1, dim) for name in "qkv"
        )
        if self.layer["model_type"] == "qwen3":
            queries, keys = (
                self.norm(queries, f"{prefix}q_norm"),
                self.norm(keys, f"{prefix}k_norm"),
            )
        self.keys[number].append(self.turned(keys, position))
        self.values[number].append(values)
        first = 0
        if (self.layer.get("layer_types") or ["full_attention"] * 9)[number] == "sliding_attention":
            first = max(
                0, anchor - self.layer["sliding_window"]
            )  # the first token read is that of position 1
        mixed = []
        for head, query in enumerate(self.turned(queries, position)):
            own = head * len(keys) // HEADS
            seen = torch.stack([each[own] for each in self.keys[number][first:]])
            shares = softmax(seen @ query / math.sqrt(dim), 0)
            mixed.append(shares @ torch.stack([each[own] for each in self.values[number][first:]]))
        return self.product(torch.cat(mixed), f"{prefix}o_proj")

    def turned(self, x: torch.Tensor, position: int) -> torch.Tensor:
        rope, dim = self.layer["rope_parameters"], self.layer["head_dim"]
        assert rope["rope_type"] in PLAIN_ROPES
        angles = (
            position
            / rope.get("factor", 1.0)
            * rope["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        )
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        name = self.layer["hidden_act"]
        if name in ("gelu_new", "gelu_pytorch_tanh"):
            return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        if name == "quick_gelu":
            return x / (1 + torch.exp(-1.702 * x))
        if name == "relu2":
            return relu(x) ** 2
        if name == "relu":
            return relu(x)
        if name == "gelu":
            return gelu(x)
        return silu(x)
