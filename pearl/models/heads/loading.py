"""Heads from their checkpoints, and which hidden states of the target they read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pearl.cache import Progress
from pearl.errors import ModelError
from pearl.models.checkpoints.checkpoint import is_toy, resolve_checkpoint
from pearl.models.checkpoints.direct import files_of, read_decoder
from pearl.models.checkpoints.gguf import table_in
from pearl.models.checkpoints.loading import Features, context_of
from pearl.models.forward.layers import tapped
from pearl.models.forward.linear_layers import Rounding, multiplies_bf16
from pearl.models.heads.eagle3 import Eagle3Head
from pearl.models.heads.head import Head, HeadTarget
from pearl.models.heads.kinds import kind_of
from pearl.models.heads.mtp import MtpHead
from pearl.models.heads.runner import HeadRunner
from pearl.models.runner import ModelRunner
from pearl.printable import cause_of


def load_head(spec: str, runner: ModelRunner, progress: Progress) -> Head:
    """The head named `spec`, a directory or a hub id, for the model of `runner`, which keeps features.

    Raises `ModelError` for a checkpoint of another layout, or of another model.
    """
    own: Any = runner
    can = runner.capabilities
    if not can.features:
        raise _needs_own_forward(spec)
    if not hasattr(own, "embedding"):  # it runs through transformers
        return _multi_token_layer(spec, own)
    return _load(
        spec,
        HeadTarget(own.embedding, own.vocab_size, can.features, own.context, can.slots),
        progress,
    )


def states_for(heads: Sequence[str], target: str, progress: Progress) -> Features:
    """Which hidden states of the target the heads read: the last ones if a head is the target's own layer for
    multi-token prediction, which has the target's name.

    Raises `ModelError` for a head that is not read, and for two that read other states.
    """
    wanted: dict[Features, str] = {}
    for head in heads:
        wanted["last" if head == target else _layers_read(head, progress)] = head
    if len(wanted) > 1:
        first, second = wanted.values()
        raise ModelError(
            f"Heads {first!r} and {second!r} read other hidden states of the target: name only one, as --head or as "
            "--draft."
        )
    return next(iter(wanted), "")


def _layers_read(spec: str, progress: Progress) -> Features:
    directory = resolve_checkpoint(spec, progress, weights=False)
    with _explained(spec):
        config = _config(directory)
        return kind_of(config).target_layers(config) or "layers"


def _multi_token_layer(spec: str, runner: Any) -> MtpHead:
    """The target's own, from its checkpoint."""
    from transformers import cache_utils, modeling_layers

    model, kind = runner.model, getattr(modeling_layers, "MtpModel", None)
    config = model.config.get_text_config(decoder=True)
    if kind is None or not hasattr(kind, "forward_layer"):
        raise ModelError(
            f"Head {spec!r}: layers for multi-token prediction need transformers 5.24 or newer."
        )
    # Their names are known for the published sizes alone; Qwen's configurations do not count them.
    model._keys_to_ignore_on_load_unexpected = [
        rf"model\.layers\.{config.num_hidden_layers}\..*",
        r"^mtp\..*",
    ]
    config.num_mtp_layers = getattr(config, "num_mtp_layers", None) or 1
    if getattr(config, "layer_types", None) and not hasattr(config, "mtp_layer_types"):
        config.mtp_layer_types = ["full_attention"] * config.num_mtp_layers
    try:
        if table_in(resolve_checkpoint(spec)) is not None:
            raise ValueError("GGUF files are read without one")
        found = kind.from_pretrained(model, device_map={"": runner.device}).eval()
        return MtpHead(
            found, cache_utils.MtpCache(config=found.config), runner.vocab_size, runner.context
        )
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
    states = _layers_read(spec, progress)
    count = len(tapped(decoder.config.num_hidden_layers) if isinstance(states, str) else states)
    of = HeadTarget(
        table, vocab, count * table.shape[1], context_of(target, decoder, max_context), slots
    )
    return HeadRunner(_load(spec, of, progress, rounding), vocab, slots)


def _needs_own_forward(spec: str) -> ModelError:
    return ModelError(
        f"Head {spec!r} needs a target of our own forward pass, which keeps hidden states."
    )


def _load(spec: str, target: HeadTarget, progress: Progress, rounding: Rounding = "") -> Eagle3Head:
    directory = resolve_checkpoint(spec, progress)
    with _explained(spec):
        config = _config(directory)
        return kind_of(config).make(config, _tensors(directory), target, rounding)


@contextmanager
def _explained(spec: str) -> Iterator[None]:
    """Raise a `ModelError` that names the head for what its files are not."""
    try:
        yield
    except KeyError as error:
        raise ModelError(
            f"Head {spec!r} could not be loaded: its config.json has no {error}."
        ) from error
    except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise ModelError(f"Head {spec!r} could not be loaded: {error}.") from error


def _config(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    """By their names in the checkpoint: model.safetensors, the files of its index, or the directory's only file.

    Raises `ValueError` where several files could be meant: a trainer's other files may have tensors of the same names.
    """
    if (files := files_of(directory)) is not None:
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(set(files.values())):
            for name, tensor in load_file(directory / file).items():
                if files.get(name) == file:
                    tensors[name] = tensor
        return tensors
    paths = sorted(directory.glob("*.safetensors"))
    if len(paths) > 1:
        names = [path.name for path in paths]
        raise ValueError(
            f"it has {len(names)} files of tensors and no index: {', '.join(names)}. Name the one that it is "
            "model.safetensors"
        )
    if paths:
        return load_file(paths[0])
    found: dict[str, torch.Tensor] = torch.load(
        directory / "pytorch_model.bin", map_location="cpu", weights_only=True
    )
    return found
