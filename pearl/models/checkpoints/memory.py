"""Estimates the memory that a model needs, from its files, and compares it with the machine's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pearl.errors import ModelError
from pearl.models.checkpoints.checkpoint import config_in
from pearl.models.checkpoints.formats import GGUF_BLOCKS
from pearl.models.checkpoints.gguf import Tensor, table_in
from pearl.models.families import Config, is_of_own_forward
from pearl.models.gpu.recordings import PREFILL
from pearl.models.heads.kinds import describes_head, layers_of
from pearl.models.transformers import SNAPSHOTS

if TYPE_CHECKING:
    from pearl.models.transformers.cache_layers import CacheSizes

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_ITEMS = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
_REPORTED_FROM = 1e9  # bytes
# If a model needs more than this share of the memory, its report says how much memory there is.
_SCARCE = 0.75
_SHAPE = ("num_hidden_layers", "num_attention_heads", "hidden_size")
_EXPERTS = ("num_hidden_layers", "num_local_experts", "hidden_size", "intermediate_size")
MEASURED_FROM = 1e8  # bytes of weights
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Need:
    """The memory that a model needs, in bytes.

    Attributes:
        weights: the weights, in the dtype in which they will be loaded.
        cache: KV cache for `slots` sequences of `context` tokens; 0 if unknown.
        states: the states of recurrent layers, and their copies for rollbacks.
    """

    weights: int
    cache: int = 0
    context: int = 0
    slots: int = 1
    states: int = 0

    @property
    def total(self) -> int:
        """Bytes of weights, cache and states; activations are not counted."""
        return self.weights + self.cache + self.states

    def __str__(self) -> str:
        parts = [f"{gigabytes(self.weights)} of weights"]
        if self.cache:
            tokens = f"{_times(self.slots)}{self.context:,} tokens"
            parts.append(f"{gigabytes(self.cache)} of KV cache for {tokens}")
        if self.states:
            parts.append(f"{gigabytes(self.states)} of recurrent state and {SNAPSHOTS} copies")
        return f"{gigabytes(self.total)}: {', '.join(parts)}"


def _times(slots: int) -> str:
    if slots == 1:
        return ""
    return f"{slots} times "


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def needed(
    directory: Path,
    dtype: str,
    context: int | None,
    most: int,
    slots: int = 1,
    keeps_bits: bool = False,
    on_gpu: bool = False,
) -> Need | None:
    """Estimate the memory that the checkpoint in `directory` needs; None if its files do not say.

    Args:
        dtype: the weights' dtype once loaded; "auto": as in the checkpoint. Quantised weights are not converted.
        context: number of tokens in a sequence; None: the model's maximum, but at most `most`.
        slots: sequences that the KV cache holds.
        keeps_bits: whether our own forward keeps the matrices of a GGUF file quantised.
        on_gpu: whether the model is loaded on a GPU, where the embedding of a GGUF file is dequantised.
    """
    config = config_in(directory)
    size = 0
    with suppress(OSError, ValueError):
        size = _size_of_weights(directory)
    if not config or not size:
        return None
    settings = config.get("text_config")
    if not isinstance(settings, dict):
        settings = config
    is_head = describes_head(config)
    if is_head:
        settings = layers_of(config)
    context = context or min(most, settings.get("max_position_embeddings") or most)
    is_ours = is_of_own_forward(config)
    weights = _loaded_weights(directory, config, size, dtype, is_ours and keeps_bits, on_gpu)
    if not (is_ours or is_head) and weights.size >= MEASURED_FROM:
        sizes = _sizes(directory, weights.item)
        if sizes is not None:
            states = (1 + SNAPSHOTS) * sizes.states
            return Need(weights.size, context * sizes.position, context, states=states)
    if not all(isinstance(settings.get(name), int) for name in _SHAPE):
        return Need(weights.size)
    positions = context + PREFILL  # padding rows are written after the text
    cache = slots * cache_bytes(settings, positions, weights.item)
    return Need(weights.size, cache, context, slots)


class _Weights(NamedTuple):
    """The size of loaded weights.

    Attributes:
        size: bytes of all weights.
        item: bytes of a number that is not quantised.
    """

    size: int
    item: int


def _loaded_weights(
    directory: Path, config: Config, size: int, dtype: str, keeps_bits: bool, on_gpu: bool
) -> _Weights:
    """Estimate the size of loaded weights whose files have `size` bytes.

    Quantised weights stay quantised, and the others become `dtype`.  There are two exceptions.
    transformers dequantises experts in MXFP4 to bfloat16; in the file they take 17 / 32 bytes a
    number.  On a GPU, our own forward dequantises the embedding of a GGUF file.
    """
    scheme = config.get("quantization_config")
    is_mxfp4 = isinstance(scheme, dict) and scheme.get("quant_method") == "mxfp4"
    usual = "bfloat16" if is_mxfp4 else "float32"
    stored = str(config.get("dtype") or config.get("torch_dtype") or usual)
    item = _ITEMS.get(stored if dtype == "auto" else dtype, 2)
    table = table_in(directory)
    if keeps_bits and table is not None:
        own_bits = _size_in_own_bits(table.tensors, item)
        if on_gpu:
            own_bits += config["vocab_size"] * config["hidden_size"] * item
        return _Weights(own_bits, item)
    if is_mxfp4 and not keeps_bits:
        numbers = 3 * math.prod(config.get(name) or 0 for name in _EXPERTS)
        return _Weights((size + numbers * (64 - 17) // 32) * item // 2, item)
    if scheme is not None:
        return _Weights(size, item)
    return _Weights(size * item // _ITEMS.get(stored, item), item)


def _size_in_own_bits(tensors: Mapping[str, Tensor], item: int) -> int:
    """Return the bytes that tensors of a GGUF file take if quantised tensors stay as they are.

    Each number of the other tensors takes `item` bytes.
    """
    size = 0
    for tensor in tensors.values():
        if tensor.kind in GGUF_BLOCKS:
            size += tensor.size
        else:
            size += math.prod(tensor.shape) * item
    return size


def _size_of_weights(directory: Path) -> int:
    """Return the size of the weight files, in bytes. A GGUF file counts as if its weights were in bfloat16.

    Mistral's repositories have the weights a second time, in consolidated files, which are not counted.
    """
    table = table_in(directory)
    if table is not None:
        return sum(2 * math.prod(tensor.shape) for tensor in table.tensors.values())
    for pattern in _WEIGHTS:
        size = 0
        for file in directory.glob(pattern):
            if not file.name.startswith("consolidated"):
                size += file.stat().st_size
        if size:
            return size
    return 0


def _sizes(directory: Path, item: int) -> CacheSizes | None:
    """Measure the cache of a checkpoint that runs through transformers; None if that fails.

    The model is made on the meta device, which takes no memory and less than a second.

    Args:
        item: bytes of a number in the cache.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from pearl.models.transformers.cache_layers import cache_sizes

    with suppress(Exception), torch.device("meta"):  # loading will report what is wrong
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        # On the meta device some operations of experts are defined for bfloat16 only.
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return cache_sizes(model.eval(), item)
    return None


def cache_bytes(config: Config, positions: int, item: int) -> int:
    """Return the bytes of a KV cache: 2 * layers * heads * head_dim * positions * item."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    key_value_heads = config.get("num_key_value_heads") or heads
    return int(2 * config["num_hidden_layers"] * key_value_heads * width * positions * item)


def check_room(spec: str, need: Need | None, device: torch.device, gpus: int = 1) -> str:
    """Return a line that says how much memory the model needs.

    If the need is a large share of the memory, the line also says how much memory there is.  Return
    "" if the need is below 1 GB, or if the need or the memory is unknown.

    Args:
        gpus: number of GPUs over which the model is spread, from cuda:0 on.

    Raises `ModelError` if weights and KV cache cannot fit. On a GPU they must fit into the free
    memory. On a CPU they need only fit into all of the memory: what is free there depends on the
    page cache, which may hold these very files.
    """
    if need is None or need.total < _REPORTED_FROM:
        return ""
    room = _room(device, gpus)
    if room is None:
        return ""
    if gpus == 1:
        location = f"on {device}"
    else:
        location = f"on {gpus} GPUs"
    availability = "are free" if device.type == "cuda" else "is all there is"
    memory = f"{gigabytes(room)} {availability} {location}"
    if need.total > room:
        raise ModelError(f"Model {spec!r} needs {need}; {memory}. {_advice(device)}")
    if need.total > _SCARCE * room:
        return f"{spec} needs {need}; {memory}"
    return f"{spec} needs {need}"


def _advice(device: torch.device) -> str:
    if device.type != "cuda":
        return "Lower max_context, or use a smaller model or dtype."
    return (
        "Lower max_context, use a smaller model, a smaller dtype or a 4-bit checkpoint, or spread a target over "
        "more GPUs: --target-device cuda:0-1."
    )


def _room(device: torch.device, gpus: int) -> int | None:
    if device.type == "cpu":
        return total_memory()
    if gpus == 1:
        return int(torch.cuda.mem_get_info(device)[0])
    devices = (torch.device("cuda", index) for index in range(gpus))
    return sum(int(torch.cuda.mem_get_info(gpu)[0]) for gpu in devices)


def check_cache_fits(spec: str, model: Any, context: int, slot_bytes: int, slots: int) -> int:
    """Return how many slots beyond `slots` would still fit into the device's memory; 0 if unknown.

    On a CPU, raises `ModelError` if `slots` slots do not fit. The allocation of the cache would not
    raise an error there, because the kernel assigns pages only as the cache fills. So call this
    before the cache is allocated. On a GPU the allocation itself fails.

    Args:
        slot_bytes: size of a slot of `context` tokens; 0: unknown.
    """
    on_cpu = model.device.type == "cpu"
    if on_cpu:
        free = available_memory()
    else:
        free = _room(model.device, 1)
    if free is None:
        return 0
    size = slots * slot_bytes
    if on_cpu and size > free:
        or_slots = " or slots" if slots > 1 else ""
        raise ModelError(
            f"The KV cache of {spec!r} for {_times(slots)}{context} tokens takes "
            f"{gigabytes(size)}, and {gigabytes(free)} are free. "
            f"Lower max_context{or_slots}, or stop other programs."
        )
    if slot_bytes:
        return free // slot_bytes - slots
    return 0


def fits_in_float32(directory: Path) -> bool:
    """Return whether weights, if loaded in float32, take less than half the free memory.

    The weights in `directory` are taken to be bfloat16.
    """
    free = available_memory()
    return free is None or 4 * _size_of_weights(directory) < free


def available_memory(proc: Path = _MEMINFO, group: Path = _CGROUP) -> int | None:
    """Return the bytes still available: min(the kernel's MemAvailable, bytes left in the cgroup); None: unknown.

    In both, cached pages of files that were not used lately count as available, because the kernel
    drops such pages when memory is needed.
    """
    sizes = _meminfo(proc, "MemAvailable")
    for usage in _cgroup(group):
        sizes.append(usage.limit - max(0, usage.used - usage.idle))
    return min(sizes, default=None)


def total_memory(proc: Path = _MEMINFO, group: Path = _CGROUP) -> int | None:
    """Return the bytes of all memory: min(the machine's memory, the cgroup's limit); None: unknown."""
    sizes = _meminfo(proc, "MemTotal")
    sizes += [usage.limit for usage in _cgroup(group)]
    return min(sizes, default=None)


def _meminfo(proc: Path, name: str) -> list[int]:
    """Return [the bytes in the line that begins with `name`]; [] if there is no such line.

    Such a line is, for example, "MemTotal: 1024 kB".
    """
    with suppress(OSError, ValueError):
        for line in proc.read_text().splitlines():
            label, _, value = line.partition(":")
            if label == name:
                return [int(value.removesuffix("kB")) * 1024]
    return []


class _Usage(NamedTuple):
    """The memory of a cgroup, in bytes.

    Attributes:
        limit: the most that the cgroup may use.
        used: what it uses now.
        idle: the part of `used` that holds cached files which were not read lately.
    """

    limit: int
    used: int
    idle: int


# For cgroups of version 2 and of version 1: the files with the limit, the use and the statistics, and the key of the
# idle pages in the statistics.
_GROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def _cgroup(group: Path) -> list[_Usage]:
    """Return [the memory of this process's cgroup]; [] if the cgroup has no limit."""
    for limit, used, statistics, idle in _GROUP_FILES:
        # This fails if there are no files of this version, or the limit is "max", which is no number.
        with suppress(OSError, ValueError, KeyError):
            lines = (line.split() for line in (group / statistics).read_text().splitlines())
            return [
                _Usage(
                    limit=int((group / limit).read_text()),
                    used=int((group / used).read_text()),
                    idle=int(dict(lines)[idle]),
                )
            ]
    return []
