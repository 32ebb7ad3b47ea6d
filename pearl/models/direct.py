"""Checkpoints of the Llama family read straight from their safetensors files, without transformers.

To import what builds a model there takes a worker seconds, most of them in torch's compiler. `read_decoder` gives what
`LlamaRunner` needs of such a model, under the same names; it is None for every checkpoint that is not exactly as
expected, which transformers then loads, or refuses.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from pearl.cache import Progress, silent

_QKV, _MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
# Class -> setting -> the matrices that have a bias where it is true; "" for those that always have one.
_BIASED: dict[str, dict[str, tuple[str, ...]]] = {
    "LlamaForCausalLM": {"attention_bias": (*_QKV, "o_proj"), "mlp_bias": _MLP},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {"": _QKV},
    "Qwen3ForCausalLM": {"attention_bias": (*_QKV, "o_proj")},
}
_NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
    "hidden_act",
    "tie_word_embeddings",
)
_DTYPES = ("float32", "bfloat16", "float16")


class Weight(nn.Module):
    """A weight, and a bias if any: a linear layer, a norm, or the embedding."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)


class Rope(nn.Module):
    """Cosines and sines of positions: the bits that transformers computes."""

    def __init__(self, frequencies: torch.Tensor) -> None:
        super().__init__()
        self._frequencies = frequencies  # [head_dim / 2]; no buffer, for it stays float32 on the CPU

    def forward(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each [1, positions, head_dim], of the dtype and device of `like`. positions [1, n]."""
        angles = positions[..., None].float() * self._frequencies.to(like.device)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class Decoder(nn.Module):
    """Weights and config of a model, under the names that they have in transformers. Computes nothing."""

    def __init__(self, config: SimpleNamespace, model: nn.Module, lm_head: Weight) -> None:
        super().__init__()
        self.config: Any = config
        self.model: Any = model
        self.lm_head: Any = lm_head

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.embed_tokens.weight.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.embed_tokens.weight.device
        return device


def read_decoder(
    directory: Path, dtype: torch.dtype | None, device: torch.device, progress: Progress = silent
) -> Decoder | None:
    """The checkpoint in `directory`, its weights in `dtype`: None for the checkpoint's own.

    Weights whose dtype does not change are mapped, not read.  Where there are several files, `progress` is told of each
    that is begun.  Raises what safetensors raises for a damaged file.
    """
    config = _config(directory)
    if config is None:
        return None
    own = config.get("dtype") or config.get("torch_dtype")
    frequencies = _frequencies(config)
    files = _files(directory)
    if frequencies is None or files is None or own not in _DTYPES:
        return None
    expected = _shapes(config)
    opened = {name: safe_open(directory / name, framework="pt") for name in set(files.values())}
    found = {name: tuple(opened[file].get_slice(name).get_shape()) for name, file in files.items()}
    if config["tie_word_embeddings"]:
        found.pop("lm_head.weight", None)
    if found != expected:
        return None
    wanted = dtype or getattr(torch, own)
    begun: set[str] = set()

    def weight(name: str) -> torch.Tensor:
        if len(opened) > 1 and files[name] not in begun:
            begun.add(files[name])
            progress(f"loading {directory.name}: file {len(begun)} of {len(opened)}")
        found: torch.Tensor = opened[files[name]].get_tensor(name)
        return found.to(device=device, dtype=wanted)

    if config["tie_word_embeddings"] and "lm_head.weight" in files:
        tied = [opened[files[name]].get_tensor(name) for name in ("lm_head.weight", "model.embed_tokens.weight")]
        if not torch.equal(*tied):
            return None  # the head was trained by itself, and transformers ties only what is equal

    def layer(prefix: str) -> Weight:
        bias = f"{prefix}.bias"
        return Weight(weight(f"{prefix}.weight"), weight(bias) if bias in expected else None)

    inner = nn.Module()
    inner.embed_tokens, inner.norm = layer("model.embed_tokens"), layer("model.norm")
    inner.rotary_emb = Rope(frequencies)
    inner.layers = nn.ModuleList(
        _tree(f"model.layers.{n}.", expected, layer) for n in range(config["num_hidden_layers"])
    )
    # A module of its own where it is tied too: the runner takes the head's weight away.
    head = Weight(inner.embed_tokens.weight) if config["tie_word_embeddings"] else layer("lm_head")
    settings = SimpleNamespace(**config)
    settings.get_text_config = lambda decoder=True: settings
    return Decoder(settings, inner, head)


def _tree(prefix: str, expected: dict[str, Any], layer: Any) -> nn.Module:
    """One decoder layer: modules nested as their names are."""
    root = nn.Module()
    for name in expected:
        if name.startswith(prefix) and name.endswith(".weight"):
            *path, last = name.removeprefix(prefix).removesuffix(".weight").split(".")
            place: Any = root
            for part in path:
                if not hasattr(place, part):
                    setattr(place, part, nn.Module())
                place = getattr(place, part)
            setattr(place, last, layer(name.removesuffix(".weight")))
    return root


def _config(directory: Path) -> dict[str, Any] | None:
    """config.json, with `rope_parameters` and `head_dim`, if it is of a model that `LlamaRunner` computes."""
    try:
        config = json.loads((directory / "config.json").read_text())
        architecture = config["architectures"][0]
        if architecture not in _BIASED or any(config[name] is None for name in _NEEDED):
            return None
        # What asks for code of its own is not what its architecture's name says.
        if "auto_map" in config or config["model_type"] != architecture.removesuffix("ForCausalLM").lower():
            return None
    except (OSError, ValueError, LookupError, TypeError):
        return None
    rope = config.get("rope_parameters")
    if rope is None:  # as it was written before transformers 5
        scaling = config.get("rope_scaling") or {}
        rope = {**scaling, "rope_type": scaling.get("rope_type", scaling.get("type", "default"))}
        rope.setdefault("rope_theta", config.get("rope_theta"))  # a scaling's own base goes before it
    layers = set(config.get("layer_types") or ["full_attention"])
    is_mistral = config["architectures"][0] == "MistralForCausalLM"
    if (
        not isinstance(rope, dict)
        or (config.get("rope_parameters") and config.get("rope_scaling"))  # which goes before it
        or "original_max_position_embeddings" in config  # which goes before the rope's own
        or config.get("is_causal", True) is not True
        or "quantization_config" in config
        or config["hidden_act"] not in ("silu", "swish")
        or layers != {"full_attention"}
        or config.get("use_sliding_window")
        or (is_mistral and config.get("sliding_window", 4096) is not None)
        or rope.get("partial_rotary_factor", 1.0) != 1.0
        or config.get("partial_rotary_factor", 1.0) != 1.0
    ):
        return None
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {**config, "rope_parameters": rope}


def _frequencies(config: dict[str, Any]) -> torch.Tensor | None:
    """The angle by which each pair of dimensions turns from one position to the next; None: of an unknown rope."""
    rope, dim = config["rope_parameters"], config["head_dim"]
    kind = rope.get("rope_type")
    needed = {"default": (), "linear": ("factor",), "llama3": (*_LLAMA3, "original_max_position_embeddings")}.get(kind)
    if needed is None or not all(isinstance(rope.get(name), int | float) for name in ("rope_theta", *needed)):
        return None
    plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    if kind == "default":
        return plain
    if kind == "linear":
        return plain / rope["factor"]
    return llama3_frequencies(plain, rope)


def llama3_frequencies(plain: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Those of Llama 3.1, as in transformers' `_compute_llama3_parameters`; `plain`: without any scaling."""
    factor, low, high = (rope[name] for name in _LLAMA3)
    length = rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    slowed = torch.where(wavelength > length / low, plain / factor, plain)
    share = (length / wavelength - low) / (high - low)
    between = ~(wavelength < length / high) & ~(wavelength > length / low)
    return torch.where(between, (1 - share) * slowed / factor + share * slowed, slowed)


def _files(directory: Path) -> dict[str, str] | None:
    """Name of a tensor -> the file that it is in."""
    whole = "model.safetensors"
    if (directory / whole).is_file():
        with safe_open(directory / whole, framework="pt") as file:
            return dict.fromkeys(file.keys(), whole)
    try:
        return dict(json.loads((directory / f"{whole}.index.json").read_text())["weight_map"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of all tensors that the checkpoint must have."""
    name_of_class = config["architectures"][0]
    settings = _BIASED[name_of_class]
    biased = {name for setting, names in settings.items() if not setting or config.get(setting) for name in names}
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    attention = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{number}."
        for block, matrices in (("self_attn", attention), ("mlp", mlp)):
            for name, shape in matrices.items():
                shapes[f"{prefix}{block}.{name}.weight"] = shape
                if name in biased:
                    shapes[f"{prefix}{block}.{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (hidden,)
        for name in ("q_norm", "k_norm") if name_of_class == "Qwen3ForCausalLM" else ():
            shapes[f"{prefix}self_attn.{name}.weight"] = (dim,)
    return shapes
