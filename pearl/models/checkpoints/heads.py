"""Heads from their published checkpoints: EAGLE-3's layout, and that of vLLM's speculators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file

from pearl.cache import Progress
from pearl.errors import ModelError
from pearl.models.checkpoints.checkpoint import is_toy, resolve_checkpoint
from pearl.models.checkpoints.direct import parameters_of_rope, read_decoder, rope_of
from pearl.models.checkpoints.gguf import table_in
from pearl.models.checkpoints.loading import context_of
from pearl.models.forward.attention import Heads
from pearl.models.forward.matrices import Rounding, multiplies_bf16
from pearl.models.head import Head
from pearl.models.head_runner import HeadRunner
from pearl.models.mtp import MtpHead
from pearl.models.runner import ModelRunner
from pearl.printable import cause_of

_LAYER = "midlayer."
_NEEDED = (
    *("fc.weight", "lm_head.weight", "norm.weight"),
    *(f"{_LAYER}{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    *(f"{_LAYER}self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"{_LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)
_OTHERS = {  # what a tensor's name has -> what the checkpoint is
    "eh_proj": "a layer for multi-token prediction, which --head NAME takes where NAME is the target",
    "medusa": "Medusa heads",
    "lm_head.0": "Medusa heads",
    "mask_hidden": "a block drafter",
    "model.layers.1.": "a whole model: use it as --draft",
}


class HeadTarget(NamedTuple):
    """What a head takes of its target: the embedding [vocab, hidden], how many ids it has and how many hidden states it
    keeps of a token; the positions and slots that it has room for.
    """

    embedding: torch.Tensor
    vocab_size: int
    features: int
    context: int
    slots: int


def load_head(spec: str, runner: ModelRunner, progress: Progress) -> Head | MtpHead:
    """The head named `spec`, a directory or a hub id, for the model of `runner`, which keeps features.

    Raises `ModelError` for a checkpoint of another layout, or of another model.
    """
    own: Any = runner
    can = runner.capabilities
    if not can.features:
        raise _needs_own_forward(spec)
    if not hasattr(own, "embedding"):  # it runs through transformers
        return _multi_token_layer(spec, own)
    return _load(spec, HeadTarget(own.embedding, own.vocab_size, can.features, own.context, can.slots), progress)


def states_for(head: str, target: str) -> Literal["layers", "last"]:
    """Which hidden states of its target a head reads: the last ones if it is the target's own layer for multi-token
    prediction, which has the target's name.
    """
    return "last" if head == target else "layers"


def _multi_token_layer(spec: str, runner: Any) -> MtpHead:
    """The target's own, from its checkpoint."""
    from transformers import cache_utils, modeling_layers

    model, kind = runner.model, getattr(modeling_layers, "MtpModel", None)
    config = model.config.get_text_config(decoder=True)
    if kind is None or not hasattr(kind, "forward_layer"):
        raise ModelError(f"Head {spec!r}: layers for multi-token prediction need transformers 5.24 or newer.")
    # Their names are known for the published sizes alone; Qwen's configurations do not count them.
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{config.num_hidden_layers}\..*", r"^mtp\..*"]
    config.num_mtp_layers = getattr(config, "num_mtp_layers", None) or 1
    if getattr(config, "layer_types", None) and not hasattr(config, "mtp_layer_types"):
        config.mtp_layer_types = ["full_attention"] * config.num_mtp_layers
    try:
        if table_in(resolve_checkpoint(spec)) is not None:
            raise ValueError("GGUF files are read without one")
        found = kind.from_pretrained(model, device_map={"": runner.device}).eval()
        return MtpHead(found, cache_utils.MtpCache(config=found.config), runner.vocab_size, runner.context)
    except Exception as error:  # of files, layouts and versions: transformers raises anything
        raise ModelError(
            f"Head {spec!r}: the target has no layer for multi-token prediction that could be loaded: "
            f"{cause_of(error)}. Leave --head away, or name an EAGLE-3 head."
        ) from error


def load_draft_head(
    spec: str,
    target: str,
    device: torch.device,
    max_context: int | None,
    slots: int,
    progress: Progress,
    rounding: Rounding = "",
) -> HeadRunner:
    """Load the head `spec` as a draft for the model `target`; of the target's checkpoint only the embedding is read.

    Raises as `load_head`.
    """
    if is_toy(target):
        raise _needs_own_forward(spec)
    path = resolve_checkpoint(target, progress)
    dtype = None if device.type != "cpu" or multiplies_bf16() else torch.float32
    decoder = read_decoder(path, dtype, device, progress, keeps_bits=True, only_embedding=True)
    if decoder is None:
        raise _needs_own_forward(spec)
    table, vocab = decoder.model.embed_tokens.weight, decoder.config.vocab_size
    of = HeadTarget(table, vocab, 3 * table.shape[1], context_of(target, decoder, max_context), slots)
    return HeadRunner(_load(spec, of, progress, rounding), vocab, slots)


def _needs_own_forward(spec: str) -> ModelError:
    return ModelError(f"Head {spec!r} needs a target of our own forward pass, which keeps hidden states.")


def _load(spec: str, target: HeadTarget, progress: Progress, rounding: Rounding = "") -> Head:
    directory = resolve_checkpoint(spec, progress)
    try:
        config = json.loads((directory / "config.json").read_text())
        weights = _weights(directory)
        if problem := _problem(weights, target):
            raise ModelError(f"Head {spec!r} could not be loaded: {problem}.")
        return _made(config, weights, target, rounding)
    except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise ModelError(f"Head {spec!r} could not be loaded: {error}.") from error


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= load_file(file)
    if not files:
        found = torch.load(directory / "pytorch_model.bin", map_location="cpu", weights_only=True)
    return {name.replace("layers.0.", _LAYER, 1): tensor for name, tensor in found.items()}


def _problem(weights: dict[str, torch.Tensor], target: HeadTarget) -> str:
    """Why this is no head for the target; "" if it is one."""
    for part, what in _OTHERS.items():
        if any(part in name for name in weights):
            return f"it is {what}, not an EAGLE-3 head"
    if missing := [name for name in _NEEDED if name not in weights]:
        seen = ", ".join(sorted(weights)[:3])
        return f"it is no EAGLE-3 head: it has no {missing[0]}, but {len(weights)} tensors such as {seen}"
    hidden, width = target.embedding.shape[1], target.features
    fused = tuple(weights["fc.weight"].shape)
    if fused == (hidden, 2 * hidden):
        return "it is an EAGLE head of the first or second version, not of the third"
    if fused != (hidden, width):
        return f"it reads {fused[1]} numbers and its target has {width} hidden states: it is of another model"
    known = len(weights["lm_head.weight"])
    if "d2t" not in weights and known != target.vocab_size:
        return f"it knows {known} tokens and its target {target.vocab_size}, and nothing says which (d2t)"
    return ""


def _made(config: dict[str, Any], weights: dict[str, torch.Tensor], target: HeadTarget, rounding: Rounding) -> Head:
    inner = config.get("transformer_layer_config") or config  # speculators
    heads, hidden = int(inner["num_attention_heads"]), target.embedding.shape[1]
    dim = int(inner.get("head_dim") or hidden // heads)
    shape = Heads(heads, int(inner.get("num_key_value_heads") or heads), dim)
    eps, norms_residual = float(inner.get("rms_norm_eps", 1e-6)), bool(config.get("norm_before_residual"))
    parameters = parameters_of_rope({"rope_theta": 1e4, **inner})
    if parameters is None or (rope := rope_of({**inner, "rope_parameters": parameters, "head_dim": dim})) is None:
        raise ValueError("its rope is not computed")
    device = target.embedding.device
    like = torch.empty(0, dtype=torch.float32, device=device)
    cos, sin = (each[0] for each in rope(like, torch.arange(target.context, device=device)[None]))
    placed = {
        name: tensor.to(device, None if name == "d2t" else target.embedding.dtype)
        for name, tensor in weights.items()
        if name != "t2d"
    }
    return Head(placed, shape, eps, norms_residual, target.embedding, cos, sin, target.slots, rounding)
