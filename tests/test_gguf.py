"""GGUF files: what is converted is the model that the file describes, or it is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from pearl.errors import ModelError
from pearl.models.direct import llama3_frequencies
from pearl.models.llama import LlamaRunner
from pearl.models.loading import load_runner
from pearl.models.matrices import multiplies_bf16
from pearl.models.runner import feed_chain
from pearl.models.tokenizer import load_tokenizer
from tests.runner_contract import close, some_tokens
from tests.tiny import tiny_model

CPU = torch.device("cpu")
AUTOMATIC = torch.bfloat16 if multiplies_bf16() else torch.float32  # of a file that is converted to bfloat16


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEARL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "converted"


def test_a_gguf_file_gives_the_same_model(tmp_path: Path, cache: Path) -> None:
    """It is converted, for each dtype once; an unnamed dtype is bfloat16."""
    file = tmp_path / "tiny.gguf"
    _write_gguf(file)
    runner = load_runner(str(file), device=CPU, dtype="float32", max_context=64)
    tokens = some_tokens(runner, 9)
    close(feed_chain(runner, tokens, 9), feed_chain(load_runner(str(tiny_model()), device=CPU), tokens, 9))
    automatic = load_runner(str(file), device=CPU, max_context=64)
    assert isinstance(automatic, LlamaRunner)
    assert automatic.dtype == AUTOMATIC
    made = sorted(path.name for path in cache.iterdir() if path.is_dir())
    assert [name.rpartition("-")[2] for name in made] == ["bfloat16", "float32"]
    tokenizer, defaults = load_tokenizer(str(file))
    assert (tokenizer.token(0), defaults.eos) == ("<end>", (0,))
    messages: list[str] = []
    load_runner(str(file), device=CPU, dtype="float32", max_context=64, progress=messages.append)
    assert messages == [f"loading {file}"]


LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what a file says, and what a config.json would
    "linear": ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "yarn": (
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_beta_fast": 16.0,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
    ),
    "llama3": ({"freqs": True}, {"rope_type": "llama3", **LLAMA3}),
    "none": ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}),
}


@pytest.mark.parametrize("kind", SCALED)
def test_the_rope_of_a_gguf_file_is_scaled_as_it_says(tmp_path: Path, cache: Path, kind: str) -> None:
    """It was not, for transformers drops it: of Llama 3.1 and 3.2, of what was made for longer texts by yarn."""
    said, rope = SCALED[kind]
    config = json.loads((tiny_model() / "config.json").read_text())
    config["rope_parameters"] = rope | {"rope_theta": 5e5}
    shutil.copytree(tiny_model(), plain := tmp_path / "plain")
    (plain / "config.json").write_text(json.dumps(config))
    _write_gguf(file := tmp_path / "tiny.gguf", plain, **said)
    runner, wanted = (load_runner(str(path), device=CPU, dtype="float32") for path in (file, plain))
    assert type(runner) is type(wanted)
    tokens = some_tokens(runner, 60)
    close(feed_chain(runner, tokens, 60), feed_chain(wanted, tokens, 60))


FAMILIES: dict[str, dict[str, Any]] = {  # what files of them say that transformers does not read
    "gemma2-caps": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0, "attention.key_length": 8},
    "gemma3-linear": {"attention.key_length": 8, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    "phi3-partial": {"rope.dimension_count": 6, "attention.sliding_window": 0},
    "stablelm": {"rope.dimension_count": 8},
    "starcoder2": {},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_gguf_file_of_another_family_gives_the_same_model(tmp_path: Path, cache: Path, kind: str) -> None:
    """Base and share of its rope, soft caps and the scale of its scores were those that the family usually has."""
    _write_gguf(file := tmp_path / "tiny.gguf", tiny_model(kind), family=kind.partition("-")[0], **FAMILIES[kind])
    runner, wanted = (load_runner(str(path), device=CPU, dtype="float32") for path in (file, tiny_model(kind)))
    tokens = some_tokens(runner, 60)
    close(feed_chain(runner, tokens, 60), feed_chain(wanted, tokens, 60))


def test_the_window_of_a_gguf_file_is_kept(tmp_path: Path, cache: Path) -> None:
    """Phi-3's was dropped: longer texts went wrong."""
    said = {**FAMILIES["phi3-partial"], "attention.sliding_window": 32}
    _write_gguf(file := tmp_path / "tiny.gguf", tiny_model("phi3-partial"), family="phi3", **said)
    assert load_runner(str(file), device=CPU, max_context=32).context == 32
    with pytest.raises(ModelError, match=r"Phi3ForCausalLM.*max_context 32"):
        load_runner(str(file), device=CPU)


UNKEPT = [
    {"rope.scaling.type": "longrope"},
    {"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 0.5},
    {"freqs": 3},
    {"without": "up_proj"},
    {"model": "llama-mha", "attention.head_count_kv": None},
    {"attention.sliding_window": 64},
    {"family": "qwen2", "rope.dimension_count": 4, "without": "bias"},
    {"model": "llama-biased"},
]


@pytest.mark.parametrize("said", UNKEPT, ids=lambda said: "-".join(said))
def test_a_gguf_file_that_cannot_be_kept_whole_is_refused(tmp_path: Path, cache: Path, said: dict[str, Any]) -> None:
    model = tiny_model(said.get("model", said.get("family", "llama")))
    _write_gguf(file := tmp_path / "tiny.gguf", model, **{name: said[name] for name in said if name != "model"})
    with pytest.raises(ModelError, match=r"its rope|in no file|how many heads|a window of 64|512 of its weights"):
        load_runner(str(file), device=CPU)


def test_a_damaged_gguf_file_is_a_model_error(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "tiny.gguf"
    _write_gguf(file)
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(ModelError, match=r"tiny\.gguf' could not be loaded"):
        load_runner(str(file), device=CPU)
    assert not [path for path in cache.iterdir() if path.is_dir()]


def _write_gguf(
    file: Path, model: Path | None = None, without: str = " ", family: str = "llama", freqs: Any = None, **said: Any
) -> None:
    """A tiny model in llama.cpp's naming, float32; a Llama's q and k rows interleaved as its rotation wants.

    `said`: besides what the configuration says, or in its place; None is left out. `freqs`: the rope is scaled by a
    tensor, that of Llama 3.2 or one with these numbers.
    """
    model = model or tiny_model()
    config = json.loads((model / "config.json").read_text())
    ropes = config["rope_parameters"]
    epsilons = {name: value for name, value in config.items() if name.endswith(("norm_eps", "norm_epsilon"))}
    usual = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        f"attention.layer_norm{'_rms' * ('rms_norm_eps' in epsilons)}_epsilon": next(iter(epsilons.values())),
        "rope.freq_base": float(ropes.get("full_attention", ropes)["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    writer = gguf.GGUFWriter(file, family)
    for name, value in (usual | said).items():
        if value is not None:
            add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
            add(f"{family}.{name}", value)
    if freqs is not None:
        plain = 5e5 ** -(torch.arange(4) / 4)
        scaled = llama3_frequencies(plain, LLAMA3) if freqs is True else plain / freqs
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<end>", *(chr(0x100 + id) for id in range(2, config["vocab_size"])), "ĂĂ"])
    writer.add_token_merges(["Ă Ă"])
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    for name, weight in AutoModelForCausalLM.from_pretrained(model).state_dict().items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        if without in name or (config["tie_word_embeddings"] and name.startswith("lm_head")):
            continue
        count = heads.get(name.split(".")[-2])
        if count is not None and family == "llama":
            rows = len(weight)
            weight = weight.view(count, 2, rows // count // 2, -1).transpose(1, 2).reshape(weight.shape)
        if family.startswith("gemma") and "norm" in name:
            weight = weight + 1  # as they are applied
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
