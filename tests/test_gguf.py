"""GGUF files: what is converted is the model that the file describes, or it is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig

from pearl.errors import ModelError
from pearl.models.checkpoints import gguf as reading
from pearl.models.checkpoints.direct import llama3_frequencies
from pearl.models.checkpoints.gguf import _ALWAYS, _check_stated, _complete, _complete_window, convert
from pearl.models.checkpoints.loading import load_runner
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.families import GGUF
from pearl.models.forward.matrices import multiplies_bf16
from pearl.models.forward.runner import ForwardRunner
from pearl.models.runner import feed_chain
from tests.conftest import eventually
from tests.runner_contract import close, some_tokens
from tests.test_processes import gone
from tests.tiny import tiny_model

CPU = torch.device("cpu")
USUAL_ROPE = {"rope_type": "default", "rope_theta": 1e4}
AUTOMATIC = torch.bfloat16 if multiplies_bf16() else torch.float32  # of a file that is converted to bfloat16


@pytest.fixture
def child_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEARL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "converted"


@pytest.fixture
def cache(child_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files are converted in this process, which need not import transformers first."""

    def convert_here(file: Path, directory: Path, dtype: str) -> None:
        try:
            reading._convert_here(file, directory, dtype)
        except SystemExit as error:
            raise ModelError(f"Model {str(file)!r} could not be loaded: {error}") from None

    monkeypatch.setattr(reading, "convert", convert_here)
    return child_cache


def test_a_gguf_file_gives_the_same_model(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is converted, for each dtype once; an unnamed dtype is bfloat16."""
    file = tmp_path / "tiny.gguf"
    _write_gguf(file)
    runner = load_runner(str(file), device=CPU, dtype="float32", max_context=64)
    tokens = some_tokens(runner, 9)
    close(feed_chain(runner, tokens, 9), feed_chain(load_runner(str(tiny_model()), device=CPU), tokens, 9))
    monkeypatch.setattr(reading, "convert", convert)  # in a process of its own
    automatic = load_runner(str(file), device=CPU, max_context=64)
    assert isinstance(automatic, ForwardRunner)
    assert automatic.dtype == AUTOMATIC
    made = sorted(path.name for path in cache.iterdir() if path.is_dir())
    assert [name.rpartition("-")[2] for name in made] == ["bfloat16", "float32"]
    tokenizer, defaults = load_tokenizer(str(file))
    assert (tokenizer.token(0), defaults.eos) == ("<end>", (0,))
    messages: list[str] = []
    load_runner(str(file), device=CPU, dtype="float32", max_context=64, progress=messages.append)
    assert messages == [f"loading {file}"]


def test_who_converts_ends_with_who_waits_for_it(tmp_path: Path) -> None:
    """Reading a pipe that nobody writes to, it would stay for ever; and a large file takes minutes."""
    os.mkfifo(tmp_path / "tiny.gguf")
    take = "import sys, pathlib"
    script = f"{take}; from {convert.__module__} import convert; convert(*map(pathlib.Path, sys.argv[1:]), 'any')"
    waits = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "tiny.gguf"), str(tmp_path)])
    eventually(lambda: bool(psutil.Process(waits.pid).children()), "the conversion has begun")
    (converts,) = psutil.Process(waits.pid).children()
    waits.kill()
    waits.wait()
    eventually(lambda: gone(converts.pid), "the conversion has ended")


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


EXPERTS = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 64, "expert_gating_func": 2}
FAMILIES: dict[str, dict[str, Any]] = {  # what files of them say that transformers does not read
    "gemma2-caps": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0, "attention.key_length": 8},
    "gemma3-linear": {
        "attention.key_length": 8,
        "attention.sliding_window": 4096,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    },
    "phi3-partial": {"rope.dimension_count": 6, "attention.sliding_window": 0},
    "stablelm": {"rope.dimension_count": 8},
    "starcoder2": {},
    "falcon": {"feed_forward_length": 128, "attention.head_count_kv": 1},
    "nemotron": {},
    "minimax-m2": {**EXPERTS, "attention.key_length": 8, "rope.dimension_count": 8},
}


OPEN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # a file says, and what that is in a config.json
    "llama": ("llama", {}, {"rope_parameters": USUAL_ROPE}),
    "phi3": ("phi3-partial", {"attention.sliding_window": 0}, {"rope_parameters": USUAL_ROPE}),
    "starcoder2": ("starcoder2", {}, {"rope_parameters": USUAL_ROPE}),
    "stablelm": ("stablelm", {}, {"rope_parameters": USUAL_ROPE | {"partial_rotary_factor": 1.0}}),
    "minimax-m2": ("minimax-m2", {**EXPERTS, "attention.key_length": 8}, {"rope_parameters": USUAL_ROPE}),
    "gemma3": (
        "gemma3-linear",
        {"attention.key_length": 8},
        {
            "rope_parameters": {"full_attention": USUAL_ROPE, "sliding_attention": USUAL_ROPE},
            "layer_types": ["full_attention", "full_attention"],
        },
    ),
    "gemma3-pattern": (
        "gemma3-linear",
        FAMILIES["gemma3-linear"] | {"attention.sliding_window_pattern": 2},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
                "sliding_attention": USUAL_ROPE,
            },
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


CASES = {  # name -> (tiny model, fields of its file, the same in config.json)
    **{
        f"rope {kind}": ("llama", said, {"rope_parameters": rope | {"rope_theta": 5e5}})
        for kind, (said, rope) in SCALED.items()
    },
    **{kind: (kind, said, {}) for kind, said in FAMILIES.items()},
    "a window": (
        "phi3-partial",
        FAMILIES["phi3-partial"] | {"attention.sliding_window": 32},
        {"sliding_window": 32},
    ),
    **{f"open {name}": (kind, {"rope.freq_base": None, **said}, usual) for name, (kind, said, usual) in OPEN.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_a_gguf_file_gives_the_model_that_it_describes(tmp_path: Path, cache: Path, name: str) -> None:
    """Whether its rope is scaled (transformers drops it), what its family usually has (it was not read from the file),
    and what it leaves open, as in llama.cpp: a rope of base 10,000 that turns whole heads, and no window."""
    kind, said, changes = CASES[name]
    shutil.copytree(tiny_model(kind), plain := tmp_path / "plain")
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | changes))
    _write_gguf(file := tmp_path / "tiny.gguf", plain if name.startswith("rope") else tiny_model(kind), **said)
    runner, wanted = (load_runner(str(path), device=CPU, dtype="float32") for path in (file, plain))
    assert type(runner) is type(wanted)
    tokens = some_tokens(runner, 60)
    close(feed_chain(runner, tokens, 60), feed_chain(wanted, tokens, 60))


SIX = ["sliding_attention"] * 5 + ["full_attention"]


@pytest.mark.parametrize(
    ("window", "pattern", "kinds"),
    [
        (64, None, SIX),
        (64, 3, [*SIX[3:], *SIX[3:]]),
        (64, 1, SIX[5:] * 6),
        (64, [False, *[True] * 5], SIX[::-1]),
        (0, None, SIX[5:] * 6),
        (None, 3, SIX[5:] * 6),
    ],
)
def test_the_layers_of_gemma3_slide_as_the_gguf_file_says(window: int | None, pattern: Any, kinds: list[str]) -> None:
    """It was five of six whatever the file said, and a window of 0 an error of Python's."""
    config: Any = Gemma3TextConfig(num_hidden_layers=6, max_position_embeddings=256)
    said = {"attention.sliding_window": window, "attention.sliding_window_pattern": pattern}
    _complete_window(config, "gemma3", {name: value for name, value in said.items() if value is not None})
    assert config.layer_types == kinds
    assert config.sliding_window == (window or 256)
    _complete_window(config := Gemma2Config(num_hidden_layers=6), "gemma2", {})
    assert config.layer_types == ["sliding_attention", "full_attention"] * 3
    assert config.sliding_window == 4096
    with pytest.raises(SystemExit, match="it says of 2 layers whether they have a window, and has 6"):
        _complete_window(config, "gemma3", {"attention.sliding_window_pattern": [True, False]})


MOE = {"model": "minimax-m2", **EXPERTS, "attention.key_length": 8, "rope.dimension_count": 8}
UNKEPT: list[tuple[str, dict[str, Any]]] = [  # what is said of it
    ("its rope is scaled by 'longrope'", {"rope.scaling.type": "longrope"}),
    ("its rope is scaled in a way", {"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 0.5}),
    ("its rope has frequencies", {"freqs": 3}),
    ("2 of its weights are in no file", {"without": "up_proj"}),
    ("it does not say 'attention.head_count_kv'", {"model": "llama-mha", "attention.head_count_kv": None}),
    ("a window of 64", {"attention.sliding_window": 64}),
    ("its rope turns 4 of 8", {"model": "qwen2", "rope.dimension_count": 4, "without": "bias"}),
    ("512 of its weights have no place", {"model": "llama-biased"}),
    (r"mlp.down_proj.weight has the shape \[32, 64\] where \[32, 48\] is expected", {"feed_forward_length": 48}),
    ("it does not say 'attention.layer_norm_rms_epsilon'", {"attention.layer_norm_rms_epsilon": None}),
    ("it does not say 'context_length'", {"model": "qwen2", "context_length": None}),
    ("it does not say 'expert_used_count'", {**MOE, "expert_used_count": None}),
    ("it uses 7 experts of 6", {**MOE, "expert_used_count": 7}),
    ("its experts are not chosen by a sigmoid", {**MOE, "expert_gating_func": 1}),
    ("2 of its weights are in no file.*e_score_correction_bias", {**MOE, "without": "e_score"}),
    ("it has 8 experts", {"expert_count": 8}),
]


@pytest.mark.parametrize(("cause", "said"), UNKEPT, ids=[cause for cause, _ in UNKEPT])
def test_a_gguf_file_that_cannot_be_kept_whole_is_refused(
    tmp_path: Path, cache: Path, cause: str, said: dict[str, Any]
) -> None:
    model = tiny_model(said.get("model", "llama"))
    _write_gguf(file := tmp_path / "tiny.gguf", model, **{name: said[name] for name in said if name != "model"})
    with pytest.raises(ModelError, match=cause):
        load_runner(str(file), device=CPU)


def test_no_number_of_a_gguf_file_is_made_up() -> None:
    """What llama.cpp does not start without. It was the class's number, of some other model."""
    for architecture in GGUF:
        said: dict[str, Any] = dict.fromkeys((*_ALWAYS, *GGUF[architecture].needed), 2)
        said["expert_gating_func"] = 2
        _check_stated(architecture, said)
        norms = [name for name in said if "epsilon" in name]
        assert len(norms) == 1
        for name in (*norms, "context_length", "block_count", "embedding_length", "attention.head_count"):
            with pytest.raises(SystemExit, match=f"it does not say '{name}'"):
                _check_stated(architecture, {each: said[each] for each in said if each != name})
        with pytest.raises(SystemExit, match="for each layer"):
            _check_stated(architecture, said | {"attention.head_count_kv": [2, 1]})


def test_a_gguf_file_of_an_architecture_that_is_not_read_is_refused(tmp_path: Path, cache: Path) -> None:
    """The causes were errors of Python's, such as 'int' object is not iterable."""
    for architecture in ("gpt-oss", "lfm2", "t5", "deci", "gemma4"):
        writer = gguf.GGUFWriter(file := tmp_path / f"{architecture}.gguf", architecture)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(ModelError, match=f"loaded: files of the architecture '{architecture}' are not"):
            load_runner(str(file), device=CPU)


@pytest.mark.parametrize(
    ("architecture", "key", "attribute"),
    [
        ("gpt2", "context_length", "n_positions"),
        ("gpt2", "feed_forward_length", "n_inner"),
        ("qwen2moe", "expert_feed_forward_length", "moe_intermediate_size"),
        ("qwen2moe", "expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
        ("qwen3moe", "expert_feed_forward_length", "moe_intermediate_size"),
        ("qwen3", "attention.key_length", "head_dim"),
    ],
)
def test_the_sizes_of_a_gguf_file_are_taken(architecture: str, key: str, attribute: str) -> None:
    """They were those of the class, and all files with others were refused."""
    keys = (*_ALWAYS, *GGUF[architecture].needed)
    said: dict[str, Any] = {name: 1e-5 if "epsilon" in name else 2 for name in keys} | {key: 24}
    config = AutoConfig.for_model(architecture.replace("moe", "_moe"))
    _complete(config, architecture, said)
    assert getattr(config, attribute) == 24


@pytest.mark.parametrize("shape", [None, (5,)])
def test_a_buffer_that_is_learned_is_not_made_up(tmp_path: Path, shape: tuple[int, ...] | None) -> None:
    """Nor cut to size, of an ordinary checkpoint either: it ran with zeros."""
    shutil.copytree(tiny_model("minimax-m2"), directory := tmp_path / "model")
    weights = load_file(file := directory / "model.safetensors")
    name = next(name for name in weights if "e_score" in name)
    del weights[name]
    save_file(weights | ({} if shape is None else {name: torch.ones(shape)}), file, {"format": "pt"})
    cause = "1 of its weights are in no file" if shape is None else r"has the shape \[5\] where \[6\] is expected"
    with pytest.raises(ModelError, match=cause):
        load_runner(str(directory), device=CPU)


def test_a_damaged_gguf_file_is_a_model_error(tmp_path: Path, child_cache: Path) -> None:
    file = tmp_path / "tiny.gguf"
    _write_gguf(file)
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(ModelError, match=r"tiny\.gguf' could not be loaded"):
        load_runner(str(file), device=CPU)
    assert not [path for path in child_cache.iterdir() if path.is_dir()]


def _write_gguf(file: Path, model: Path | None = None, without: str = " ", freqs: Any = None, **said: Any) -> None:
    """A tiny model in llama.cpp's naming, float32; a Llama's q and k rows interleaved as its rotation wants.

    `said`: besides what the configuration says, or in its place; None is left out. `freqs`: the rope is scaled by a
    tensor, that of Llama 3.2 or one with these numbers.
    """
    model = model or tiny_model()
    config = json.loads((model / "config.json").read_text())
    family = config["model_type"].removesuffix("_text").replace("_", "-")
    ropes = config["rope_parameters"]
    epsilons = {name: value for name, value in config.items() if name.endswith(("norm_eps", "norm_epsilon"))}
    usual = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config.get("num_key_value_heads"),
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
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}
        if without in name or (config["tie_word_embeddings"] and name.startswith("lm_head")):
            continue
        count = heads.get(name.split(".")[-2])
        if count is not None and family == "llama":
            rows = len(weight)
            weight = weight.view(count, 2, rows // count // 2, -1).transpose(1, 2).reshape(weight.shape)
        if family.startswith(("gemma", "nemotron")) and name.endswith("norm.weight"):
            weight = weight + 1  # as they are applied
        start = f"blk.{name.split('.')[2]}." if ".mlp." in name else ""
        if name.endswith(".experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True):
                writer.add_tensor(f"{start}ffn_{part}_exps.weight", half.contiguous().numpy())
            continue
        suffixes = (".weight", ".bias")
        held = names.get_name(name, try_suffixes=suffixes)
        if name.endswith(".experts.down_proj"):
            held = f"{start}ffn_down_exps.weight"
        elif name.endswith(".e_score_correction_bias"):
            held = f"{start}exp_probs_b.bias"
        writer.add_tensor(held, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
