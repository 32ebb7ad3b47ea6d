"""Loads a named model into a runner: chooses its dtype, context and forward, and explains errors.

This module must not know toy or paced runners.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from pearl.cache import Progress, silent
from pearl.config import ModelConfig
from pearl.errors import ModelError
from pearl.models.checkpoints.checkpoint import resolve_checkpoint
from pearl.models.checkpoints.direct import Unsupported, UnsupportedWeights, read_decoder
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
from pearl.models.forward.decoder import Decoder
from pearl.models.forward.linear_layers import multiplies_bf16, rounding_for
from pearl.models.gpu.check import KernelsUnfit
from pearl.models.gpu.recordings import PREFILL
from pearl.models.runner import ModelRunner
from pearl.printable import cause_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

# Types of rope whose angles depend on the text's length. Those of "dynamic" types do, too. "su" was
# longrope's first name.
_CHANGING_ROPES = ("longrope", "su")
_POSITIONS = (  # names of the context's length in various families
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_target_positions",
)
DEFAULT_CONTEXT = 8192  # tokens; longer only on request, because a cache is allocated whole
Features = Literal["", "layers", "last"] | tuple[int, ...]  # see `load_runner`
# Types of multimodal models whose language model, run alone, has been compared with the whole model. Other types may
# store or compute their language model in another way.
WRAPPERS = (
    "gemma3",
    "gemma3n",
    "gemma4",
    "llama4",
    "llava",
    "mistral3",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
)
# Names in a checkpoint, as patterns -> names in a language model.
LANGUAGE_MODEL = {
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.(model\.)?": "model.",
}


def load_runner(
    config: ModelConfig,
    device: torch.device,
    progress: Progress = silent,
    features: Features = "",
    spare: int = 0,
) -> ModelRunner:
    """Load a model on `device`. Raises `ModelError`.

    Args:
        features: the hidden states to keep for a head:
            "": none;
            numbers: the inputs of these layers, which our own forward keeps;
            "layers": the inputs of the three layers of `layers.tapped` (EAGLE-3), which our own forward keeps;
            "last": the last hidden states (multi-token prediction), which a runner through transformers keeps.
        spare: how many slots our own forward adds to `config.slots`, as far as memory allows.
    """
    plan_no_shapes(device)
    spec = config.spec
    with _explained(spec):
        model, is_ours = _read(config, device, progress, features)
    if is_ours:
        try:
            with _explained(spec):
                return _own_runner(config, model, device, progress, features, spare)
        except KernelsUnfit as reason:
            log.warning("%s runs through transformers, slower: %s", spec, reason)
        path = resolve_checkpoint(spec, progress)
        del model
        gc.collect()  # CUDA graphs are in reference cycles, which hold the weights
        with _explained(spec):
            model = _load(config, path, device, _dtype(path, device, config))
    with _explained(spec):
        return _general_runner(config, model, features)


def _own_runner(
    config: ModelConfig,
    model: Any,
    device: torch.device,
    progress: Progress,
    features: Features,
    spare: int,
) -> ModelRunner:
    """Return a runner of our own forward. Raises `KernelsUnfit` as `KernelRunner` does."""
    from pearl.models.forward.layers import described, split_fused
    from pearl.models.own_forward import own_runner

    spec = config.spec
    on_gpu = device.type == "cuda"
    forward, settings = described(model)
    layers = model.model.layers
    taps = _taps(spec, features, len(layers))
    rounding = config.rounding
    if config.role == "draft" and config.dtype == "auto" and not on_gpu:
        split_fused(layers[0], forward, settings)
        rounding = rounding_for(model)
        if rounding:
            # Buffers are not rounded: transformers keeps a rope's frequencies in them, and rounded
            # frequencies would turn later positions by other angles.
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
    context = context_of(spec, model, config.max_context)
    positions = whole_blocks(context) + (PREFILL if on_gpu else 0)  # as the runners allocate
    in_own_dtype = on_gpu or native.computes(model.model.embed_tokens.weight)
    item = model.dtype.itemsize if in_own_dtype else 4
    slot_bytes = cache_bytes(settings, positions, item)
    free_slots = check_cache_fits(spec, model, context, slot_bytes, config.slots)
    runner = own_runner(
        model,
        context,
        slots=config.slots + max(0, min(spare, free_slots // 2)),
        rounding=rounding,
        rounds_rows=config.rows == "int8",
        taps=taps,
        progress=lambda layers: progress(f"loading {spec}: {layers}"),
    )
    if config.rows != "auto" and not runner.rounds_rows:
        log.warning(
            "%s: rows %s changes nothing here: it is for weights of 4 to 6 bits on a CPU with AVX2",
            spec,
            config.rows,
        )
    return runner


def _taps(spec: str, features: Features, count: int) -> tuple[int, ...]:
    """Return the numbers of the layers whose inputs are kept for a head.

    Raises `ModelError` if a model with `count` layers lacks one of them.

    Args:
        features: see `load_runner`.
    """
    from pearl.models.forward.layers import tapped

    if isinstance(features, tuple):
        taps = features
    else:
        taps = ()
    if features == "layers":
        taps = tapped(count)
    if any(not 0 <= tap <= count for tap in taps):
        raise ModelError(
            f"Model {spec!r} has {count} layers, and its head reads the hidden states {list(taps)} "
            "(eagle_aux_hidden_state_layer_ids): it is a head of another model."
        )
    return taps


def _read(
    config: ModelConfig, device: torch.device, progress: Progress, features: Features
) -> tuple[PreTrainedModel | Decoder, bool]:
    """Return the model, and whether our own forward computes it."""
    from pearl.models.own_forward import has_own_forward

    spec = config.spec
    keeps_bits = config.dtype == "auto"
    is_general = config.forwards == "transformers" or features == "last"
    reads_directly = not (is_general or config.is_spread or config.trust_remote_code)
    path = resolve_checkpoint(spec, progress)
    need = needed(
        path,
        config.weights,
        config.max_context,
        DEFAULT_CONTEXT,
        config.slots,
        keeps_bits=keeps_bits and reads_directly,
        on_gpu=device.type == "cuda",
    )
    gpus = 1
    if config.is_spread:
        gpus = torch.cuda.device_count()
    report = check_room(spec, need, device, gpus)
    if report:
        progress(report)
    progress(f"loading {spec}")
    dtype = _dtype(path, device, config)
    if reads_directly:
        try:
            return read_decoder(path, dtype, device, progress, keeps_bits), True
        except Unsupported as reason:
            log_unsupported(path, reason)
    model = _load(config, path, device, dtype)
    return model, not is_general and has_own_forward(model)


def log_unsupported(path: Path, reason: Unsupported) -> None:
    """Log why a checkpoint is left to transformers.

    It is a warning if the reason is the checkpoint's quantised weights.
    """
    if isinstance(reason, UnsupportedWeights):
        log.warning(
            "%s (quantization_config of config.json): our own forward does not read its weights, transformers may: %s",
            path,
            reason,
        )
    else:
        log.info("%s is left to transformers: %s", path, reason)


def _general_runner(config: ModelConfig, model: Any, features: Features) -> ModelRunner:
    """Return a runner through transformers. Raises `ModelError` for options that only our own forward has."""
    from pearl.models.transformers.runner import HFRunner

    spec = config.spec
    theirs = f"Model {spec!r} ({type(model).__name__}) runs through transformers"
    if config.rounding:
        raise ModelError(
            f"Model {spec!r} cannot have its weights in {config.rounding}: that is for models of our own forward with "
            "--forwards auto. Choose another dtype."
        )
    if config.rows != "auto":
        raise ModelError(
            f"{theirs}, which does not round rows to {config.rows}: leave rows at auto."
        )
    if features not in ("", "last"):
        raise ModelError(f"{theirs}, which keeps no hidden states, so it takes no head.")
    if config.slots > 1:
        raise ModelError(f"{theirs}, whose cache holds one sequence: leave slots at 1.")
    if config.exact:
        raise ModelError(
            f"{theirs}, where logits depend on how many tokens are fed together: texts may differ between methods at "
            "near ties, and --exact refuses that. Leave --exact off, or take a model of the Llama family with "
            "--forwards auto."
        )
    context = context_of(spec, model, config.max_context)
    runner = HFRunner(model, context, keeps_states=features == "last")
    check_cache_fits(spec, model, context, runner.cache_bytes, 1)
    return runner


def load_model(
    config: ModelConfig, device: torch.device, progress: Progress = silent
) -> PreTrainedModel:
    """Load the `transformers` model itself, for callers that need more than a runner. Raises `ModelError`."""
    plan_no_shapes(device)
    path = resolve_checkpoint(config.spec, progress)
    progress(f"loading {config.spec}")
    with _explained(config.spec):
        return _load(config, path, device, _dtype(path, device, config))


def _dtype(path: Path, device: torch.device, config: ModelConfig) -> torch.dtype | None:
    """Return the dtype to load weights in; None: the checkpoint's own."""
    if config.weights != "auto":
        dtype: torch.dtype = getattr(torch, config.weights)
        return dtype
    if config.rounding and device.type == "cuda":
        return torch.bfloat16  # the dtype in which our kernels multiply rounded weights
    is_slow = device.type == "cpu" and not config.is_spread and not multiplies_bf16()
    if is_slow and fits_in_float32(path):
        return torch.float32
    return None


def _load(
    config: ModelConfig, path: Path, device: torch.device, dtype: torch.dtype | None
) -> PreTrainedModel:
    """Load a model with transformers, which uses sdpa attention if the model has it, otherwise eager attention."""
    from transformers.utils import logging as bars

    bars.disable_progress_bar()
    loader = _loader(config, path, dtype)
    loaded = loader(
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        dtype=dtype or "auto",
        device_map="auto" if config.is_spread else {"": device},
        trust_remote_code=config.trust_remote_code,
    )
    model: PreTrainedModel
    model, loading_info = loaded
    problem = _unfit_weights(model, loading_info)
    if problem:
        raise ValueError(problem)
    places = getattr(model, "hf_device_map", {}).values()
    # A model that is partly on the CPU or the disk takes seconds for each token.
    if device.type == "cuda" and not {"cpu", "disk"}.isdisjoint(map(str, places)):
        raise ModelError(
            f"Model {config.spec!r} does not fit into GPU memory. Use more GPUs, a smaller model or a smaller dtype."
        )
    return model


def _loader(config: ModelConfig, path: Path, dtype: torch.dtype | None) -> Callable[..., Any]:
    """Return transformers' `from_pretrained` with the arguments that a checkpoint's kind needs.

    GGUF files, multimodal checkpoints and all other checkpoints need different arguments.
    """
    import transformers

    table = table_in(path)
    if table is not None:
        settings = transformers.AutoConfig.from_pretrained(path)
        architecture = settings.architectures[0]
        weights = GgufWeights(table, OWN_FORWARD[architecture].forward)
        return partial(
            getattr(transformers, architecture).from_pretrained,
            None,
            config=settings,
            state_dict=weights.state_dict(dtype or torch.bfloat16),
        )
    loader = partial(transformers.AutoModelForCausalLM.from_pretrained, path)
    if config.trust_remote_code:
        text = None
    else:
        text = language_model_of(path)
    if text is None:
        return loader
    log.info("%s: loading its language model alone, a %s", config.spec, text.model_type)
    # transformers would list each weight of the encoders.
    logging.getLogger("transformers.modeling_utils").setLevel(logging.ERROR)
    return partial(loader, config=text, key_mapping=LANGUAGE_MODEL)


def language_model_of(path: Path) -> PreTrainedConfig | None:
    """Return the configuration of the language model in a multimodal checkpoint; None for other checkpoints.

    In such a checkpoint, the names of the language model's weights contain `language_model.`,
    before or after a `model.`.  The weights of encoders are not loaded.  Raises what transformers
    raises.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if config.model_type not in WRAPPERS:
        return None
    text = config.get_text_config(decoder=True)
    if text is config:
        return None
    if text.model_type in TWINS:
        text = _twin_of(config, text)
    # transformers unties the output head if the file has a weight for it.
    text.tie_word_embeddings = config.tie_word_embeddings
    text.dtype = text.dtype or config.dtype
    scheme = getattr(config, "quantization_config", None)
    if scheme is not None:
        text.quantization_config = scheme
    return text


def _twin_of(config: PreTrainedConfig, text: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of a text model that equals a multimodal model's language model.

    `families.TWINS` names the family of the text model, which computes the same for texts.

    Args:
        config: the configuration of the multimodal model.
        text: the configuration of its language model.
    """
    from transformers import AutoConfig

    twin = TWINS[text.model_type]
    has_experts = twin == "qwen3_moe"
    settings = text.to_dict()
    del settings["model_type"]
    if has_experts:
        settings["norm_topk_prob"] = True  # optional in the other family
    rope = settings["rope_parameters"]
    settings["rope_parameters"] = {
        name: value for name, value in rope.items() if not name.startswith("mrope")
    }
    configuration: Any = AutoConfig.for_model(twin, **settings)
    if has_experts:  # by this name transformers converts stored experts
        configuration.model_type = config.model_type
    return configuration


def _unfit_weights(model: Any, loading_info: dict[str, Any]) -> str:
    """Return what is wrong with a model's weights: missing in the files, or of a wrong shape there.

    Return "" if nothing is wrong.

    transformers fills missing weights with random numbers, and missing buffers that were learned
    with zeros or ones.  It computes other missing buffers, such as frequencies and masks, from the
    configuration.  So a missing buffer counts as an error only if it is all zeros or all ones.

    Args:
        loading_info: what `from_pretrained` returns with `ignore_mismatched_sizes`.
    """
    absent = loading_info["missing_keys"]
    learned = {name for name, _ in model.named_parameters()}
    for name, buffer in model.named_buffers():
        if name in absent and _is_flat(buffer):
            learned.add(name)
    missing = sorted(absent & learned)
    if missing:
        return f"{len(missing)} of its weights are in no file, {missing[0]} for one"
    for name, shape, expected in sorted(loading_info["mismatched_keys"]):
        return f"its weight {name} has the shape {list(shape)} where {list(expected)} is expected"
    return ""


def _is_flat(buffer: Any) -> bool:
    """Return whether a buffer is all zeros or all ones."""
    return buffer.is_floating_point() and bool((buffer == 0).all() or (buffer == 1).all())


@contextmanager
def _explained(spec: str) -> Iterator[None]:
    """Turn any error that transformers raises while loading into a `ModelError` with cause and advice.

    Such errors have no common base: OSError, ValueError, KeyError, ImportError, errors of the hub and of safetensors.
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
    is_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if is_of_memory or "alloc" in text or "out of memory" in text:
        return "Memory ran out: take a smaller model, dtype or max_context, or spread the target over GPUs."
    if "configuration class" in text or "unrecognized model" in text or "model type" in text:
        return "It is not a causal language model that the installed transformers knows."
    if isinstance(error, ImportError):
        return "Install what it asks for."
    return "Check that the files are complete and belong to a causal language model."


def context_of(spec: str, model: PreTrainedModel | Decoder, max_context: int | None) -> int:
    """Return the number of tokens that a slot of the cache holds.

    It is `max_context` or, if that is None, the model's limit but at most `DEFAULT_CONTEXT`.
    Raises `ModelError` if `max_context` is beyond the model's limit.
    """
    config = model.config.get_text_config(decoder=True)
    limits = [getattr(config, name, None) for name in _POSITIONS]
    limit = min(filter(None, limits), default=None)
    steady = steady_positions(config)
    if steady is not None and steady < 1:
        raise ModelError(
            f"Model {spec!r} cannot be used: its rope's original maximum of positions is {steady}."
        )
    if steady is not None and (limit is None or steady < limit):
        if max_context is not None and max_context > steady:
            raise ModelError(
                f"max_context {max_context} is beyond the {steady} positions up to which the rope of {spec!r} is "
                "the same: longer texts turn all keys otherwise, and those in the cache are turned already. "
                f"Give max_context {steady} or less."
            )
        if max_context is None and steady < min(limit or DEFAULT_CONTEXT, DEFAULT_CONTEXT):
            log.warning(
                "the context of %r is %d tokens: beyond, its rope changes with the length",
                spec,
                steady,
            )
        limit = steady
    if max_context is None:
        return min(limit or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if max_context < 1 or (limit and max_context > limit):
        raise ModelError(
            f"max_context {max_context} is not within 1 and the {limit} positions of {spec!r}."
        )
    return max_context


def steady_positions(config: Any) -> int | None:
    """Return how many positions a text may have before its length changes the rope's angles.

    Return None if the length never changes the angles.  The length changes the angles of a
    "longrope", which has long or short factors, and of a "dynamic" rope, whose base grows.  For
    such a rope, transformers chooses the angles of each forward by the forward's largest position,
    but keys in the cache keep their old angles.  So the logits would depend on how the text was cut
    into forwards, that is, on method, window and chunks of the prompt.
    """
    ropes = _changing_ropes(config)
    if not ropes:
        return None
    original = "original_max_position_embeddings"
    limits = [rope.get(original) for rope in ropes]
    limits.append(getattr(config, original, None))
    limits.append(getattr(config, "max_position_embeddings", None))
    return min(map(int, filter(None, limits)), default=None)  # some configurations write 4096.0


def _changing_ropes(config: Any) -> list[dict[str, Any]]:
    """Return the ropes whose angles depend on the length. A model may have a rope for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(parameters, dict):
        return []
    ropes = []
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, dict):
            kind = str(rope.get("rope_type", rope.get("type", "")))
            if kind in _CHANGING_ROPES or "dynamic" in kind:
                ropes.append(rope)
    return ropes
