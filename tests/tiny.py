"""Tiny Hugging Face checkpoints on disk, made with a fixed seed.

Their classes and files are real, and their weights are random. `tiny_model("llama")` is a directory
that `from_pretrained` loads. All kinds share one byte-level tokenizer, so any two with the same
options can be target and draft of one another.
"""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from pearl.config import ModelConfig
from pearl.models.checkpoints.loading import load_runner

CPU = torch.device("cpu")
SPECIAL = ("<|pad|>", "<|end|>", "<|start|>")
EOS_ID = 1
MERGES = (
    ("t", "h"),
    ("th", "e"),
    ("i", "n"),
    ("Ġ", "the"),
    ("a", "n"),
    ("an", "d"),
    ("Ġ", "a"),
    ("e", "r"),
)
VOCAB_SIZE = len(SPECIAL) + 256 + len(MERGES)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Five times the usual spread: attention then matters, and greedy text is not one token for ever.
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "eos_token_id": EOS_ID,
    "bos_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0, 9.0, 20.0, 40.0],
}
_LONG = {"long_factor": [4.0, 9.0, 20.0]}
_BASE = {"rope_type": "default", "rope_theta": 5e5}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_GEMMA = _SIZES | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4096}
_SHORT = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 8.0,
}
_GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 0,
}
_GEMMA3N = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": [64] * 4,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 1,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
}
_GPT2 = {
    "n_embd": 32,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.1,
    "eos_token_id": EOS_ID,
}
_OPT = _SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.1}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "decoder_start_token_id": 0}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "initializer_range": 0.3}
_WINDOW = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "initializer_range": 0.2,
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
}
_LLAMA4 = {
    "layer_types": ["chunked_attention", "full_attention"],
    "attention_chunk_size": 8,
    "no_rope_layers": [1, 0],
    "head_dim": 8,
    "intermediate_size_mlp": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
}
_NEMOTRON_H = {
    "layers_block_type": ["mamba", "attention"],
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
}
_LATENT = {  # attention of DeepSeek's
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_ROUTED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_FALCON = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
    "eos_token_id": EOS_ID,
}
_FALCON_H1 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
_NEOX = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}
_DORY = {
    "head_dim": 8,
    "num_hidden_layers": 4,
    "n_input_layers": 1,
    "n_output_layers": 1,
    "n_recurrent_loops": 3,
    "initializer_range": 0.18,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_QWEN4 = {
    "layer_types": ["linear_attention", "indexed_attention"],
    "hc_lowrank": 8,
    "ple_layer_ids": [1],
    "ngram_vocab_size_base": 100,
    "heads_per_ngram": 2,
    "split_ngram_parts": 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_SLIDING_LATENT = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "v_head_dim": 8,
}
_DOTS3 = {
    "layer_types": ["indexed_attention", "sliding_attention"],
    "head_dim": 16,
    "shared_experts_intermediate_size": 32,
    "sliding_window": 8,
    "index_topk": 8,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "per_layer_config": {1: _SLIDING_LATENT | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8}},
}
_KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", _SIZES),
    "qwen2": ("Qwen2", _SIZES | {"use_sliding_window": False}),
    "qwen3": ("Qwen3", _SIZES | {"head_dim": 16}),  # heads wider than their share
    "llama-biased": ("Llama", _SIZES | {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("Llama", _SIZES | {"num_key_value_heads": 4}),
    "llama-encoder": ("Llama", _SIZES | {"is_causal": False}),  # its rows depend on later positions
    "llama-tied": ("Llama", _SIZES | {"tie_word_embeddings": True}),
    "llama-long": ("Llama", _SIZES | {"rope_parameters": _LLAMA3_ROPE}),
    "llama-dynamic": (
        "Llama",
        _SIZES | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "phi3-long": (
        "Phi3",
        _SIZES | {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 32},
    ),
    "gpt2": ("GPT2", _GPT2),
    "opt": ("OPT", _OPT),
    "bloom": (
        "Bloom",
        {"hidden_size": 32, "n_head": 4, "initializer_range": 0.1},
    ),  # ALiBi, no position ids
    "mistral": ("Mistral", _SIZES | {"sliding_window": None}),
    "mistral-sliding": ("Mistral", _SIZES | {"sliding_window": 8}),
    "mistral-wide": ("Mistral", _SIZES | {"sliding_window": 64}),
    # Of our own forward, with windows that are short.
    "qwen3-short": ("Qwen3", _SIZES | {"use_sliding_window": True, **_SHORT}),
    "gemma3-short": (
        "Gemma3Text",
        _GEMMA | _SHORT | {"rope_parameters": _GEMMA3_ROPE, "query_pre_attn_scalar": 20},
    ),
    "gemma2-short": (
        "Gemma2",
        _GEMMA
        | _SHORT
        | {
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 20,
        },
    ),
    "olmo2": ("Olmo2", _SIZES | {"rms_norm_eps": 1e-3}),
    "olmo3-short": ("Olmo3", _SIZES | _SHORT),
    "phi3-short": ("Phi3", _SIZES | {"sliding_window": 8, "rope_parameters": _BASE}),
    "smollm3": ("SmolLM3", _SIZES | {"tie_word_embeddings": False, "num_hidden_layers": 4}),
    "smollm3-short": ("SmolLM3", _SIZES | {"no_rope_layers": [1, 0]}),
    "granite-scaled": ("Granite", _SIZES | _MULTIPLIERS),
    "gemma2-wide": ("Gemma2", _SIZES | {"sliding_window": 64, "head_dim": 8}),  # every other layer
    "gemma2-caps": (
        "Gemma2",
        _GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0},
    ),
    "gemma3-linear": ("Gemma3Text", _GEMMA | {"rope_parameters": _GEMMA3_ROPE}),
    "gemma-encoder": ("Gemma", _SIZES | {"head_dim": 8, "use_bidirectional_attention": True}),
    "gemma3-encoder": ("Gemma3Text", _GEMMA | {"use_bidirectional_attention": True}),
    "gemma4": ("Gemma4Text", _GEMMA | {"sliding_window": 64, "global_head_dim": 16, **_GEMMA4}),
    # Its last layer attends to the keys of the one before.
    "gemma4-shared": (
        "Gemma4Text",
        _GEMMA
        | {"sliding_window": 64, "global_head_dim": 16, **_GEMMA4}
        | {"layer_types": ["full_attention", "full_attention"], "num_kv_shared_layers": 1},
    ),
    "phi4-mini": (
        "Phi3",
        _SIZES
        | {"original_max_position_embeddings": 256, "max_position_embeddings": 512}
        | {
            "rope_parameters": _LONGROPE
            | {"partial_rotary_factor": 0.75, "short_factor": [1.1, 1.3, 2], **_LONG}
        },
    ),
    "glm": ("Glm", _SIZES | {"attention_bias": True, "head_dim": 8}),
    "glm4": ("Glm4", _SIZES | {"attention_bias": True, "head_dim": 8}),
    "gemma3n": ("Gemma3nText", _GEMMA | _GEMMA3N),
    "phi3-partial": ("Phi3", _SIZES | {"rope_parameters": _BASE | {"partial_rotary_factor": 0.75}}),
    "stablelm": ("StableLm", _SIZES | {"rope_parameters": _BASE | {"partial_rotary_factor": 1.0}}),
    "minimax-m2": (
        "MiniMaxM2",
        _SIZES | {"head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "doge": ("Doge", _SIZES),
    "qwen3.5": ("Qwen3_5Text", _SIZES | _DELTA),
    "qwen3-next": (
        "Qwen3Next",
        _SIZES | _DELTA | _MOE | {"num_experts": 8, "shared_expert_intermediate_size": 32},
    ),
    "gpt-oss": (
        "GptOss",
        _SIZES
        | _WINDOW
        | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.7},
    ),
    "gpt-oss-plain": (
        "GptOss",
        _SIZES
        | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0}
        | {"sliding_window": 8, "rope_parameters": _BASE},
    ),
    "gemma3": ("Gemma3Text", _GEMMA | _WINDOW | {"tie_word_embeddings": False}),
    "olmo3": ("Olmo3", _SIZES | _WINDOW),
    "llama4": ("Llama4Text", _SIZES | _LLAMA4),
    "lfm2": ("Lfm2", _SIZES | {"layer_types": ["conv", "full_attention"]}),
    "nemotron-h": ("NemotronH", _SIZES | _NEMOTRON_H),
    "qwen3-moe": ("Qwen3Moe", _SIZES | _MOE | {"head_dim": 8, "num_experts": 8}),
    "deepseek-v3": ("DeepseekV3", _SIZES | _MOE | _LATENT | _ROUTED),
    # Its cache cannot be rolled back.
    "deepseek-v4": (
        "DeepseekV4",
        _SIZES
        | _MOE
        | {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "q_lora_rank": 16,
            "o_lora_rank": 16,
            "o_groups": 2,
        }
        | {
            "n_routed_experts": 4,
            "sliding_window": 8,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 64,
        }
        | {"layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"]}
        | {
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
        },
    ),
    # An indexer chooses 8 positions to attend to.
    "deepseek-v3.2": (
        "DeepseekV32",
        _SIZES
        | _MOE
        | _LATENT
        | _ROUTED
        | {"index_topk": 8, "index_n_heads": 16, "index_head_dim": 16},
    ),
    # Three loops over its middle layers, each with keys of its own, or all but the last with the keys of the last.
    "dory": ("Dory", _SIZES | _DORY),
    "dory-last-loop": ("Dory", _SIZES | _DORY | {"recurrent_kv_cache_mode": "last_loop"}),
    "qwen4-exp": ("Qwen4ExpText", _SIZES | _DELTA | _MOE | _QWEN4 | {"num_experts": 8}),
    "dots3-note": ("Dots3NoteText", _SIZES | _MOE | _LATENT | _ROUTED | _DOTS3),
    "glm4-moe": ("Glm4Moe", _SIZES | _MOE | _ROUTED | {"head_dim": 8}),
    "mixtral": ("Mixtral", _SIZES | {"num_local_experts": 4, "sliding_window": None}),
    "granite": ("Granite", _SIZES),
    "phi": ("Phi", _SIZES),
    "falcon": ("Falcon", {**_FALCON, "layer_norm_epsilon": 1e-2}),
    "falcon-h1": ("FalconH1", _SIZES | _FALCON_H1),  # attention and a state in the same layer
    "mamba2": (
        "Mamba2",
        {"hidden_size": 32, "state_size": 8, "num_heads": 8, "head_dim": 8, "chunk_size": 8},
    ),
    "gpt-neox": ("GPTNeoX", _NEOX),
    "mamba": ("Mamba", {"hidden_size": 32, "state_size": 4, "initializer_range": 0.3}),
    "rwkv": ("Rwkv", {"hidden_size": 32, "attention_hidden_size": 32, "context_length": 64}),
    "bert": ("Bert", _SIZES),
    "roberta": ("Roberta", _SIZES | {"is_decoder": True, "pad_token_id": 1}),
    "bart": (
        "Bart",
        {"d_model": 32, "decoder_layers": 3, "decoder_ffn_dim": 64, "decoder_attention_heads": 4},
    ),
    "openai-gpt": ("OpenAIGPT", {"n_embd": 32, "n_head": 4}),
    "t5": ("T5", _T5),
}
_HEADS = {
    "GPT2": "GPT2LMHeadModel",
    "Bert": "BertLMHeadModel",
    "OpenAIGPT": "OpenAIGPTLMHeadModel",
    "T5": "T5ForConditionalGeneration",
    "Qwen3_5Text": "Qwen3_5ForCausalLM",
    "Llama4Text": "Llama4ForCausalLM",
    "Gemma3Text": "Gemma3ForCausalLM",
    "Gemma3nText": "Gemma3nForCausalLM",
    "Gemma4Text": "Gemma4ForCausalLM",
    "Qwen4ExpText": "Qwen4ExpForCausalLM",
    "Dots3NoteText": "Dots3NoteForCausalLM",
}

_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_CLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_PIXTRAL = _CLIP | {"model_type": "pixtral", "head_dim": 8}
_VIT = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
}
_VIT3 = _VIT | {"num_position_embeddings": 16}
_VIT2 = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}
_LLAMA4_VISION = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
# Model type -> the start of its classes' names, its language model and its encoder.
_WRAPPERS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "gemma3": ("Gemma3", _GEMMA | _SHORT | {"rope_parameters": _GEMMA3_ROPE}, _CLIP),
    "llama4": ("Llama4", _SIZES | _LLAMA4, _CLIP | _LLAMA4_VISION),
    "llava": (
        "Llava",
        _SIZES | {"model_type": "llama"},
        _CLIP | {"model_type": "clip_vision_model"},
    ),
    "mistral3": (
        "Mistral3",
        _SIZES | {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        _PIXTRAL,
    ),
    "qwen2_vl": ("Qwen2VL", _SIZES | {"rope_parameters": _MROPE}, _VIT2),
    "qwen2_5_vl": ("Qwen2_5_VL", _SIZES | {"rope_parameters": _MROPE}, _VIT),
    "qwen3_vl": (
        "Qwen3VL",
        _SIZES | {"head_dim": 8, "rope_parameters": _MROPE | {"mrope_interleaved": True}},
        _VIT3 | {"deepstack_visual_indexes": [0]},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        _SIZES
        | _MOE
        | {
            "head_dim": 8,
            "num_experts": 4,
            "moe_intermediate_size": 48,
            "rope_parameters": _MROPE | {"mrope_interleaved": True},
        },
        _VIT3 | {"deepstack_visual_indexes": [0]},
    ),
    "qwen3_5": ("Qwen3_5", _SIZES | _DELTA, _VIT3),
    "gemma4": (
        "Gemma4",
        _GEMMA | {"sliding_window": 64, "global_head_dim": 16, **_GEMMA4},
        _CLIP | {"head_dim": 8},
    ),
}


@functools.cache
def tiny_wrapper(kind: str, seed: int = 0) -> Path:
    """Return the directory of a tiny model that also reads pictures, without a tokenizer.

    `kind`: the model type.
    """
    directory = _session_directory() / f"wrapper-{kind}-{seed}"
    name, text, vision = _WRAPPERS[kind]
    sizes = text | {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2}
    config = getattr(transformers, f"{name}Config")(text_config=sizes, vision_config=vision)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        getattr(transformers, f"{name}ForConditionalGeneration")(config).save_pretrained(directory)
    return directory


@functools.cache
def tiny_model(
    kind: str = "llama",
    *,
    seed: int = 0,
    noise: float = 0.0,
    layers: int = 2,
    vocab_size: int = VOCAB_SIZE,
    dtype: str = "float32",
    chat: bool = False,
) -> Path:
    """Return the directory of a tiny model with tokenizer, which is made once per session.

    Args:
        noise: disturbs the weights by this share of their standard deviation. The result is a draft
            that often agrees with the model of the same seed.
        vocab_size: if larger than the tokenizer's, there are padding ids.
        chat: whether the tokenizer has a chat template.
    """
    directory = _session_directory() / f"{kind}-{seed}-{noise}-{layers}-{vocab_size}-{dtype}-{chat}"
    model = _random_model(kind, seed, layers, vocab_size)
    _disturb(model, noise)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    tiny_tokenizer(chat).save_pretrained(directory)
    return directory


def on_cpu(model: Path | str, **options: Any) -> Any:
    """Return a runner of a model on the CPU.

    `options`: arguments of `load_runner` and of `ModelConfig`.
    """
    own = {name: options.pop(name) for name in ("progress", "features", "spare") if name in options}
    return load_runner(ModelConfig(str(model), **options), CPU, **own)


def changed_model(into: Path, kind: str = "llama", *, noise: float = 0.0, **changed: Any) -> Path:
    """Copy a tiny model, and change these settings in its config.json.

    The value `...` removes a setting.
    """
    shutil.copytree(tiny_model(kind, noise=noise), into)
    config = json.loads((into / "config.json").read_text()) | changed
    (into / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not ...})
    )
    return into


def _random_model(
    kind: str, seed: int, layers: int, vocab_size: int
) -> transformers.PreTrainedModel:
    family, sizes = _KINDS[kind]
    if "layers_block_type" not in sizes:  # which has their number
        sizes = {"num_hidden_layers": layers, **sizes}
    config = getattr(transformers, f"{family}Config")(vocab_size=vocab_size, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, _HEADS.get(family, f"{family}ForCausalLM"))(config)
        for name, weight in model.named_parameters() if family == "GptOss" else ():
            if name.endswith("bias"):  # which begin as zeros
                torch.nn.init.normal_(weight, std=0.3)
        return model


@torch.no_grad()
def _disturb(model: transformers.PreTrainedModel, noise: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if noise and weight.ndim == 2:
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)


def tiny_tokenizer(chat: bool = False) -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, in which any text survives encoding and decoding.

    A character beyond ASCII takes several tokens.
    """
    pieces = [
        *SPECIAL,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *("".join(pair) for pair in MERGES),
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=list(MERGES))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1]
    )
    if chat:
        wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def irregular(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return normal random numbers [count, width], the same in every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, width, generator=generator).to(dtype)


@functools.cache
def _session_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="pearl-tiny-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def attended(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sees: torch.Tensor,
    scale: float,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention by its definition; return [n, heads * dim].

    Args:
        queries: [n, heads, dim].
        keys, values: [kv_heads, positions, dim].
        sees: [n, positions], whether a query sees a position.
        cap: soft cap of the scores; 0 for none.
        sinks: [heads], a score that takes part in the softmax without a value.
    """
    keys, values = (
        each.float().repeat_interleave(queries.shape[1] // len(keys), 0) for each in (keys, values)
    )
    scores = torch.einsum("nhd,hpd->hnp", queries, keys) * scale
    scores = (cap * torch.tanh(scores / cap) if cap else scores).masked_fill(~sees, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(queries), 1)), -1)
    return torch.einsum("hnp,hpd->nhd", scores.softmax(-1)[..., : sees.shape[1]], values).flatten(1)


def random_llama(context: int, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(
        num_hidden_layers=2,
        vocab_size=256,
        max_position_embeddings=context,
        initializer_range=0.1,
        **sizes,
    )
    return LlamaForCausalLM(config).to(dtype)  # type: ignore[arg-type]
