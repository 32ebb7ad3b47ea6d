"""Our forward of tiny models, recorded as a GPU records it."""

from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM

from pearl.models.forward.runner import ForwardRunner
from tests.tiny import tiny_model

KINDS = (
    *(
        "llama",
        "llama-biased",
        "llama-tied",
        "llama-long",
        "mistral",
        "qwen2",
        "qwen3",
        "mistral-sliding",
        "olmo2",
    ),
    *(
        "qwen3-short",
        "gemma3-short",
        "olmo3-short",
        "phi3-short",
        "smollm3-short",
        "granite-scaled",
    ),
    *("qwen3-moe", "mixtral", "gemma2-short", "gpt-oss", "phi4-mini", "glm", "glm4"),
)


def into_one_buffer(work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """As a graph: each replay writes its logits where those of the last stand."""
    kept = work()[0].clone()
    return lambda: (kept.copy_(work()[0]), None)


def replayed(kind: str, dtype: str = "float32") -> ForwardRunner:
    """Whose forwards of few tokens are those that a GPU records; here they are carried out each time."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype=getattr(torch, dtype))
    return ForwardRunner(model, 64, record=into_one_buffer)
