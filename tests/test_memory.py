"""How much memory a model needs is told before it is loaded, and is what it then takes."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from pearl.config import ModelConfig
from pearl.errors import ModelError
from pearl.models.checkpoints import memory
from pearl.models.checkpoints.loading import load_runner
from pearl.models.checkpoints.memory import Need, check_cache_fits, check_room, needed
from pearl.models.forward.attention import whole_blocks
from pearl.models.forward.runner import ForwardRunner
from pearl.models.gpu.recordings import PREFILL
from tests.tiny import on_cpu, tiny_model, tiny_wrapper

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "llama-tied"])
@pytest.mark.parametrize(("dtype", "halves"), [("auto", 2), ("float32", 2), ("bfloat16", 1)])
def test_what_is_told_is_what_is_taken(kind: str, dtype: str, halves: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind))
    need = needed(tiny_model(kind), dtype, 200, 8192)
    weights = sum(weight.numel() for weight in model.parameters()) * 2 * halves
    assert need.weights == pytest.approx(weights, rel=0.1), "the files have heads of their own"
    model = model.to(torch.float32 if halves == 2 else torch.bfloat16)
    room = whole_blocks(200) + PREFILL  # as on a GPU
    runner = ForwardRunner(model, 200, slots=1, room=room, is_native=False)
    slots = runner.slots
    assert slots.keys.shape[3] >= 200 + PREFILL
    assert need.cache == pytest.approx(slots.keys.nbytes + slots.values.nbytes, rel=0.15), (
        "of whole blocks"
    )


@pytest.mark.parametrize(
    "directory", [tiny_model(), tiny_wrapper("gemma3")], ids=["a model", "one that sees, too"]
)
def test_the_cache_of_our_own_forward_on_a_cpu(directory: Path) -> None:
    need = needed(directory, "bfloat16", 200, 8192)
    slots = on_cpu(directory, dtype="bfloat16", max_context=200).slots
    # The padding of a GPU's pieces is in the estimate.
    assert (
        need.cache / (200 + PREFILL)
        == (slots.keys.nbytes + slots.values.nbytes) / slots.keys.shape[3]
    )


def test_the_context_is_the_models_own_up_to_the_most() -> None:
    found = [
        needed(tiny_model(), "auto", *given) for given in ((None, 8192), (None, 100), (30, 100))
    ]
    assert [need and need.context for need in found] == [256, 100, 30]


def test_every_slot_has_a_cache_of_its_own() -> None:
    one, four = (needed(tiny_model(), "auto", 8192, 8192, slots) for slots in (1, 4))
    assert (four.cache, four.weights) == (4 * one.cache, one.weights)
    assert "KV cache for 4 times 8,192 tokens" in str(four)


def test_a_quantised_checkpoint_takes_what_its_files_take(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(LLAMA_70B | {"quantization_config": {"quant_method": "awq"}})
    )
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "consolidated.safetensors").write_bytes(
        bytes(1000)
    )  # the same weights in Mistral's own format
    found = [needed(tmp_path, dtype, None, 8192) for dtype in ("auto", "float32")]
    assert [need and need.weights for need in found] == [1000, 1000]


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_of_files_that_do_not_tell_nothing_is_said(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert needed(tmp_path, "auto", None, 8192) is None


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A 70B model whose files have holes for weights, and a GPU of 80 GB."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    for number in range(2):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(70_553_706_496)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (84_000_000_000, 85_000_000_000))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return tmp_path


def test_what_cannot_fit_is_refused_before_anything_is_loaded(large: Path) -> None:
    said: list[str] = []
    needs = r"144\.\d GB: 141\.1 GB of weights, 2\.9 GB of KV cache for 8,192.*84\.0 GB are"
    with pytest.raises(ModelError, match=f"{needs}.*--target-device cuda:0-1"):
        load_runner(ModelConfig(str(large)), GPU, said.append)
    assert said == []


def test_spare_slots_are_counted_in_the_memory_of_the_device(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 12 << 30)
    left = [
        check_cache_fits("", SimpleNamespace(device=device), 8192, 1 << 30, 2)
        for device in (GPU, CPU)
    ]
    assert left == [84_000_000_000 // (1 << 30) - 2, 10]


def test_over_two_gpus_it_fits_and_that_is_said_first(large: Path) -> None:
    said: list[str] = []
    with pytest.raises(
        ModelError, match="could not be loaded"
    ):  # there are only holes in its files
        load_runner(ModelConfig(str(large), device="cuda:0-1"), GPU, said.append)
    assert re.fullmatch(r".* needs 144.* tokens; 168\.0 GB are free on 2 GPUs", said[0])
    assert said[1] == f"loading {large}"


def test_on_a_cpu_the_bound_is_all_the_memory_that_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "total_memory", lambda: 3 * 10**9)
    told = "x needs 2.0 GB: 1.0 GB of weights, 1.0 GB of KV cache for 0 tokens"
    assert check_room("x", Need(10**9, 10**9), CPU) == told, (
        "there is room enough, which is not worth a word"
    )
    assert check_room("x", Need(2 * 10**9, 3 * 10**8), CPU).endswith(
        "; 3.0 GB is all there is on cpu"
    )
    assert check_room("x", Need(10**8), CPU) == "", "of little nothing is said"
    with pytest.raises(ModelError, match="Lower max_context"):
        check_room("x", Need(2 * 10**9, 10**9 + 1), CPU)


@pytest.mark.parametrize("version", [1, 2])
def test_pages_of_files_count_as_free_in_a_cgroup(tmp_path: Path, version: int) -> None:
    """A container that has just read a checkpoint had no memory left for it."""
    names = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    where = tmp_path if version == 2 else tmp_path / "memory"
    where.mkdir(exist_ok=True)
    for name, content in zip(
        (*names, "memory.stat"),
        ("1000", "900", "inactive_file 7\ntotal_inactive_file 7\n"),
        strict=True,
    ):
        (where / name).write_text(content.replace("7", "600"))
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 8 kB\n")
    assert memory.available_memory(tmp_path / "meminfo", tmp_path) == 700
    assert memory.total_memory(tmp_path / "meminfo", tmp_path) == 1000
    (where / names[0]).write_text("max")
    assert memory.available_memory(tmp_path / "meminfo", tmp_path) == 8192
    assert memory.available_memory(tmp_path / "none", tmp_path) is None
