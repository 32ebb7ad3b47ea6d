"""Random Llamas of the shapes of published models, for timing: the duration of a forward does not depend on weights.

And tiny models of other families, for comparing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

# As published: hidden size, inner size, layers, heads, key-value heads, vocabulary. Of some only a few layers.
SHAPES = {
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "7b": (4096, 11008, 32, 32, 32, 32000),
    "7b-4-layers": (4096, 11008, 4, 32, 32, 32000),
    "13b": (5120, 13824, 40, 40, 40, 32000),
    "70b-4-layers": (8192, 28672, 4, 64, 8, 32000),
    "tiny": (64, 128, 2, 4, 2, 512),
    "tiny-8-layers": (64, 128, 8, 4, 2, 512),
}
_WINDOW = {"sliding_window": 70, "layer_types": ["sliding_attention", "full_attention"]}
# Each with what Llama does not have; of experts all are chosen, for no rounding may choose others.
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma2": {**_WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "Gemma3Text": _WINDOW,
    "Olmo2": {},
    "Granite": {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 2.0,
    },
    "Glm4": {"partial_rotary_factor": 0.5},
    "GptOss": {**_WINDOW, "num_local_experts": 2, "num_experts_per_tok": 2, "swiglu_limit": 0.5,
               "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}  # fmt: skip
_TINY: dict[str, Any] = {
    "vocab_size": 1000, "pad_token_id": 0, "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
_SPREAD = 1.28  # of a weight, times the root of the hidden size: 0.02 at 4,096; with less attention would be even
_END = "<end>"


def random_model(
    shape: str, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> PreTrainedModel:
    """A Llama of that shape. The same seed gives the same weights on one kind of device."""
    hidden, inner, layers, heads, kv_heads, vocab = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
        dtype=dtype,
        eos_token_id=0,
        bos_token_id=None,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(config.dtype)  # type: ignore[arg-type]
    model.to_empty(device=device)
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=_SPREAD / hidden**0.5, generator=generator)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.ones_(weight)
    return model.eval()


def random_family(name: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A tiny model of one of `FAMILIES`; the same weights each time."""
    config = getattr(transformers, f"{name}Config")(**_TINY | FAMILIES[name])
    # Of transformers' ways those that take caps, sinks and any dtype.
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **plain).to(dtype)
    generator = torch.Generator().manual_seed(0)
    for key, weight in model.named_parameters():
        is_small = (
            weight.dim() == 1 or "bias" in key
        )  # norms and biases, which begin as ones and zeros
        spread = 0.1 if is_small else _SPREAD / _TINY["hidden_size"] ** 0.5
        torch.nn.init.normal_(
            weight, float(is_small and "norm" in key), spread, generator=generator
        )
    random: PreTrainedModel = model.to(device).eval()
    return random


def save_pair(
    shape: str, share: float, into: Path, device: torch.device, dtype: torch.dtype, eps: float
) -> None:
    """Save a pair whose draft is the first layers of its target, as `into`/target and `into`/draft.

    Args:
        share: of the target's layers that the draft has.
        eps: scale of the output of the target's other layers; with 0 the draft is never wrong.
    """
    model = random_model(shape, device, dtype)
    count = round(share * len(model.model.layers))
    with torch.no_grad():
        for layer in model.model.layers[count:]:
            layer.self_attn.o_proj.weight.mul_(eps)
            layer.mlp.down_proj.weight.mul_(eps)
    tokenizer = _tokenizer(model.config.vocab_size)
    for name in ("target", "draft"):
        if name == "draft":
            model.model.layers = model.model.layers[:count]
            model.config.num_hidden_layers = count
        model.save_pretrained(into / name)
        tokenizer.save_pretrained(into / name)


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Bytes, and names for all other token ids."""
    pieces = [_END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"<{number}>" for number in range(len(pieces), vocab_size)]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END)
