"""Models that read pictures too: their language model alone has the logits of the whole, and runs as any other."""

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pearl.config import ModelConfig
from pearl.models.checkpoints.loading import WRAPPERS, language_model_of, load_model
from pearl.models.forward.runner import ForwardRunner
from pearl.models.runner import feed_chain
from tests.runner_contract import close
from tests.tiny import CPU, on_cpu, tiny_model, tiny_wrapper

WHOLE = [kind for kind in WRAPPERS if kind != "gemma3n"]  # whose encoder of pictures is timm's
OURS = [kind for kind in WHOLE if kind not in ("llama4", "qwen3_5", "gemma4")]
PROMPT = [20, 30, 40, 50, 21, 31, 41, 51, 22, 32, 42]


@cache
def whole(kind: str) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(tiny_wrapper(kind)).eval()


def logits_of_text(kind: str, ids: torch.Tensor) -> torch.Tensor:
    """By the whole model's parts: Llama 4's own forward takes no text without a picture."""
    model = whole(kind)
    if kind == "llama4":
        return model.language_model(input_ids=ids).logits
    return model(input_ids=ids).logits


@pytest.mark.parametrize("kind", WHOLE)
def test_logits_are_those_of_the_whole_and_one_line_says_what_is_loaded(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pearl"):
        runner = on_cpu(tiny_wrapper(kind))
    (line,) = [
        record.getMessage()
        for record in caplog.records
        if "language model alone" in record.getMessage()
    ]
    assert kind in line
    assert isinstance(runner, ForwardRunner) == (kind in OURS)
    with torch.inference_mode():
        expected = logits_of_text(kind, torch.tensor([PROMPT]))[0]
    close(feed_chain(runner, PROMPT, len(PROMPT)), expected)
    runner.rollback(4)
    close(
        torch.cat([feed_chain(runner, PROMPT[4:9], 5), feed_chain(runner, PROMPT[9:], 2)]),
        expected[4:],
    )


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("is_tied", [False, True])
def test_names_of_either_version_and_heads_of_their_own(
    prefix: str, is_tied: bool, tmp_path: Path
) -> None:
    """A head that is not the embedding is kept, whatever the configuration says."""
    weights = load_file(tiny_wrapper("gemma3") / "model.safetensors")
    named = {
        name.replace("language_model.model.", prefix): value for name, value in weights.items()
    }
    head = weights["language_model.model.embed_tokens.weight"] * (1 if is_tied else 2)
    named["lm_head.weight" if prefix.startswith("model") else "language_model.lm_head.weight"] = (
        head
    )
    save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((tiny_wrapper("gemma3") / "config.json").read_bytes())
    model = load_model(ModelConfig(str(tmp_path)), CPU)
    assert torch.equal(model.lm_head.weight, head)
    assert feed_chain(on_cpu(tmp_path), PROMPT, 1).isfinite().all()


def rewritten(kind: str, directory: Path) -> Path:
    """As its publisher wrote it: names before transformers 5, and Qwen's without a part for the language model."""
    config = json.loads((tiny_wrapper(kind) / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    if kind == "gemma3":
        full, sliding = rope["full_attention"], rope["sliding_attention"]
        text |= {
            "rope_scaling": {"factor": full["factor"], "rope_type": "linear"},
            "rope_theta": full["rope_theta"],
        }
        text |= {"rope_local_base_freq": sliding["rope_theta"]}
        config["text_config"] = text
    else:
        section = {"mrope_section": rope["mrope_section"]}
        config = (
            text
            | config
            | {"rope_scaling": {"type": "mrope", **section}, "rope_theta": rope["rope_theta"]}
        )
    config["torch_dtype"] = config.pop("dtype")
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").symlink_to(tiny_wrapper(kind) / "model.safetensors")
    return directory


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_vl", "qwen2_5_vl"])
def test_configurations_as_they_were_written_before(kind: str, tmp_path: Path) -> None:
    runner = on_cpu(rewritten(kind, tmp_path))
    assert isinstance(runner, ForwardRunner)
    with torch.inference_mode():
        close(
            feed_chain(runner, PROMPT, len(PROMPT)), logits_of_text(kind, torch.tensor([PROMPT]))[0]
        )


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gemma3-short", "gpt2", "wrapper"])
@pytest.mark.parametrize("forwards", ["auto", "transformers"])
def test_shards_and_tied_heads_on_both_paths(kind: str, forwards: str, tmp_path: Path) -> None:
    directory = tiny_wrapper("gemma3") if kind == "wrapper" else tiny_model(kind)
    whole = (
        transformers.AutoModelForImageTextToText
        if kind == "wrapper"
        else transformers.AutoModelForCausalLM
    )
    whole.from_pretrained(directory).save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    cut, one = (on_cpu(path, forwards=forwards) for path in (tmp_path, directory))
    assert torch.equal(feed_chain(cut, PROMPT, len(PROMPT)), feed_chain(one, PROMPT, len(PROMPT)))


def test_experts_as_qwen_stores_them(tmp_path: Path) -> None:
    """With their inputs first, unlike Qwen3's."""
    directory = tiny_wrapper("qwen3_vl_moe")
    weights = load_file(directory / "model.safetensors")
    turned = {
        name: value.mT.contiguous() if ".experts." in name else value
        for name, value in weights.items()
    }
    save_file(turned, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    stored, plain = (on_cpu(path) for path in (tmp_path, directory))
    assert torch.equal(
        feed_chain(stored, PROMPT, len(PROMPT)), feed_chain(plain, PROMPT, len(PROMPT))
    )


def test_gemma_3n_is_its_language_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("gemma3n")).eval()
    named = {
        name.replace("model.", "model.language_model.", 1): held
        for name, held in model.state_dict().items()
    }
    del named["lm_head.weight"]  # tied
    save_file(
        named | {"model.vision_tower.weight": torch.zeros(3)},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    config = {"model_type": "gemma3n", "dtype": "float32", "text_config": model.config.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.INFO, "pearl"):
        runner = on_cpu(tmp_path)
    assert "language model alone, a gemma3n_text" in caplog.text
    with torch.inference_mode():
        close(feed_chain(runner, PROMPT, len(PROMPT)), model(torch.tensor([PROMPT])).logits[0])


def test_other_models_are_left_to_transformers(tmp_path: Path) -> None:
    config = json.loads((tiny_wrapper("qwen3_vl") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "glm4v"}))
    for directory in (tmp_path, tiny_model()):
        assert language_model_of(str(directory)) is None
