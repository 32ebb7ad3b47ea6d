"""Loads only the language model of a checkpoint that also reads pictures or sound.

Their checkpoints have its weights under `language_model.`, with or without a `model.` before or behind, and those of
encoders beside them, which stay on disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pearl.models.families import TWINS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Model types whose language model has been compared with the whole. Others may store or compute it in their own way.
WRAPPERS = (
    *("gemma3", "gemma3n", "gemma4", "llama4", "llava", "mistral3"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"),
)
# Names in a checkpoint, as patterns -> names in a language model.
LANGUAGE_MODEL = {
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.(model\.)?": "model.",
}


def language_model_of(path: Path) -> PreTrainedConfig | None:
    """The configuration of the language model in the wrapper at `path`; None where it is none of `WRAPPERS`.

    Raises what transformers raises.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if config.model_type not in WRAPPERS or (text := config.get_text_config(decoder=True)) is config:
        return None
    if twin := TWINS.get(text.model_type):
        given = {name: value for name, value in text.to_dict().items() if name != "model_type"}
        rope = {name: value for name, value in given["rope_parameters"].items() if not name.startswith("mrope")}
        has_experts = twin == "qwen3_moe"
        more = {"norm_topk_prob": True} if has_experts else {}  # what its twin may leave undone
        text = AutoConfig.for_model(twin, **{**given, **more, "rope_parameters": rope})
        if has_experts:  # transformers turns stored experts by this name
            text.model_type = config.model_type  # type: ignore[misc]
    text.tie_word_embeddings = config.tie_word_embeddings  # where a head of its own is found, transformers unties it
    text.dtype = text.dtype or config.dtype
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantised
    return text
