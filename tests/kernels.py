"""Small models for our GPU kernels in Triton's interpreter.

A test module that imports this one is skipped where there is no Triton, or where there is a GPU.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from pearl.execution import pair
from pearl.models.cpu.runner import CpuRunner
from pearl.models.feeds import Feed
from pearl.models.forward.layers import DecoderLayers, Rope
from pearl.models.forward.runner import ForwardRunner
from pearl.models.forward.slot_attention import TorchAttention
from pearl.models.forward.slots import Slots
from pearl.models.gpu.recordings import Record, Rows, not_recorded
from pearl.models.gpu.row_table import SIZES
from pearl.models.gpu.runner import KernelRunner
from pearl.protocol.messages import Submit

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip(
        "these are for the interpreter; test_forward_runner has the GPU's", allow_module_level=True
    )
assert os.environ["TRITON_INTERPRET"] == "1"  # set by conftest

import tests.interpreter  # noqa: E402, F401

ROWS = SIZES[0]
# Tests that use `shared("one layer")` run on one of the workers, where it is made once.
ONE_LAYER = pytest.mark.xdist_group("one layer")
FULL_TABLE = torch.ones(1 + 3 * ROWS, dtype=torch.long)  # every row is needed

SMALL: dict[str, Any] = {
    "vocab_size": 90,
    "pad_token_id": 0,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
_ONE = {"num_hidden_layers": 1}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "initializer_range": 0.3,
}
_MIXTRAL = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
    "sliding_window": None,
}
_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
    "swiglu_limit": 0.5,
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
WINDOWS = "windows, caps, gelu, norms behind"
_WINDOW = {"sliding_window": 70, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "one layer": ("Llama", _ONE),
    "biases, three query heads a key": (
        "Qwen2",
        _ONE | {"num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "norms of queries and keys, a key a query head": (
        "Qwen3",
        _ONE | {"num_key_value_heads": 4, "rms_norm_eps": 1e-3},
    ),
    "biases of all matrices, heads of no power of two": (
        "Llama",
        _ONE | {"mlp_bias": True, "attention_bias": True, "head_dim": 24, "intermediate_size": 80},
    ),
    WINDOWS: (
        "Gemma2",
        _WINDOW | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "two rotations": ("Gemma3Text", _WINDOW | {"vocab_size": 90}),
    "norms behind only, and over all heads": ("Olmo2", _ONE),
    "multipliers": (
        "Granite",
        _ONE
        | {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
        },
    ),
    "a layer without rotation": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "partial rotation in pairs": ("Glm4", _ONE | {"partial_rotary_factor": 0.5}),
    "mistral": ("Mistral", _ONE | {"sliding_window": 70}),
    "mixtral": ("Mixtral", _ONE | _MIXTRAL),
    "olmo3": ("Olmo3", _WINDOW),
    "phi3": ("Phi3", _ONE | {"sliding_window": None}),
    "glm": ("Glm", _ONE | {"partial_rotary_factor": 0.5}),
    "experts": ("Qwen3Moe", _ONE | _MOE),
    "experts with biases, windows and sinks": (
        "GptOss",
        _ONE | _OSS | {"sliding_window": 70} | _ROPE,
    ),
}


@pytest.fixture(scope="module", autouse=True)
def no_prompts() -> Iterator[None]:
    """Compute prompts with torch, because our kernels for prompts take seconds to check.

    test_prompt_kernels tests these kernels.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pearl.models.gpu.prefill.Prompts", TorchPrompts)
        patch.setattr("pearl.models.gpu.token_forward.CHECKED", 70)  # two parts, not three
        yield


class TorchPrompts:
    """Computes prompts with torch's operations, in place of our kernels for prompts."""

    def __init__(
        self, layers: DecoderLayers, slots: Slots, ropes: Mapping[str, Rope], record: Record
    ) -> None:
        self.layers, self.slots, self.ropes = layers, slots, ropes

    def problem(self) -> str:
        return ""

    def forward(self, feed: Feed) -> Rows:
        start, count = self.slots.lengths[feed.slot], len(feed.tokens)
        self.slots.wrote(feed.slot, start + count)
        attends = TorchAttention(self.slots, feed.slot, start, self.layers.scoring)
        hidden = self.layers.hidden_states(torch.as_tensor(feed.tokens), self.ropes, attends)
        return self.layers.logits(hidden[count - feed.rows :]), self.layers.features


def model_of(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    family, other = MODELS[name]
    name_of = {"Gemma3Text": "Gemma3ForCausalLM"}.get(family, f"{family}ForCausalLM")
    config = getattr(transformers, f"{family}Config")(**SMALL | other)
    model = getattr(transformers, name_of)(config).eval()
    for key, weight in model.named_parameters():
        if weight.dim() == 1 or "bias" in key:  # norms and biases, which begin as ones and zeros
            torch.nn.init.normal_(weight, mean=float("norm" in key), std=0.3)
    return model  # type: ignore[no-any-return]


def runner_of(
    name: str, kernels: bool = True, context: int = 600, record: Record = not_recorded
) -> ForwardRunner:
    """Return a runner with our GPU kernels; without `kernels`, a runner in C."""
    if kernels:
        return KernelRunner(model_of(name), context, slots=3, record=record)
    return CpuRunner(model_of(name), context, slots=3)


@cache
def shared(name: str, kernels: bool = True) -> ForwardRunner:
    """Return a runner that several tests share; making one with our kernels takes seconds."""
    return runner_of(name, kernels)


def decoded(submit: Submit, *runners: ForwardRunner) -> list[int]:
    """Return the text that a target decodes, together with a draft if a second runner is given."""
    return [token for committed in pair.decode(submit, *runners) for token in committed.tokens]


def text(count: int, start: int = 0) -> tuple[int, ...]:
    return tuple((7 * i + 3 * i * i + start) % 90 for i in range(count))


def fed_both(runners: Sequence[ForwardRunner], *feeds: Feed) -> list[torch.Tensor]:
    """Return the first runner's logits, after checking that all other runners' logits are close."""
    found, *others = ([rows.clone() for rows in runner.forward(feeds)] for runner in runners)
    for other in others:
        for some, rows in zip(found, other, strict=True):
            torch.testing.assert_close(some, rows, rtol=1e-4, atol=1e-5)
    return found
