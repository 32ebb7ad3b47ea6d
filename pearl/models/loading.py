"""From the name of a model to a runner: its dtype, context and device, and errors with their cause.

It must not know toy or paced runners, nor roles.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pearl.errors import ModelError
from pearl.models.attention import whole_blocks
from pearl.models.checkpoint import Checkpoint, resolve_checkpoint
from pearl.models.embedded import Progress, dequantised, silent
from pearl.models.matrices import Rounding, multiplies_bf16
from pearl.models.runner import ModelRunner
from pearl.models.shard import ALONE, Group, cut

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_CHANGING = ("longrope", "su")  # and all that are "dynamic"; "su" is what longrope was called at first
DEFAULT_CONTEXT = 8192  # tokens; a cache is allocated whole, so the longest context is taken only when asked for


def load_runner(
    spec: str,
    *,
    device: torch.device,
    dtype: str = "auto",
    max_context: int | None = None,
    device_map: str | dict[str, Any] | None = None,
    forwards: str = "auto",
    trust_remote_code: bool = False,
    progress: Progress = silent,
    group: Group = ALONE,
    exact: bool = False,
) -> ModelRunner:
    """Load the model named `spec` (see `resolve_checkpoint`) on `device`, or over GPUs by `device_map`. In a `group` of
    several ranks, load this rank's part.

    `dtype` is "auto" (the checkpoint's own; bfloat16 for a GGUF file; float32 in their place on a CPU without the
    instructions), "float32", "bfloat16", "float16", or, on a CPU and where the forward is ours, bfloat16 with rounded
    matrices: "int8" (each row in 255 steps) or "int4" (each 32 weights in 16 steps).  `exact` refuses a runner that is
    not row-invariant.  `max_context` in tokens; None takes the model's own, up to 8192.  `forwards` "transformers"
    keeps their forward where "auto" has a faster one; "eager" has that one too, but records nothing.  Raises
    `ModelError`.
    """
    from pearl.models.hf import HFRunner
    from pearl.models.llama import LlamaRunner, is_llama

    # A shared one is loaded whole on the CPU and then cut: safetensors are mapped, so a rank reads only its part.
    # (Where the dtype is to change, and of other files, the whole passes through host memory.)
    place = torch.device("cpu") if group.size > 1 else device
    rounding: Rounding = dtype if dtype in ("int8", "int4") else ""  # type: ignore[assignment]
    dtype = "bfloat16" if rounding else dtype
    model = load_model(
        spec, device=place, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code, progress=progress
    )
    ours = forwards != "transformers" and is_llama(model)
    if rounding and (device.type != "cpu" or not ours or group.size > 1):
        raise ModelError(
            f"Model {spec!r} cannot have its weights in {rounding}: that is for one CPU worker, and for models of the "
            "Llama family with --forwards auto or eager. Choose another dtype."
        )
    with _explained(spec):
        if group.size > 1:
            if not ours:
                raise ModelError(
                    f"Model {spec!r} ({type(model).__name__}) runs through transformers, and ranks can share only what "
                    "our own forward pass computes. Leave target_tp and draft_tp at 1; a target can be spread: "
                    "--target-device cuda:0-1."
                )
            cut(model, group, device)
        context = _context(spec, model, max_context)
        _check_cache_fits(spec, model, context, ours)
        runner: ModelRunner
        if ours:
            runner = LlamaRunner(model, context, group, records=forwards == "auto", rounding=rounding)
        else:
            runner = HFRunner(model, context)
        if exact and not runner.capabilities.row_invariant:
            raise ModelError(
                f"Model {spec!r} ({type(model).__name__}) runs through transformers, where logits depend on how many "
                "tokens are fed together: texts may differ between methods at near ties, and --exact refuses that. "
                "Leave --exact off, or take a model of the Llama family with --forwards auto."
                if not ours
                else f"Model {spec!r}: on this machine its {dtype} products depend on how many rows are computed "
                "together. Choose another dtype, or leave --exact off."
            )
        return runner


def load_model(
    spec: str,
    *,
    device: torch.device,
    dtype: str = "auto",
    device_map: str | dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> PreTrainedModel:
    """The `transformers` model itself, for what needs more than a runner. Arguments and errors as `load_runner`'s."""
    checkpoint = resolve_checkpoint(spec, progress)
    progress(f"loading {spec}")
    arguments = _arguments(checkpoint, device, dtype, device_map) | {"trust_remote_code": trust_remote_code}
    model = _load(spec, checkpoint, arguments)
    _refuse_offloaded(spec, model, device)
    return model


def _arguments(
    checkpoint: Checkpoint, device: torch.device, dtype: str, device_map: str | dict[str, Any] | None
) -> dict[str, Any]:
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ModelError(f"Unknown dtype {dtype!r}: choose auto, float32, bfloat16, float16, int8 or int4.")
    wanted: Any = dtype if dtype == "auto" else getattr(torch, dtype)
    if dtype == "auto" and device.type == "cpu" and not device_map and not multiplies_bf16():
        wanted = torch.float32 if _fits_in_float32(checkpoint) else "auto"
    arguments: dict[str, Any] = {"dtype": wanted, "device_map": device_map or {"": device}}
    if checkpoint.gguf_file is None:
        return arguments
    if wanted == "auto":
        arguments["dtype"] = torch.bfloat16  # packed weights name none, and transformers would take float32
    return arguments | {"gguf_file": checkpoint.gguf_file} | dequantised()


def _fits_in_float32(checkpoint: Checkpoint) -> bool:
    """Whether half the free memory holds the weights in float32, as far as the sizes of local files tell.

    Four bytes a weight: twice a file of bfloat16, eight times one of 4 bits.
    """
    directory = Path(checkpoint.path)
    if checkpoint.gguf_file is not None:
        size = 8 * (directory / checkpoint.gguf_file).stat().st_size
    else:
        size = 2 * sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    free = available_memory()
    return free is None or 2 * size < free


def _load(spec: str, checkpoint: Checkpoint, arguments: dict[str, Any]) -> PreTrainedModel:
    """The model itself. transformers takes sdpa attention where the model has it, else eager."""
    from transformers import AutoModelForCausalLM

    with _explained(spec), _no_progress_bars():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint.path, **arguments)
    return model


@contextmanager
def _explained(spec: str) -> Iterator[None]:
    """Turns whatever transformers raises while it loads into a `ModelError` with cause and advice.

    They have no common base: OSError, ValueError, KeyError, ImportError, the hub's own, safetensors' own.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        cause = lines[0].rstrip(".")
        raise ModelError(f"Model {spec!r} could not be loaded: {cause}. {_advice(error)}") from error


def _advice(error: Exception) -> str:
    text = str(error).lower()
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "alloc" in text:
        return "Memory ran out: take a smaller model, dtype or max_context, or spread it with device_map auto."
    if "configuration class" in text or "unrecognized model" in text or "model type" in text:
        return "It is not a causal language model that the installed transformers knows."
    if "connect" in text or "offline" in text or "resolve" in text:
        return "Check the network or $HF_ENDPOINT, or give a local directory."
    if "gated" in text or "401" in text or "not a valid model identifier" in text:
        return "Check the name; a gated or private model needs `hf auth login`."
    if isinstance(error, ImportError):
        return "Install what it asks for."
    return "Check that the files are complete and belong to a causal language model."


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _refuse_offloaded(spec: str, model: PreTrainedModel, device: torch.device) -> None:
    """Raise `ModelError` where a device map has put layers on the CPU or disk: each token would take seconds."""
    places = getattr(model, "hf_device_map", {}).values()
    if device.type == "cuda" and any(str(place) in ("cpu", "disk") for place in places):
        raise ModelError(
            f"Model {spec!r} does not fit into GPU memory. Use more GPUs, a smaller model or a smaller dtype."
        )


def _check_cache_fits(spec: str, model: PreTrainedModel, context: int, ours: bool) -> None:
    """Raise `ModelError` where the cache would not fit into memory: on a CPU its pages are taken only as it fills."""
    config = model.config.get_text_config(decoder=True)
    queries = getattr(config, "num_attention_heads", None)
    if not queries:
        return  # no such attention: the runner refuses it by name
    heads = getattr(config, "num_key_value_heads", None) or queries
    width = getattr(config, "head_dim", None) or config.hidden_size // queries
    item, positions = model.dtype.itemsize, context
    if ours:  # see LlamaRunner
        item, positions = item if multiplies_bf16() else 4, whole_blocks(context)
    needed = 2 * config.num_hidden_layers * heads * width * positions * item
    free = available_memory()
    if model.device.type == "cpu" and free is not None and needed > free:
        raise ModelError(
            f"The KV cache of {spec!r} for {context} tokens takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are "
            "free. Lower max_context, or end what else runs."
        )


def available_memory(proc: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process could still take, by the kernel's estimate and its control group; None: unknown."""
    found = []
    with suppress(OSError, ValueError):
        lines = dict(line.split(":", 1) for line in proc.read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    with suppress(OSError, ValueError):  # "max" is no number: no limit
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(found, default=None)


def _context(spec: str, model: PreTrainedModel, wanted: int | None) -> int:
    """Return the number of tokens that the cache holds. A model that names no limit gets the default."""
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    steady = _steady_positions(config)
    if steady is not None and (limit is None or steady < limit):
        if wanted is not None and wanted > steady:
            raise ModelError(
                f"max_context {wanted} is beyond the {steady} positions up to which the rope of {spec!r} is the same: "
                "longer texts turn all keys otherwise, and those in the cache are turned already. "
                f"Give max_context {steady} or less."
            )
        if wanted is None and steady < min(limit or DEFAULT_CONTEXT, DEFAULT_CONTEXT):
            log.warning("the context of %r is %d tokens: beyond, its rope changes with the length", spec, steady)
        limit = steady
    if wanted is None:
        return min(limit or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if wanted < 1 or (limit and wanted > limit):
        raise ModelError(f"max_context {wanted} is not within 1 and the {limit} positions of {spec!r}.")
    return wanted


def _steady_positions(config: Any) -> int | None:
    """Positions within which the rope's angles do not depend on how long the text is; None: they never do.

    transformers chooses the angles of each forward by its largest position ("longrope": long or short factors;
    "dynamic": a base that grows). A key that went into the cache before keeps the others, and which those are
    depends on how the text was cut into forwards: so on method, window and chunks of the prompt.
    """
    names = ("original_max_position_embeddings", "max_position_embeddings")
    own = [getattr(config, name, None) for name in names]
    limits = [limit for rope in _ropes(config) for limit in (rope.get(names[0]), *own) if limit]
    return min(limits, default=None)


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The ropes whose angles depend on the length; some models have one for each kind of layer."""
    named = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(named, dict):
        return []
    nested = [rope for rope in named.values() if isinstance(rope, dict)]
    kinds = [(rope, str(rope.get("rope_type", rope.get("type", "")))) for rope in (named, *nested)]
    return [rope for rope, kind in kinds if kind in _CHANGING or "dynamic" in kind]
