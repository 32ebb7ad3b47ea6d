"""Writes tiny models as .gguf files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoModelForCausalLM

from pearl.models.checkpoints.rope import frequencies
from tests.tiny import tiny_model

LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
EXPERTS = {
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "attention.key_length": 8,
}
GEMMA = {"attention.key_length": 8}
FAMILIES: dict[str, dict[str, Any]] = {  # what files of them say beside the usual
    "llama-biased": {},
    "llama-tied": {},
    "llama-mha": {"attention.head_count_kv": None},
    "qwen2": {},
    "qwen3": {"attention.key_length": 16},
    "gemma2-caps": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0, **GEMMA},
    "gemma3-linear": {
        **GEMMA,
        "attention.sliding_window": 4096,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    },
    "phi3-partial": {"rope.dimension_count": 6, "attention.sliding_window": 0},
    "phi4-mini": {
        "rope.dimension_count": 6,
        "attention.sliding_window": 0,
        "rope.scaling.original_context_length": 256,
        "rope.scaling.attn_factor": 1.125**0.5,  # 1 + log 2 / log 256
    },
    "glm4": {"attention.key_length": 8, "rope.dimension_count": 4},
    "granite-scaled": {
        "embedding_scale": 12.0,
        "residual_scale": 0.22,
        "attention.scale": 0.2,
        "logit_scale": 8.0,
    },
    "olmo2": {},
    "smollm3": {},
    "qwen3-moe": EXPERTS,
    "mixtral": {"expert_count": 4, "expert_used_count": 2},
    "gpt-oss-plain": {
        "expert_count": 4,
        "expert_used_count": 2,
        **GEMMA,
        "attention.sliding_window": 8,
    },
}


def write_gguf(
    file: Path,
    model: Path | None = None,
    without: str = " ",
    freqs: Any = None,
    kind: str = "F32",
    **said: Any,
) -> None:
    """Write a tiny model with llama.cpp's names of tensors.

    The rows of a Llama's q and k matrices are interleaved, as llama.cpp's rotation needs them.

    Args:
        without: tensors with this in their names are left out.
        freqs: factors by which the rope is scaled, written as a tensor. True stands for those of
            Llama 3.2; None for no tensor.
        kind: the type of the matrices, such as "Q8_0".
        said: fields of the file, in addition to those from the configuration or in their place; a
            field that is None is left out.
    """
    model = model or tiny_model()
    config = json.loads((model / "config.json").read_text())
    family = {
        "gemma3_text": "gemma3",
        "mixtral": "llama",
        "qwen3_moe": "qwen3moe",
        "gpt_oss": "gpt-oss",
    }.get(config["model_type"], config["model_type"])
    ropes = config["rope_parameters"]
    usual = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(ropes.get("full_attention", ropes)["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    writer = gguf.GGUFWriter(file, family)
    for name, value in (usual | said).items():
        if value is not None:
            adders = {
                str: writer.add_string,
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
            }
            is_sampling = name.startswith("general.sampling.")
            adders[int] = writer.add_int32 if is_sampling else writer.add_uint32
            adders[type(value)](name if is_sampling else f"{family}.{name}", value)
    if freqs is not None:
        plain = 5e5 ** -(torch.arange(4) / 4)
        rope = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
        scaled = frequencies(rope, {"head_dim": 8})[0] if freqs is True else plain / freqs
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    for length in ("long", "short") if "long_factor" in ropes else ():
        factors = torch.tensor(ropes[f"{length}_factor"], dtype=torch.float32)
        writer.add_tensor(f"rope_factors_{length}.weight", factors.numpy())
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(
        ["<end>", *(chr(0x100 + id) for id in range(2, config["vocab_size"])), "ĂĂ"]
    )
    writer.add_token_merges(["Ă Ă"])
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    for name, weight in tensors_of(model, family, config):
        if without not in name:
            numbers, its = (
                weight.contiguous().numpy(),
                gguf.GGMLQuantizationType[kind if is_matrix(name, weight) else "F32"],
            )
            writer.add_tensor(
                _held(name, family, config), gguf.quantize(numbers, its), raw_dtype=its
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors_of(
    model: Path, family: str, config: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a tiny model in llama.cpp's form, with transformers' names.

    The gate and up matrices of experts are separate.
    """
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in AutoModelForCausalLM.from_pretrained(model).state_dict().items():
        if config["tie_word_embeddings"] and name.startswith("lm_head"):
            continue
        count = heads.get(name.split(".")[-2])
        if count is not None and family in ("llama", "granite", "smollm3"):
            weight = weight.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            weight = weight + 1  # as they are applied
        stem, part, bias = (
            name.partition(".experts.")[0],
            name.rpartition(".")[2],
            "_bias" * name.endswith("_bias"),
        )
        kind = "bias" if bias else "weight"
        if family == "gpt-oss" and ".experts." in name and not bias:
            weight = weight.mT
        if part == f"gate_up_proj{bias}" and ".experts." in name:
            halves = (
                (weight[:, 0::2], weight[:, 1::2])
                if family == "gpt-oss"
                else weight.chunk(2, dim=1)
            )
            for its, half in zip(("gate_proj", "up_proj"), halves, strict=True):
                yield f"{stem}.experts.{its}.{kind}", half
        elif ".experts." in name:
            yield f"{stem}.experts.down_proj.{kind}", weight
        else:
            yield name, weight


def is_matrix(name: str, weight: torch.Tensor) -> bool:
    return weight.dim() > 1 and not name.endswith(".bias")


def _held(name: str, family: str, config: dict[str, Any]) -> str:
    """Return the name that a weight has in a GGUF file."""
    number = next(number for number, each in gguf.MODEL_ARCH_NAMES.items() if each == family)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    return str(names.get_name(name, try_suffixes=(".weight", ".bias"))) + ".weight" * name.endswith(
        ".sinks"
    )
