"""Layers for multi-token prediction, from their published layouts, as heads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, modeling_layers

from pearl.config import SamplingParams
from pearl.engine import Engine
from pearl.errors import ModelError
from pearl.models.heads.loading import load_head, states_for
from pearl.models.runner import feed_chain
from tests.tiny import changed_model, on_cpu, tiny_model

pytestmark = pytest.mark.skipif(
    not hasattr(getattr(modeling_layers, "MtpModel", None), "forward_layer"),
    reason="needs a newer transformers",
)
TEXT = [5, 40, 7, 93, 11, 12, 200, 3, 17, 60, 61, 5, 40]
# In DeepSeek's and GLM's checkpoints it is the layer behind the last one; in Qwen's it has names of its own.
LAYOUTS = {
    "deepseek-v3": ("model.layers.2", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "glm4-moe": ("model.layers.2", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "qwen3-next": ("mtp.layers.0", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
}


def with_layer(kind: str, into: Path) -> tuple[Path, list[torch.Tensor]]:
    """A tiny model whose layer for multi-token prediction is a copy of its last layer; weights of the parts around it,
    as in `LAYOUTS`.
    """
    block, *names = LAYOUTS[kind]
    changed_model(into, kind, num_nextn_predict_layers=... if block.startswith("mtp") else 1)
    weights = load_file(into / "model.safetensors")
    weights |= {
        name.replace("model.layers.1", block): weight.clone()
        for name, weight in weights.items()
        if name.startswith("model.layers.1.")
    }
    random = torch.Generator().manual_seed(7)
    parts = [torch.rand(32, generator=random) for _ in range(3)]
    parts.insert(2, torch.randn(32, 64, generator=random) * 0.2)
    prefix = "mtp" if block.startswith("mtp") else block
    weights |= {f"{prefix}.{name}.weight": part for name, part in zip(names, parts, strict=True)}
    save_file(weights, into / "model.safetensors", {"format": "pt"})
    return into, parts


def reference(
    model: Any, parts: list[torch.Tensor], ids: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """Outputs [n, hidden] for tokens [n] and the states before each, by the definition."""
    norms = []
    for part in (parts[0], parts[1], parts[3]):
        norms.append(type(model.model.norm)(32, eps=model.config.rms_norm_eps))
        norms[-1].weight.copy_(part)
    x = (
        torch.cat((norms[0](model.model.embed_tokens(ids)), norms[1](states)), -1)[None]
        @ parts[2].T
    )
    turns = model.model.rotary_emb(x, position_ids=torch.arange(1, len(ids) + 1)[None])
    found: torch.Tensor = norms[2](
        model.model.layers[-1](x, position_embeddings=turns, attention_mask=None)
    )[0]
    return found


@pytest.mark.parametrize("kind", LAYOUTS)
def test_it_computes_its_definition(kind: str, tmp_path: Path) -> None:
    path, parts = with_layer(kind, tmp_path / "model")
    assert states_for([str(path)], str(path), lambda what: None) == "last"
    own: Any = on_cpu(path, features="last", dtype="float32")
    head = load_head(str(path), own, lambda what: None)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.tensor(TEXT)
    with torch.inference_mode():
        hidden = model.model(ids[None]).last_hidden_state[0]
        feed_chain(own, TEXT[:5], 1, prompt=True)
        torch.testing.assert_close(own.features(), hidden[:5], rtol=1e-4, atol=1e-4)
        own.rollback(4)
        feed_chain(own, TEXT[4:], 2)
        torch.testing.assert_close(own.features(), hidden[4:], rtol=1e-4, atol=1e-4)
        wanted = reference(model, parts, ids[1:9], hidden[:8])
        outputs = head.read(ids[1:9], head.fused(hidden[:8]), 0)
        torch.testing.assert_close(outputs, wanted, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(
            head.logits(outputs), model.lm_head(wanted), rtol=1e-3, atol=1e-4
        )
        again = head.read(ids[9:10], outputs[-1:], 0)
        further = reference(model, parts, ids[1:10], torch.cat((hidden[:8], wanted[-1:])))
        torch.testing.assert_close(again, further[-1:], rtol=1e-3, atol=1e-4)
        head.lengths[0] = 5
        torch.testing.assert_close(
            head.read(ids[6:9], hidden[5:8], 0), wanted[5:], rtol=1e-3, atol=1e-4
        )


def test_logits_are_scaled_as_the_target_s(tmp_path: Path) -> None:
    """Inkling divides the states before its output head by a number: guesses were drawn as if there were none."""
    path, _ = with_layer("glm4-moe", tmp_path / "model")
    head: Any = load_head(str(path), on_cpu(path, features="last", dtype="float32"), print)
    states = torch.randn(3, 32)
    with torch.inference_mode():
        plain = head.logits(states)
        head._model.config.logits_mup_width_multiplier = 4.0
        torch.testing.assert_close(head.logits(states), plain / 4)


def test_no_text_changes(tmp_path: Path) -> None:
    path, _ = with_layer("glm4-moe", tmp_path / "model")
    with Engine(str(path), "none", head=str(path)) as engine:
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, max_tokens=24, seed=3, ignore_eos=True)
            found = [
                [
                    one.tokens
                    for one in engine.generate(
                        ["Write a", "What is"], params, method=method, rule="coupled"
                    )
                ]
                for method in ("ar", "head")
            ]
            assert found[0] == found[1]


def test_a_target_without_such_a_layer_is_refused() -> None:
    path = str(tiny_model("glm4-moe"))
    own = on_cpu(path, features="last")
    with pytest.raises(ModelError, match="has no layer for multi-token prediction"):
        load_head(path, own, lambda what: None)
