"""From the name of a model to a runner: its dtype, context and device, and errors with their cause.

Must not know toy or paced runners.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from pearl.cache import Progress, silent
from pearl.config import ModelConfig
from pearl.errors import ModelError
from pearl.models.checkpoints.checkpoint import resolve_checkpoint
from pearl.models.checkpoints.direct import Decoder, read_decoder
from pearl.models.checkpoints.gguf import table_in
from pearl.models.checkpoints.gguf_weights import GgufWeights
from pearl.models.checkpoints.memory import (
    cache_bytes,
    check_cache_fits,
    check_room,
    fits_in_float32,
    needed,
)
from pearl.models.cpu import native
from pearl.models.families import OWN_FORWARD, TWINS
from pearl.models.forward.attention import plan_no_shapes, whole_blocks
from pearl.models.forward.linear_layers import multiplies_bf16, rounding_for
from pearl.models.gpu.recordings import PREFILL
from pearl.models.runner import ModelRunner
from pearl.printable import cause_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

_CHANGING_ROPES = ("longrope", "su")  # and all that are "dynamic"; "su" was longrope's first name
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_target_positions",
)  # of various families
DEFAULT_CONTEXT = 8192  # tokens; a cache is allocated whole, so a longer one only on request
Features = Literal["", "layers", "last"] | tuple[int, ...]  # see `load_runner`
# Model types whose language model has been compared with the whole. Others may store or compute it in their own way.
WRAPPERS = (
    *("gemma3", "gemma3n", "gemma4", "llama4", "llava", "mistral3"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"),
)
# Names in a checkpoint, as patterns -> names in a language model.
LANGUAGE_MODEL = {
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.(model\.)?": "model.",
}


def load_runner(
    wanted: ModelConfig,
    device: torch.device,
    progress: Progress = silent,
    features: Features = "",
    spare: int = 0,
) -> ModelRunner:
    """Load a model on `device`. Raises `ModelError`.

    Args:
        features: the hidden states to keep for a head: inputs of the layers with these numbers, or of three "layers"
            (EAGLE-3), which our own forward keeps; the "last" ones (multi-token prediction), which transformers' does;
            or none.
        spare: further slots, as far as memory allows, and see `ForwardRunner`.
    """
    from pearl.models.forward.layers import described, split_fused, tapped
    from pearl.models.forward.runner import ForwardRunner

    plan_no_shapes(device)
    spec, rounding = wanted.spec, wanted.rounding
    model, is_ours = _read(wanted, device, progress, features)
    with _explained(spec):
        if not is_ours:
            return _general_runner(wanted, model, features)
        split_fused(model, described(model)[0])
        count = len(model.model.layers)
        taps = features if isinstance(features, tuple) else ()
        if features == "layers":
            taps = tapped(count)
        if any(not 0 <= tap <= count for tap in taps):
            raise ModelError(
                f"Model {spec!r} has {count} layers, and its head reads the hidden states {[*taps]} "
                "(eagle_aux_hidden_state_layer_ids): it is a head of another model."
            )
        on_gpu = device.type == "cuda"
        if (
            wanted.role == "draft"
            and wanted.dtype == "auto"
            and not on_gpu
            and (rounding := rounding_for(model))
        ):
            model = model.to(torch.bfloat16)  # type: ignore[arg-type]
        context = context_of(spec, model, wanted.max_context)
        positions = whole_blocks(context) + (
            PREFILL if on_gpu else 0
        )  # see ForwardRunner, for both
        item = (
            model.dtype.itemsize
            if on_gpu or native.computes(model.model.embed_tokens.weight)
            else 4
        )
        each = cache_bytes(described(model)[1], positions, item)
        left = check_cache_fits(spec, model, context, each, wanted.slots)
        return ForwardRunner(
            model,
            context,
            slots=wanted.slots,
            spare=max(0, min(spare, left // 2)),
            records=wanted.forwards == "auto",
            rounding=rounding,
            taps=taps,
            progress=lambda layers: progress(f"loading {spec}: {layers}"),
        )


def _read(
    wanted: ModelConfig, device: torch.device, progress: Progress, features: Features
) -> tuple[PreTrainedModel | Decoder, bool]:
    """The model, and whether our own forward computes it."""
    from pearl.models.forward.runner import has_own_forward

    spec, keeps_bits = wanted.spec, wanted.dtype == "auto"
    is_general = wanted.forwards == "transformers" or features == "last"
    reads_directly = not (is_general or wanted.is_spread or wanted.trust_remote_code)
    path = resolve_checkpoint(spec, progress)
    kept = keeps_bits and reads_directly
    need = needed(
        path, wanted.weights, wanted.max_context, DEFAULT_CONTEXT, wanted.slots, keeps_bits=kept
    )
    if told := check_room(spec, need, device, torch.cuda.device_count() if wanted.is_spread else 1):
        progress(told)
    progress(f"loading {spec}")
    dtype = _dtype(path, device, wanted)
    if reads_directly:
        with _explained(spec):
            if (found := read_decoder(path, dtype, device, progress, keeps_bits)) is not None:
                return found, True
    model = _load(wanted, path, device, dtype)
    return model, not is_general and has_own_forward(model)


def _general_runner(wanted: ModelConfig, model: Any, features: Features) -> ModelRunner:
    """One through transformers. Raises `ModelError` for what only our own forward does."""
    from pearl.models.transformers.runner import HFRunner

    spec = wanted.spec
    theirs = f"Model {spec!r} ({type(model).__name__}) runs through transformers"
    if wanted.rounding:
        raise ModelError(
            f"Model {spec!r} cannot have its weights in {wanted.rounding}: that is for models of our own forward with "
            "--forwards auto or eager. Choose another dtype."
        )
    if features not in ("", "last"):
        raise ModelError(f"{theirs}, which keeps no hidden states, so it takes no head.")
    if wanted.slots > 1:
        raise ModelError(f"{theirs}, whose cache holds one sequence: leave slots at 1.")
    if wanted.exact:
        raise ModelError(
            f"{theirs}, where logits depend on how many tokens are fed together: texts may differ between methods at "
            "near ties, and --exact refuses that. Leave --exact off, or take a model of the Llama family with "
            "--forwards auto."
        )
    context = context_of(spec, model, wanted.max_context)
    runner = HFRunner(model, context, keeps_states=features == "last")
    check_cache_fits(spec, model, context, runner.cache_bytes, 1)
    return runner


def load_model(
    wanted: ModelConfig, device: torch.device, progress: Progress = silent
) -> PreTrainedModel:
    """The `transformers` model itself, for what needs more than a runner. Raises `ModelError`."""
    plan_no_shapes(device)
    path = resolve_checkpoint(wanted.spec, progress)
    progress(f"loading {wanted.spec}")
    return _load(wanted, path, device, _dtype(path, device, wanted))


def _dtype(path: Path, device: torch.device, wanted: ModelConfig) -> torch.dtype | None:
    """In which weights are loaded; None: the checkpoint's own."""
    if wanted.weights != "auto":
        found: torch.dtype = getattr(torch, wanted.weights)
        return found
    is_slow = device.type == "cpu" and not wanted.is_spread and not multiplies_bf16()
    return torch.float32 if is_slow and fits_in_float32(path) else None


def _load(
    wanted: ModelConfig, path: Path, device: torch.device, dtype: torch.dtype | None
) -> PreTrainedModel:
    """The model itself. transformers takes sdpa attention where the model has it, else eager."""
    import transformers
    from transformers.utils import logging as bars

    bars.disable_progress_bar()
    spec = wanted.spec
    with _explained(spec):
        more: dict[str, Any] = {}
        if not wanted.trust_remote_code and (text := language_model_of(path)) is not None:
            log.info("%s: loading its language model alone, a %s", spec, text.model_type)
            more = {"config": text, "key_mapping": LANGUAGE_MODEL}
            # It would list each weight of the encoders.
            logging.getLogger("transformers.modeling_utils").setLevel(logging.ERROR)
        kind: Any = transformers.AutoModelForCausalLM
        given: Path | None = path
        if (table := table_in(path)) is not None:
            config = transformers.AutoConfig.from_pretrained(path)
            weights = GgufWeights(table, OWN_FORWARD[config.architectures[0]].forward)
            more = {"config": config, "state_dict": weights.state_dict(dtype or torch.bfloat16)}
            kind, given = getattr(transformers, config.architectures[0]), None
        loaded: Any = kind.from_pretrained(
            given,
            **more,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            dtype=dtype or "auto",
            device_map="auto" if wanted.is_spread else {"": device},
            trust_remote_code=wanted.trust_remote_code,
        )
        model: PreTrainedModel
        model, found = loaded
        if unfit := _unfit_weights(model, found):
            raise ValueError(unfit)
    places = getattr(model, "hf_device_map", {}).values()
    if device.type == "cuda" and any(
        str(place) in ("cpu", "disk") for place in places
    ):  # seconds for each token
        raise ModelError(
            f"Model {spec!r} does not fit into GPU memory. Use more GPUs, a smaller model or a smaller dtype."
        )
    return model


def language_model_of(path: Path) -> PreTrainedConfig | None:
    """The configuration of the language model in a checkpoint that also reads pictures or sound; None: it is no such.

    Such have its weights under `language_model.`, with or without a `model.` before or behind, and those of encoders
    beside them, which stay on disk.  Raises what transformers raises.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if (
        config.model_type not in WRAPPERS
        or (text := config.get_text_config(decoder=True)) is config
    ):
        return None
    if twin := TWINS.get(text.model_type):
        given = {name: value for name, value in text.to_dict().items() if name != "model_type"}
        rope = {
            name: value
            for name, value in given["rope_parameters"].items()
            if not name.startswith("mrope")
        }
        has_experts = twin == "qwen3_moe"
        more = {"norm_topk_prob": True} if has_experts else {}  # what its twin may leave undone
        text = AutoConfig.for_model(twin, **{**given, **more, "rope_parameters": rope})
        if has_experts:  # transformers turns stored experts by this name
            text.model_type = config.model_type  # type: ignore[misc]
    text.tie_word_embeddings = (
        config.tie_word_embeddings
    )  # where a head of its own is found, transformers unties it
    text.dtype = text.dtype or config.dtype
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantised
    return text


def _unfit_weights(model: Any, found: dict[str, Any]) -> str:
    """A sentence on weights that are in no file, or have another shape there; empty where there are none.

    transformers fills missing weights with random numbers, and missing learned buffers with zeros or ones. Buffers that
    it computes from the configuration, frequencies and masks, have other values.

    Args:
        found: the loading info of `from_pretrained` with `ignore_mismatched_sizes`.
    """
    absent = found["missing_keys"]
    learned = {name for name, _ in model.named_parameters()}
    learned |= {
        name for name, buffer in model.named_buffers() if name in absent and _is_flat(buffer)
    }
    if missing := sorted(absent & learned):
        return f"{len(missing)} of its weights are in no file, {missing[0]} for one"
    for name, shape, wanted in sorted(found["mismatched_keys"]):
        return f"its weight {name} has the shape {list(shape)} where {list(wanted)} is expected"
    return ""


def _is_flat(buffer: Any) -> bool:
    """Whether it is all zeros or all ones."""
    return buffer.is_floating_point() and any(bool((buffer == usual).all()) for usual in (0, 1))


@contextmanager
def _explained(spec: str) -> Iterator[None]:
    """Turn whatever transformers raises while it loads into a `ModelError` with cause and advice.

    They have no common base: OSError, ValueError, KeyError, ImportError, the hub's own, safetensors' own.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"Model {spec!r} could not be loaded: {cause_of(error)}. {_advice(error)}"
        ) from error


def _advice(error: Exception) -> str:
    text = str(error).lower()
    if (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or "alloc" in text
        or "out of memory" in text
    ):
        return "Memory ran out: take a smaller model, dtype or max_context, or spread the target over GPUs."
    if "configuration class" in text or "unrecognized model" in text or "model type" in text:
        return "It is not a causal language model that the installed transformers knows."
    if isinstance(error, ImportError):
        return "Install what it asks for."
    return "Check that the files are complete and belong to a causal language model."


def context_of(spec: str, model: PreTrainedModel | Decoder, wanted: int | None) -> int:
    """Return the number of tokens that the cache holds. A model that names no limit gets the default."""
    config = model.config.get_text_config(decoder=True)
    limit = min(
        (named for name in _POSITIONS if (named := getattr(config, name, None))), default=None
    )
    steady = _steady_positions(config)
    if steady is not None and steady < 1:
        raise ModelError(
            f"Model {spec!r} cannot be used: its rope's original maximum of positions is {steady}."
        )
    if steady is not None and (limit is None or steady < limit):
        if wanted is not None and wanted > steady:
            raise ModelError(
                f"max_context {wanted} is beyond the {steady} positions up to which the rope of {spec!r} is the same: "
                "longer texts turn all keys otherwise, and those in the cache are turned already. "
                f"Give max_context {steady} or less."
            )
        if wanted is None and steady < min(limit or DEFAULT_CONTEXT, DEFAULT_CONTEXT):
            log.warning(
                "the context of %r is %d tokens: beyond, its rope changes with the length",
                spec,
                steady,
            )
        limit = steady
    if wanted is None:
        return min(limit or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if wanted < 1 or (limit and wanted > limit):
        raise ModelError(
            f"max_context {wanted} is not within 1 and the {limit} positions of {spec!r}."
        )
    return wanted


def _steady_positions(config: Any) -> int | None:
    """Positions within which the rope's angles do not depend on the text's length; None: they never do.

    transformers chooses the angles of each forward by its largest position ("longrope": long or short factors;
    "dynamic": a growing base).  Keys that are in the cache keep their angles, so the logits would depend on how the
    text was cut into forwards: on method, window and chunks of the prompt.
    """
    names = ("original_max_position_embeddings", "max_position_embeddings")
    own = [getattr(config, name, None) for name in names]
    # Some configurations write 4096.0.
    limits = [
        int(limit)
        for rope in _changing_ropes(config)
        for limit in (rope.get(names[0]), *own)
        if limit
    ]
    return min(limits, default=None)


def _changing_ropes(config: Any) -> list[dict[str, Any]]:
    """The ropes whose angles depend on the length; some models have one for each kind of layer."""
    named = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(named, dict):
        return []
    ropes = [named, *(rope for rope in named.values() if isinstance(rope, dict))]
    kinds = [(rope, str(rope.get("rope_type", rope.get("type", "")))) for rope in ropes]
    return [rope for rope, kind in kinds if kind in _CHANGING_ROPES or "dynamic" in kind]
