"""How much memory a model will take, told from its files before any of it is loaded, and how much there is."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pearl.errors import ModelError
from pearl.models.graphs import FED, PREFILL

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_ITEMS = {"float32": 4, "bfloat16": 2, "float16": 2}
_TOLD_FROM = 1e9  # bytes; nobody wants to know of less
_MEMORY_WORDS = re.compile(
    r"(?i)can't allocate memory|not enough memory|CUDA error: out of memory|CUDA driver error: out of memory"
    r"|cudaErrorMemoryAllocation|CU(BLAS|DNN|SPARSE|SOLVER)_STATUS_ALLOC_FAILED"
)
_DEFAULT_HEAD = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size")


@dataclass(frozen=True)
class Need:
    """What one rank of a model takes, in bytes.

    Attributes:
        weights: as they will be in memory.
        cache: keys and values of `slots` times `context` tokens; 0 where the configuration does not tell.
        work: buffers of a forward: of a piece of a prompt, and of the largest recording, which the others share.
    """

    weights: int
    cache: int = 0
    work: int = 0
    context: int = 0
    slots: int = 1

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.work

    def __str__(self) -> str:
        parts = [f"{gigabytes(self.weights)} of weights"]
        times = f"{self.slots} times " if self.slots > 1 else ""
        parts += [f"{gigabytes(self.cache)} of KV cache for {times}{self.context:,} tokens"] if self.cache else []
        parts += [f"{gigabytes(self.work)} for its forwards"] if self.work else []
        return f"{gigabytes(self.total)}: {', '.join(parts)}"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def needed(
    directory: Path,
    dtype: str,
    context: int | None,
    most: int,
    ranks: int = 1,
    slots: int = 1,
    wide: Collection[str] = (),
) -> Need | None:
    """What the checkpoint in `directory` will take; None where its files do not tell.

    Args:
        dtype: of the weights: "auto" for the checkpoint's own, or one of torch's. Quantised weights stay as they are.
        context: tokens; None: the model's own, at most `most`.
        ranks: how many share the model; the need is that of one.
        slots: sequences that its cache holds.
        wide: classes of models whose cache is of float32, whatever their weights are.
    """
    try:
        config = json.loads((directory / "config.json").read_text())
        size = sum(file.stat().st_size for file in _weight_files(directory))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or not size:
        return None
    own = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    item = _ITEMS.get(own if dtype == "auto" else dtype, 2)
    weights = size if "quantization_config" in config else size * item // _ITEMS.get(own, item)
    item = 4 if set(config.get("architectures") or ()) & set(wide) else item
    config = config.get("text_config", config)
    context = context or min(most, config.get("max_position_embeddings") or most)
    return of_shape(config, weights, item, context, ranks, slots)


def of_shape(config: Mapping[str, Any], weights: int, item: int, context: int, ranks: int = 1, slots: int = 1) -> Need:
    """The need of one of `ranks` of a model with `weights` bytes of weights.

    Args:
        config: as in config.json.
        item: bytes of a number of the cache.
    """
    if not all(isinstance(config.get(name), int) for name in _DEFAULT_HEAD):
        return Need(weights // ranks)
    hidden, vocab, heads = config["hidden_size"], config["vocab_size"], config["num_attention_heads"]
    whole = min(weights, vocab * hidden * item) if ranks > 1 else 0  # every rank has the embedding
    positions = context + PREFILL  # rows of padding are written behind the text
    shared = slots * cache_bytes(config, positions, item) // min(ranks, config.get("num_key_value_heads") or heads)
    inner, heads = config["intermediate_size"] // ranks, heads // ranks
    piece = PREFILL * (4 * hidden + 3 * inner + max(heads // FED, 1) * positions) * item  # its mask, a group's heads
    recorded = FED * (2 * heads * positions * item + 2 * vocab * item + 4 * vocab)  # scores twice, logits
    return Need((weights - whole) // ranks + whole, shared, piece + recorded, context, slots)


def cache_bytes(config: Mapping[str, Any], positions: int, item: int) -> int:
    """Keys and values of so many positions in all layers."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    key_value_heads = config.get("num_key_value_heads") or heads
    return int(2 * config["num_hidden_layers"] * key_value_heads * width * positions * item)


def check_room(spec: str, need: Need | None, device: torch.device, gpus: int = 1) -> str:
    """A sentence on the memory that a model needs, and that there is; empty where it needs little, or nobody knows.

    Args:
        gpus: over how many, from the first on, it is spread.

    Raises `ModelError` where it cannot fit: on a GPU into what is free, on a CPU into the memory that there is at all
    (what is free there depends on what is kept of files that were read, these among them).
    """
    if need is None or need.total < _TOLD_FROM or (room := _room(device, gpus)) is None:
        return ""
    where = f"on {device}" if gpus == 1 else f"on {gpus} GPUs"
    there = f"{gigabytes(room)} {'are free' if device.type == 'cuda' else 'is all there is'} {where}"
    if need.weights + need.cache > room:  # the rest is an estimate
        advice = (
            "Lower max_context, take a smaller model, dtype or a checkpoint of 4 bits, or more GPUs: "
            "--target-tp N --target-device cuda:0-M."
            if device.type == "cuda"
            else "Lower max_context, or take a smaller model or dtype."
        )
        raise ModelError(f"Model {spec!r} needs {need}; {there}. {advice}")
    return f"{spec} needs {need}; {there}"


def _room(device: torch.device, gpus: int) -> int | None:
    if device.type == "cpu":
        return total_memory()
    places = [device] if gpus == 1 else [torch.device("cuda", index) for index in range(gpus)]
    return sum(int(torch.cuda.mem_get_info(place)[0]) for place in places)


def available_memory(proc: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process could still take, by the kernel's estimate and its control group; None: unknown."""
    found = []
    with suppress(OSError, ValueError, KeyError):
        found.append(_kernels(proc)["MemAvailable"])
    with suppress(OSError, ValueError):  # "max" is no number: no limit
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(found, default=None)


def total_memory(proc: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process could take if there were no other and nothing were kept of files; None: unknown."""
    found = []
    with suppress(OSError, ValueError, KeyError):
        found.append(_kernels(proc)["MemTotal"])
    with suppress(OSError, ValueError):
        found.append(int((group / "memory.max").read_text()))
    return min(found, default=None)


def _kernels(proc: Path) -> dict[str, int]:
    lines = (line.split() for line in proc.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3}


def _weight_files(directory: Path) -> list[Path]:
    return next((files for files in (sorted(directory.glob(name)) for name in _WEIGHTS) if files), [])


def is_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is too little memory.

    torch has a class for what its own allocator of GPU memory lacks. All else comes as a `RuntimeError`: the host's
    memory, pinned memory, workspaces of cuBLAS and cuDNN, and what the driver needs to launch a recorded forward.
    """
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or bool(_MEMORY_WORDS.search(str(error)))
