"""How much memory a model needs is told before it is loaded, and is what it then takes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pearl.config import load_settings
from pearl.errors import ModelError
from pearl.models import memory
from pearl.models.checkpoint import in_cache
from pearl.models.graphs import PREFILL
from pearl.models.llama import LlamaRunner
from pearl.models.loading import load_runner
from pearl.models.memory import Need, check_room, needed, of_shape
from tests.tiny import tiny_model

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
    assert need is not None
    weights = sum(weight.numel() for weight in model.parameters()) * 2 * halves
    assert need.weights == pytest.approx(weights, rel=0.1), "the files have heads of their own"
    runner = LlamaRunner(model.to(torch.float32 if halves == 2 else torch.bfloat16), 200, record=lambda work: work)
    slots = runner._slots
    assert slots.keys.shape[3] >= 200 + PREFILL
    assert need.cache == pytest.approx(slots.keys.nbytes + slots.values.nbytes, rel=0.15), "of whole blocks"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_of_our_own_forward_is_of_float32_on_a_cpu(dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    need = needed(tiny_model(), str(dtype).removeprefix("torch."), 200, 8192, is_wide=True)
    assert need is not None
    slots = LlamaRunner(model.to(dtype), 200)._slots
    positions = 200 + PREFILL  # the padding of a GPU's pieces is in the estimate
    assert need.cache / positions == (slots.keys.nbytes + slots.values.nbytes) / slots.keys.shape[3]
    other = needed(tiny_model(), "bfloat16", 200, 8192, is_wide=False)
    assert other is not None
    assert 2 * other.cache == need.cache


def test_the_context_is_the_models_own_up_to_the_most() -> None:
    found = [needed(tiny_model(), "auto", *given) for given in ((None, 8192), (None, 100), (30, 100))]
    assert [need and need.context for need in found] == [256, 100, 30]


def test_ranks_take_a_part_each() -> None:
    alone, two, sixteen = (of_shape(LLAMA_70B, 141_000_000_000, 2, 8192, ranks) for ranks in (1, 2, 16))
    embedding = 8192 * 128256 * 2
    assert 2 * two.weights == alone.weights + embedding
    assert (2 * two.cache, 8 * sixteen.cache) == (alone.cache, alone.cache), "eight heads, however many ranks"


def test_every_slot_has_a_cache_of_its_own() -> None:
    one, four = (of_shape(LLAMA_70B, 141_000_000_000, 2, 8192, 1, slots) for slots in (1, 4))
    assert (four.cache, four.weights, four.work) == (4 * one.cache, one.weights, one.work)
    assert "KV cache for 4 times 8,192 tokens" in str(four)


def test_a_quantised_checkpoint_takes_what_its_files_take(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B | {"quantization_config": {"quant_method": "awq"}}))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    found = [needed(tmp_path, dtype, None, 8192) for dtype in ("auto", "float32")]
    assert [need and need.weights for need in found] == [1000, 1000]


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_of_files_that_do_not_tell_nothing_is_said(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert needed(tmp_path, "auto", None, 8192) is None


def test_a_model_of_the_hub_is_looked_up_where_its_cache_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert in_cache("some/model") is None
    repository = tmp_path / "models--some--model"
    shutil.copytree(tiny_model(), repository / "snapshots" / "0123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    found = in_cache("some/model")
    assert found is not None
    assert needed(found, "auto", None, 8192) == needed(tiny_model(), "auto", None, 8192)


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
    with pytest.raises(
        ModelError, match=r"144\.\d GB: 141\.1 GB of weights, 2\.9 GB of KV cache for 8,192.*84\.0 GB are"
    ):
        load_runner(str(large), device=GPU, progress=said.append)
    with pytest.raises(ModelError, match="target-tp"):
        load_runner(str(large), device=GPU, progress=said.append)
    assert said == []


def test_over_two_gpus_it_fits_and_that_is_said_first(large: Path) -> None:
    said: list[str] = []
    with pytest.raises(ModelError, match="could not be loaded"):  # there are only holes in its files
        load_runner(str(large), device=GPU, device_map="auto", progress=said.append)
    assert re.fullmatch(r".* needs 144.* forwards; 168\.0 GB are free on 2 GPUs", said[0])
    assert said[1] == f"loading {large}"


def test_on_a_cpu_the_bound_is_all_the_memory_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "total_memory", lambda: 3 * 10**9)
    assert check_room("x", Need(10**9, 10**9), CPU) == (
        "x needs 2.0 GB: 1.0 GB of weights, 1.0 GB of KV cache for 0 tokens; 3.0 GB is all there is on cpu"
    )
    assert check_room("x", Need(10**8), CPU) == "", "of little nothing is said"
    with pytest.raises(ModelError, match="Lower max_context"):
        check_room("x", Need(2 * 10**9, 10**9 + 1), CPU)


def test_loading_tells_of_each_file_that_it_begins(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_model()).save_pretrained(tmp_path, max_shard_size="40KB")
    count = len(list(tmp_path.glob("*.safetensors")))
    said: list[str] = []
    load_runner(str(tmp_path), device=CPU, dtype="float32", progress=said.append)
    assert count > 2
    told = [f"loading {tmp_path.name}: file {number} of {count}" for number in range(1, count + 1)]
    assert said == [f"loading {tmp_path}", *told]


# ---- what the configurations in the repository say ----

# Published sizes: hidden, inner, layers, heads, key-value heads, head width, vocabulary, whether the head is tied.
SHAPES = {
    "Llama-3.3-70B-Instruct": (8192, 28672, 80, 64, 8, 128, 128256, False),
    "DeepSeek-R1-Distill-Llama-70B": (8192, 28672, 80, 64, 8, 128, 128256, False),
    "Llama-3.1-8B-Instruct": (4096, 14336, 32, 32, 8, 128, 128256, False),
    "DeepSeek-R1-Distill-Llama-8B": (4096, 14336, 32, 32, 8, 128, 128256, False),
    "Llama-3.2-1B-Instruct": (2048, 8192, 16, 32, 8, 64, 128256, True),
    "Qwen3-32B": (5120, 25600, 64, 64, 8, 128, 151936, False),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8, 128, 151936, True),
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, 128, 151936, True),
    "Qwen2.5-72B-Instruct": (8192, 29568, 80, 64, 8, 128, 152064, False),
    "Qwen2.5-0.5B-Instruct": (896, 4864, 24, 14, 2, 64, 151936, True),
    "Llama-2-70b-chat-hf": (8192, 28672, 80, 64, 8, 128, 32000, False),
    "Llama-2-7b-chat-hf": (4096, 11008, 32, 32, 32, 128, 32000, False),
}
TOLD = re.compile(
    r"# Memory at ([\d,]+) tokens: (.*) GB on .*? \(weights (.*) GB\), (.*) GB on the draft's \(weights (.*) GB\)\."
)
CONFIGS = [
    path for path in sorted((Path(__file__).parents[1] / "configs").glob("*.yaml")) if TOLD.search(path.read_text())
]


def need_of(spec: str, context: int, ranks: int) -> Need:
    hidden, inner, layers, heads, kv_heads, width, vocab, tied = SHAPES[spec.partition("/")[2]]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = dict(zip(names, (hidden, inner, layers, heads, kv_heads), strict=True))
    layer = hidden * width * 2 * (heads + kv_heads) + 3 * hidden * inner + 2 * hidden
    weights = vocab * hidden * (1 if tied else 2) + layers * layer + hidden
    return of_shape(config | {"head_dim": width, "vocab_size": vocab}, 2 * weights, 2, context, ranks)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configurations_say_what_memory_they_need(path: Path) -> None:
    told, config = TOLD.search(path.read_text()), load_settings(path, {}).engine
    assert told is not None
    context = int(told[1].replace(",", ""))
    target, draft = need_of(config.target, context, config.target_tp), need_of(config.draft, context, 1)
    computed = (target.total, target.weights, draft.total, draft.weights)
    assert told.groups()[1:] == tuple(f"{size / 1e9:.1f}" for size in computed)
    assert max(target.total, draft.total) < 80e9


def test_there_are_configurations_that_say_so() -> None:
    assert len(CONFIGS) >= 7


@pytest.mark.parametrize("version", [1, 2])
def test_pages_of_files_count_as_free_in_a_cgroup(tmp_path: Path, version: int) -> None:
    """A container that has just read a checkpoint had no memory left for it."""
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    where = tmp_path if version == 2 else tmp_path / "memory"
    where.mkdir(exist_ok=True)
    for name, content in zip(
        (*names, "memory.stat"), ("1000", "900", "inactive_file 7\ntotal_inactive_file 7\n"), strict=True
    ):
        (where / name).write_text(content.replace("7", "600"))
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 8 kB\n")
    assert memory.available_memory(tmp_path / "meminfo", tmp_path) == 700
    assert memory.total_memory(tmp_path / "meminfo", tmp_path) == 1000
    (where / names[0]).write_text("max")
    assert memory.available_memory(tmp_path / "meminfo", tmp_path) == 8192
    assert memory.available_memory(tmp_path / "none", tmp_path) is None
