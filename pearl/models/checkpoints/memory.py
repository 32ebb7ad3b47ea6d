"""Estimates a model's memory from its files, before loading, and compares it with the memory of the machine."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from pearl.errors import ModelError, OutOfMemory
from pearl.models.checkpoints.checkpoint import config_in
from pearl.models.checkpoints.formats import GGUF_BLOCKS
from pearl.models.checkpoints.gguf import table_in
from pearl.models.families import is_of_own_forward
from pearl.models.gpu.recordings import PREFILL

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_ITEMS = {"float32": 4, "bfloat16": 2, "float16": 2}
_REPORTED_FROM = 1e9  # bytes
_SCARCE = 0.75  # share of a device's memory above which its size is told
_MEMORY_WORDS = re.compile(
    r"(?i)can't allocate memory|not enough memory|CUDA error: out of memory|CUDA driver error: out of memory"
    r"|cudaErrorMemoryAllocation|CU(BLAS|DNN|SPARSE|SOLVER)_STATUS_ALLOC_FAILED"
)
_SHAPE = ("num_hidden_layers", "num_attention_heads", "hidden_size")
SNAPSHOTS = 8  # the most copies of the state of a recurrent model: see `cache_layers`
_MEASURED_FROM = 1e8  # bytes of weights
_P = ParamSpec("_P")
_T = TypeVar("_T")
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Need:
    """The memory that a model needs, in bytes.

    Attributes:
        weights: in the dtype in which they will be loaded.
        cache: KV cache for `slots` sequences of `context` tokens; 0 if unknown.
        states: of recurrent layers, with the copies to which a rollback goes back.
    """

    weights: int
    cache: int = 0
    context: int = 0
    slots: int = 1
    states: int = 0

    @property
    def total(self) -> int:
        """Without what forwards take on their way."""
        return self.weights + self.cache + self.states

    def __str__(self) -> str:
        parts = [f"{gigabytes(self.weights)} of weights"]
        times = f"{self.slots} times " if self.slots > 1 else ""
        parts += (
            [f"{gigabytes(self.cache)} of KV cache for {times}{self.context:,} tokens"]
            if self.cache
            else []
        )
        parts += (
            [f"{gigabytes(self.states)} of recurrent state and {SNAPSHOTS} copies"]
            if self.states
            else []
        )
        return f"{gigabytes(self.total)}: {', '.join(parts)}"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def needed(
    directory: Path,
    dtype: str,
    context: int | None,
    most: int,
    slots: int = 1,
    keeps_bits: bool = False,
) -> Need | None:
    """Estimate what the checkpoint in `directory` needs; None if its files do not say.

    Args:
        dtype: the weights' dtype once loaded; "auto": as in the checkpoint. Quantised weights are not converted.
        context: tokens; None: the model's maximum, but at most `most`.
        slots: sequences that the KV cache holds.
        keeps_bits: whether our own forward keeps the matrices of a GGUF file in their own bits.
    """
    config, size = config_in(directory), 0
    with suppress(OSError, ValueError):
        size = _size_of_weights(directory)
    if not config or not size:
        return None
    in_own_bits = keeps_bits and is_of_own_forward(config)
    if not in_own_bits and (added := _added(config)):
        size, config = size + added, {**config, "dtype": "bfloat16"}
        del config["quantization_config"]
    own = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    item = _ITEMS.get(own if dtype == "auto" else dtype, 2)
    weights = size if "quantization_config" in config else size * item // _ITEMS.get(own, item)
    is_ours = is_of_own_forward(config)
    config = text if isinstance(text := config.get("text_config"), dict) else config
    if keeps_bits and is_ours and (table := table_in(directory)) is not None:
        held = table.tensors.values()
        weights = sum(
            each.size if each.kind in GGUF_BLOCKS else math.prod(each.shape) * item for each in held
        )
        weights += config["vocab_size"] * config["hidden_size"] * item  # the embedding, dequantised
    context = context or min(most, config.get("max_position_embeddings") or most)
    if not is_ours and weights >= _MEASURED_FROM and (sizes := _sizes(directory, item)) is not None:
        return Need(weights, context * sizes[0], context, states=(1 + SNAPSHOTS) * sizes[1])
    if not all(isinstance(config.get(name), int) for name in _SHAPE):
        return Need(weights)
    positions = context + PREFILL  # padding rows are written after the text
    return Need(weights, slots * cache_bytes(config, positions, item), context, slots)


def _added(config: Mapping[str, Any]) -> int:
    """Bytes that experts in MXFP4 take more in bfloat16: 2 a number, not 17 / 32."""
    with suppress(LookupError, TypeError, AttributeError):
        if config["quantization_config"]["quant_method"] == "mxfp4":
            sizes = "num_hidden_layers", "num_local_experts", "hidden_size", "intermediate_size"
            return 3 * math.prod(config[name] for name in sizes) * (64 - 17) // 32
    return 0


def _size_of_weights(directory: Path) -> int:
    """In bytes, of the files that all weights are read from; of a GGUF file's in bfloat16.

    Mistral's repositories have them a second time, in consolidated files.
    """
    if (table := table_in(directory)) is not None:
        return sum(2 * math.prod(each.shape) for each in table.tensors.values())
    found = (
        [f for f in directory.glob(name) if not f.name.startswith("consolidated")]
        for name in _WEIGHTS
    )
    return sum(file.stat().st_size for file in next((files for files in found if files), []))


def _sizes(directory: Path, item: int) -> tuple[int, int] | None:
    """The `cache_sizes` of a checkpoint that runs through transformers, with weights of `item` bytes; None: unknown.

    On the meta device its model takes no memory, and under a second.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from pearl.models.transformers.cache_layers import cache_sizes

    with suppress(Exception), torch.device("meta"):  # whatever it is, loading will tell
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        # Some operations of experts are defined there for bfloat16 only.
        return cache_sizes(
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval(), item
        )
    return None


def cache_bytes(config: Mapping[str, Any], positions: int, item: int) -> int:
    """Bytes of the KV cache of `positions` tokens, all layers and heads, of `item` bytes a number."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    key_value_heads = config.get("num_key_value_heads") or heads
    return int(2 * config["num_hidden_layers"] * key_value_heads * width * positions * item)


def check_room(spec: str, need: Need | None, device: torch.device, gpus: int = 1) -> str:
    """Return a line on the need, beside the memory where that is scarce; "" if it is below 1 GB or either is unknown.

    Args:
        gpus: the model is spread over this many GPUs, from cuda:0 on.

    Raises `ModelError` if weights and KV cache cannot fit: on a GPU into its free memory; on a CPU into all of its
    memory, because what is free there depends on the page cache, which may hold these very files.
    """
    if need is None or need.total < _REPORTED_FROM or (room := _room(device, gpus)) is None:
        return ""
    where = f"on {device}" if gpus == 1 else f"on {gpus} GPUs"
    there = (
        f"{gigabytes(room)} {'are free' if device.type == 'cuda' else 'is all there is'} {where}"
    )
    is_scarce = need.total > _SCARCE * room
    if need.total > room:
        advice = (
            "Lower max_context, use a smaller model, a smaller dtype or a 4-bit checkpoint, or spread a target over "
            "more GPUs: --target-device cuda:0-1."
            if device.type == "cuda"
            else "Lower max_context, or use a smaller model or dtype."
        )
        raise ModelError(f"Model {spec!r} needs {need}; {there}. {advice}")
    return f"{spec} needs {need}; {there}" if is_scarce else f"{spec} needs {need}"


def _room(device: torch.device, gpus: int) -> int | None:
    if device.type == "cpu":
        return total_memory()
    places = [device] if gpus == 1 else [torch.device("cuda", index) for index in range(gpus)]
    return sum(int(torch.cuda.mem_get_info(place)[0]) for place in places)


def check_cache_fits(spec: str, model: Any, context: int, each: int, slots: int) -> int:
    """How many slots beyond `slots` would still fit into the device's memory; 0 if unknown. On a CPU, raises
    `ModelError` if `slots` do not fit.

    Checked before allocation, which would succeed: the kernel assigns pages only as the cache fills.

    Args:
        each: bytes of a slot of `context` tokens; 0: unknown.
    """
    free = available_memory() if model.device.type == "cpu" else _room(model.device, 1)
    if model.device.type == "cpu" and free is not None and slots * each > free:
        raise ModelError(
            f"The KV cache of {spec!r} for {f'{slots} times ' * (slots > 1)}{context} tokens takes "
            f"{gigabytes(slots * each)}, and {gigabytes(free)} are free. "
            f"Lower max_context{' or slots' * (slots > 1)}, or stop other programs."
        )
    return 0 if free is None or not each else free // each - slots


def fits_in_float32(directory: Path) -> bool:
    """Whether the bfloat16 weights in `directory` would, in float32, take less than half the free memory."""
    free = available_memory()
    return free is None or 4 * _size_of_weights(directory) < free


def available_memory(proc: Path = _MEMINFO, group: Path = _CGROUP) -> int | None:
    """Bytes still available: the kernel's MemAvailable or what the cgroup has left, if less; None: unknown.

    Pages of files that were not used lately count as available in either: the kernel drops them for a program.
    """
    left = [limit - max(0, used - idle) for limit, used, idle in _cgroup(group)]
    return min([*_meminfo(proc, "MemAvailable"), *left], default=None)


def total_memory(proc: Path = _MEMINFO, group: Path = _CGROUP) -> int | None:
    """Bytes in all: the machine's memory or the cgroup's limit, if less; None: unknown."""
    return min(
        [*_meminfo(proc, "MemTotal"), *(limit for limit, _, _ in _cgroup(group))], default=None
    )


def _meminfo(proc: Path, name: str) -> list[int]:
    with suppress(OSError, ValueError, KeyError):
        lines = (line.split() for line in proc.read_text().splitlines())
        return [{words[0]: int(words[1]) * 1024 for words in lines if len(words) == 3}[f"{name}:"]]
    return []


def _cgroup(group: Path) -> list[tuple[int, int, int]]:
    """(limit, bytes in use, of these pages of files not used lately) of this process's cgroup, of version 2 or 1."""
    for directory, limit, used, idle in (
        (group, "memory.max", "memory.current", "inactive_file"),
        (group / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(
            OSError, ValueError, KeyError
        ):  # none of this version; or its limit is "max", i.e. none, which is no number
            found = int((directory / limit).read_text()), int((directory / used).read_text())
            lines = (line.split() for line in (directory / "memory.stat").read_text().splitlines())
            return [(*found, int(dict(lines)[idle]))]
    return []


def is_of_memory(error: BaseException) -> bool:
    """Whether an error means "out of memory".

    torch raises `OutOfMemoryError` only from its caching GPU allocator. Host and pinned memory, workspaces of cuBLAS
    and cuDNN, and launches of CUDA graphs fail with a plain `RuntimeError`, recognised by its message.
    """
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or bool(
        _MEMORY_WORDS.search(str(error))
    )


def memory_errors(execute: Callable[_P, _T]) -> Callable[_P, _T]:
    """`execute`, but raising `OutOfMemory`, in words for users, for an error that is one of memory."""

    @wraps(execute)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return execute(*args, **kwargs)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not is_of_memory(error):
                raise
            cause = str(error).partition("\n")[0].rstrip(".") or "no memory is left"
            raise OutOfMemory(
                f"{cause}. Shorten the prompt, lower max_context, or take a smaller model."
            ) from error

    return wrapped
