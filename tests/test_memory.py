"""How much memory a model needs is told before it is loaded, and is what it then takes."""

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from pearl.config import ModelConfig
from pearl.errors import ModelError
from pearl.models.checkpoints import memory
from pearl.models.checkpoints.formats import GGUF_BLOCKS
from pearl.models.checkpoints.gguf import GgufTable, Tensor
from pearl.models.checkpoints.loading import load_runner
from pearl.models.checkpoints.memory import Need, check_cache_fits, check_room, needed
from pearl.models.cpu import native
from pearl.models.families import OWN_FORWARD, weight_shapes
from pearl.models.forward.attention import whole_blocks
from pearl.models.forward.runner import ForwardRunner
from pearl.models.gpu.recordings import PREFILL
from tests.conftest import output
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


# ---- what loading takes ----

LOADED = """
import sys
from pathlib import Path
import torch
from pearl.models.checkpoints.direct import read_decoder
from pearl.models.feeds import Feed
from pearl.models.own_forward import own_runner

def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024

before = peak()
decoder = read_decoder(Path(sys.argv[1]), None, torch.device("cpu"), keeps_bits=True)
runner = own_runner(decoder, 64)
runner.forward([Feed((1, 2, 3), 1)])
print(peak() - before)
"""


def write_zeros(directory: Path, kind: str, is_tied: bool, **sizes: int) -> int:
    """A Llama whose matrices are zeros of a type of GGUF, in a file of holes; returns the bytes of its weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "tie_word_embeddings": is_tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "head_dim": 64,
        **sizes,
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Tensor] = {}
    end = 0
    block = GGUF_BLOCKS[kind]
    for name, shape in weight_shapes(OWN_FORWARD["LlamaForCausalLM"].forward, config).items():
        count = math.prod(shape)
        is_matrix = len(shape) > 1
        size = count // block.weights * block.size if is_matrix else 4 * count
        tensors[name] = Tensor(kind if is_matrix else "F32", shape, end, size)
        end += size
    with (directory / "weights").open("wb") as file:
        file.truncate(end)
    GgufTable("weights", 0, tensors).write(directory)
    return end


LARGE = {
    "vocab_size": 65536,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


def test_on_a_gpu_alone_the_embedding_of_a_gguf_file_is_dequantised(tmp_path: Path) -> None:
    size = write_zeros(tmp_path / "model", "Q4_0", True, **LARGE)
    told = []
    for on_gpu in (False, True):
        need = needed(tmp_path / "model", "auto", 64, 64, keeps_bits=True, on_gpu=on_gpu)
        assert need is not None
        told.append(need.weights)
    assert told[0] == pytest.approx(size, rel=0.01)
    assert told[1] - told[0] == 2 * LARGE["vocab_size"] * LARGE["hidden_size"]


@pytest.mark.skipif(native.library() is None, reason="our products are not built")
@pytest.mark.parametrize("is_tied", [True, False])
def test_loading_takes_no_more_memory_than_the_weights(tmp_path: Path, is_tied: bool) -> None:
    """Steps of all layers were unpacked at once, those of the output matrix too, and the embedding was dequantised:
    together 2.6 to 3.7 times as much."""
    size = write_zeros(tmp_path / "model", "Q4_0", is_tied, **LARGE)
    taken = int(output(sys.executable, "-c", LOADED, tmp_path / "model"))
    assert taken < 1.6 * size, f"{taken / 1e6:.0f} MB for {size / 1e6:.0f}"
