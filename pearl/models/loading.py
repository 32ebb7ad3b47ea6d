"""From the name of a model to a runner: its dtype, context and device, and errors with their cause.

It must not know toy or paced runners, nor roles.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pearl.cache import Progress, silent
from pearl.errors import ModelError
from pearl.models.attention import plan_no_shapes, whole_blocks
from pearl.models.checkpoint import resolve_checkpoint
from pearl.models.direct import Decoder, read_decoder
from pearl.models.gguf import unfit_weights
from pearl.models.hub import in_cache
from pearl.models.kept_matrices import findings_of
from pearl.models.matrices import Rounding, multiplies_bf16, rounding_for
from pearl.models.memory import available_memory, cache_bytes, check_room, gigabytes, needed
from pearl.models.runner import ModelRunner
from pearl.models.shard import ALONE, Group, cut
from pearl.printable import cause_of

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
    slots: int = 1,
    spare: int = 0,
    may_round: bool = False,
) -> ModelRunner:
    """Load the model named `spec` (see `resolve_checkpoint`) on `device`, or over GPUs by `device_map`. In a `group` of
    several ranks, load this rank's part.

    `dtype` is "auto" (the checkpoint's own; bfloat16 for a GGUF file; in its place, on a CPU without the instructions,
    float32; and on a CPU, where the forward is ours, 4 bits for weights that are so already), "float32", "bfloat16",
    "float16", or, on a CPU and where the forward is ours, bfloat16 with rounded matrices: "int8" (each row in 255
    steps) or "int4" (each 32 weights in 16 steps).  `exact` refuses a runner that is not row-invariant.  `may_round`:
    whether "auto" may be one of these where that is faster (see `rounding_for`).  `slots`: sequences that it must hold
    side by side; `spare`: how many more there may be room for, on a CPU.  `max_context` in tokens; None takes the
    model's own, up to 8192.  `forwards` "transformers" keeps their forward where "auto" has a faster one; "eager" has
    that one too, but records nothing.
    Raises `ModelError`.
    """
    from pearl.models.llama import FAMILY, LlamaRunner, is_llama

    plan_no_shapes(device)
    # A shared one is loaded whole on the CPU and then cut: safetensors are mapped, so a rank reads only its part.
    # (Where the dtype is to change, and of other files, the whole passes through host memory.)
    place = torch.device("cpu") if group.size > 1 else device
    rounding: Rounding = dtype if dtype in ("int8", "int4") else ""  # type: ignore[assignment]
    dtype = "bfloat16" if rounding else dtype
    path = resolve_checkpoint(spec, progress, dtype)
    files = Path(path) if Path(path).is_dir() else in_cache(path)
    wide = FAMILY if device.type == "cpu" and forwards != "transformers" else ()
    need = needed(files, dtype, max_context, DEFAULT_CONTEXT, group.size, slots, wide) if files else None
    if told := check_room(spec, need, device, torch.cuda.device_count() if device_map is not None else 1):
        progress(told)
    progress(f"loading {spec}")
    arguments = _arguments(path, place, dtype, device_map)
    wanted = None if arguments["dtype"] == "auto" else arguments["dtype"]
    rounds = dtype == "auto" and device.type == "cpu" and device_map is None and group.size == 1
    model: PreTrainedModel | Decoder | None = None
    if forwards != "transformers" and device_map is None and not trust_remote_code:
        with _explained(spec):  # in its own dtype where it may be rounded: it need not be in float32 meanwhile
            model = read_decoder(Path(path), None if rounds else wanted, place, progress)
    ours = model is not None
    if model is None:
        model = _load(spec, path, arguments | {"trust_remote_code": trust_remote_code}, device)
        ours = forwards != "transformers" and is_llama(model)
    _check_takes(spec, model, ours, rounding, slots, device, group)
    with _explained(spec):
        if group.size > 1:
            cut(model, group, device)
        context = _context(spec, model, max_context)
        if rounds and ours:
            rounding = rounding_for(model, may_round)
            chosen = torch.bfloat16 if rounding else wanted
            model = model if chosen is None else model.to(chosen)  # type: ignore[arg-type]
        left = _check_cache_fits(spec, model, context, ours, slots)
        slots += min(spare, left // 2) if device.type == "cpu" else 0
        runner: ModelRunner
        if ours:
            known = None
            if isinstance(model, Decoder) and device.type == "cpu" and group.size == 1:
                known = findings_of(Path(path), rounding, str(model.dtype))
            records = forwards == "auto"
            runner = LlamaRunner(model, context, group, slots=slots, records=records, rounding=rounding, findings=known)
        else:
            from pearl.models.hf import HFRunner

            assert not isinstance(model, Decoder)
            runner = HFRunner(model, context)
        if exact:
            _check_exact(spec, model, runner, dtype)
        return runner


def _check_takes(
    spec: str, model: object, ours: bool, rounding: Rounding, slots: int, device: torch.device, group: Group
) -> None:
    """Raises `ModelError` for what only our own forward does, where the model has another."""
    if rounding and (device.type != "cpu" or not ours or group.size > 1):
        raise ModelError(
            f"Model {spec!r} cannot have its weights in {rounding}: that is for one CPU worker, and for models of the "
            "Llama family with --forwards auto or eager. Choose another dtype."
        )
    theirs = f"Model {spec!r} ({type(model).__name__}) runs through transformers"
    if group.size > 1 and not ours:
        raise ModelError(
            f"{theirs}, and ranks can share only what our own forward pass computes. Leave target_tp and draft_tp at "
            "1; a target can be spread: --target-device cuda:0-1."
        )
    if slots > 1 and not ours:
        raise ModelError(f"{theirs}, whose cache holds one sequence: leave slots at 1.")


def _check_exact(spec: str, model: object, runner: ModelRunner, dtype: str) -> None:
    """Raises `ModelError` where a row's bits depend on its company."""
    if runner.capabilities.row_invariant:
        return
    from pearl.models.llama import LlamaRunner

    if isinstance(runner, LlamaRunner):
        raise ModelError(
            f"Model {spec!r}: on this machine its {dtype} products depend on how many rows are computed together. "
            "Choose another dtype, or leave --exact off."
        )
    raise ModelError(
        f"Model {spec!r} ({type(model).__name__}) runs through transformers, where logits depend on how many tokens "
        "are fed together: texts may differ between methods at near ties, and --exact refuses that. Leave --exact off, "
        "or take a model of the Llama family with --forwards auto."
    )


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
    plan_no_shapes(device)
    path = resolve_checkpoint(spec, progress, dtype)
    progress(f"loading {spec}")
    arguments = _arguments(path, device, dtype, device_map) | {"trust_remote_code": trust_remote_code}
    return _load(spec, path, arguments, device)


def _arguments(path: str, device: torch.device, dtype: str, device_map: str | dict[str, Any] | None) -> dict[str, Any]:
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ModelError(f"Unknown dtype {dtype!r}: choose auto, float32, bfloat16, float16, int8 or int4.")
    wanted: Any = dtype if dtype == "auto" else getattr(torch, dtype)
    if dtype == "auto" and device.type == "cpu" and not device_map and not multiplies_bf16():
        wanted = torch.float32 if _fits_in_float32(path) else "auto"
    return {"dtype": wanted, "device_map": device_map or {"": device}}


def _fits_in_float32(path: str) -> bool:
    """Whether half the free memory holds the weights in float32, as far as the sizes of local files tell.

    Four bytes a weight: twice a file of bfloat16.
    """
    size = 2 * sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    free = available_memory()
    return free is None or 2 * size < free


def _load(spec: str, path: str, arguments: dict[str, Any], device: torch.device) -> PreTrainedModel:
    """The model itself. transformers takes sdpa attention where the model has it, else eager."""
    from transformers import AutoModelForCausalLM

    with _explained(spec), _no_progress_bars():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, output_loading_info=True, ignore_mismatched_sizes=True, **arguments
        )
        model: PreTrainedModel
        model, found = loaded
        if unfit := unfit_weights(model, found):
            raise ValueError(unfit)
    _refuse_offloaded(spec, model, device)
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
        raise ModelError(f"Model {spec!r} could not be loaded: {cause_of(error)}. {_advice(error)}") from error


def _advice(error: Exception) -> str:
    text = str(error).lower()
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "alloc" in text or "out of memory" in text:
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


def _check_cache_fits(spec: str, model: PreTrainedModel | Decoder, context: int, ours: bool, slots: int) -> int:
    """How many more such caches than `slots` fit into memory. Raises `ModelError` where these do not: pages are taken
    only as they fill.
    """
    named = model.config.get_text_config(decoder=True)  # which finds what other families call otherwise
    names = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "hidden_size", "head_dim")
    if getattr(named, "is_heterogeneous", False):
        return 0  # layers have heads of several sizes, and the buffers are made as they fill
    config = {name: getattr(named, name, None) for name in names}
    if not config["num_attention_heads"]:
        return 0  # no such attention: the runner refuses it by name
    item, positions = model.dtype.itemsize, context
    if ours:  # see LlamaRunner
        item, positions = item if multiplies_bf16() else 4, whole_blocks(context)
    each = cache_bytes(config, positions, item)
    takes, free = slots * each, available_memory()
    if model.device.type == "cpu" and free is not None and takes > free:
        raise ModelError(
            f"The KV cache of {spec!r} for {f'{slots} times ' * (slots > 1)}{context} tokens takes {gigabytes(takes)}, "
            f"and {gigabytes(free)} are free. Lower max_context{' or slots' * (slots > 1)}, or end what else runs."
        )
    return 0 if free is None else free // each - slots


# What families call the number of positions that they were made for.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")


def _context(spec: str, model: PreTrainedModel | Decoder, wanted: int | None) -> int:
    """Return the number of tokens that the cache holds. A model that names no limit gets the default."""
    config = model.config.get_text_config(decoder=True)
    limit = min((named for name in _POSITIONS if (named := getattr(config, name, None))), default=None)
    steady = _steady_positions(config)
    if steady is not None and steady < 1:
        raise ModelError(f"Model {spec!r} cannot be used: its rope's original maximum of positions is {steady}.")
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
    # Some write it as 4096.0. A context is a number of tokens.
    limits = [int(limit) for rope in _ropes(config) for limit in (rope.get(names[0]), *own) if limit]
    return min(limits, default=None)


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The ropes whose angles depend on the length; some models have one for each kind of layer."""
    named = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(named, dict):
        return []
    nested = [rope for rope in named.values() if isinstance(rope, dict)]
    kinds = [(rope, str(rope.get("rope_type", rope.get("type", "")))) for rope in (named, *nested)]
    return [rope for rope, kind in kinds if kind in _CHANGING or "dynamic" in kind]
