"""Loads heads from their checkpoints, and finds which hidden states of the target they read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pearl.cache import Progress
from pearl.errors import ModelError
from pearl.models.checkpoints.checkpoint import is_toy, resolve_checkpoint
from pearl.models.checkpoints.direct import (
    EMBEDDING,
    OUTPUT,
    Unsupported,
    files_of,
    read_decoder,
)
from pearl.models.checkpoints.loading import Features, context_of, log_unsupported
from pearl.models.checkpoints.memory import check_room, needed
from pearl.models.forward.decoder import Decoder
from pearl.models.forward.layers import tapped
from pearl.models.forward.linear_layers import (
    Matrix,
    Rounding,
    dtype_of_rows,
    matrix,
    multiplies_bf16,
)
from pearl.models.heads.block_runner import BlockRunner
from pearl.models.heads.chain import DraftHead
from pearl.models.heads.dflash import DFlashHead
from pearl.models.heads.head import Head, HeadTarget
from pearl.models.heads.kinds import kind_of
from pearl.models.heads.mtp import load_mtp
from pearl.models.heads.runner import HeadRunner, StatesRunner
from pearl.models.runner import ModelRunner


def load_head(spec: str, runner: ModelRunner, progress: Progress) -> Head:
    """Load the head named `spec`, a directory or a hub id, for the target that `runner` runs.

    Raises `ModelError` if the runner keeps no hidden states, or if the checkpoint has an unknown
    layout or belongs to another target.
    """
    target: Any = runner
    features = runner.capabilities.features
    if not features:
        raise _needs_own_forward(spec)
    if not hasattr(target, "embedding"):  # it runs through transformers
        return load_mtp(spec, target)
    head_target = HeadTarget(
        embedding=target.embedding,
        vocab_size=target.vocab_size,
        features=features,
        context=target.context,
        slots=runner.capabilities.slots,
        output=lambda: target.output,
    )
    return _load(spec, head_target, progress)


def states_for(heads: Sequence[str], target: str, progress: Progress) -> Features:
    """Return which hidden states of the target the heads read, as `features` of `load_runner`.

    A head that has the target's name is the target's own layer for multi-token prediction, which
    reads the "last" states.

    Raises `ModelError` for a head that PEARL does not read, and for two heads that read different states.
    """
    states: dict[Features, str] = {}
    for head in heads:
        states["last" if head == target else _layers_read(head, progress)] = head
    if len(states) > 1:
        first, second = states.values()
        raise ModelError(
            f"Heads {first!r} and {second!r} read other hidden states of the target: name only one, as --head or as "
            "--draft."
        )
    return next(iter(states), "")


def _layers_read(spec: str, progress: Progress) -> Features:
    directory = resolve_checkpoint(spec, progress, weights=False)
    with _explained(spec):
        config = _config(directory)
        return kind_of(config).target_layers(config) or "layers"


def load_draft_head(
    spec: str,
    target: str,
    device: torch.device,
    max_context: int | None,
    slots: int,
    progress: Progress,
    rounding: Rounding = "",
) -> StatesRunner:
    """Load the head `spec` as a draft model for the model `target`.

    This process does not load the target: it reads the target's embedding and, if the head has no
    output matrix, the target's output matrix.  Raises `ModelError` as `load_head` does, and for
    heads that can only run in the target's process.
    """
    if is_toy(target):
        raise _needs_own_forward(spec)
    path = resolve_checkpoint(target, progress)
    if device.type != "cpu" or multiplies_bf16():
        dtype = None
    else:
        dtype = torch.float32
    read = partial(read_decoder, path, dtype, device, progress, keeps_bits=True)
    try:
        decoder = read(only=(EMBEDDING,))
    except Unsupported as reason:
        log_unsupported(path, reason)
        raise _needs_own_forward(spec) from reason
    embedding = decoder.model.embed_tokens.weight
    vocab_size = decoder.config.vocab_size
    states = _layers_read(spec, progress)
    if isinstance(states, str):
        states = tapped(decoder.config.num_hidden_layers)
    features = len(states) * embedding.shape[1]
    context = context_of(target, decoder, max_context)
    head_target = HeadTarget(
        embedding=embedding,
        vocab_size=vocab_size,
        features=features,
        context=context,
        slots=slots,
        output=lambda: _output_of(read(only=(EMBEDDING, OUTPUT)), rounding),
    )
    head = _load(spec, head_target, progress, rounding)
    if isinstance(head, DFlashHead):
        return BlockRunner(head, vocab_size, slots)
    if not isinstance(head, DraftHead):
        raise _cannot_be_draft(spec)
    return HeadRunner(head, vocab_size, slots)


def _output_of(decoder: Decoder, rounding: Rounding) -> Matrix:
    """Return the target's output matrix, for a head that runs in the draft's process and computes logits with it."""
    is_native = decoder.device.type == "cpu"
    dtype = decoder.dtype
    if is_native:
        dtype = dtype_of_rows(dtype)
    return matrix(decoder.lm_head, dtype=dtype, is_native=is_native, rounding=rounding, wide=True)


def _cannot_be_draft(spec: str) -> ModelError:
    return ModelError(
        f"Head {spec!r} guesses a block in the forward that reads its target's states, so it cannot be a --draft. "
        "Name it as --head, with --draft none or another draft."
    )


def _needs_own_forward(spec: str) -> ModelError:
    return ModelError(
        f"Head {spec!r} needs a target of our own forward pass, which keeps hidden states."
    )


def _load(spec: str, target: HeadTarget, progress: Progress, rounding: Rounding = "") -> Head:
    directory = resolve_checkpoint(spec, progress)
    with _explained(spec):
        config = _config(directory)
        kind = kind_of(config)
        _report_memory(spec, directory, target, progress)
        return kind.make(config, _tensors(directory), target, rounding)


def _report_memory(spec: str, directory: Path, target: HeadTarget, progress: Progress) -> None:
    """Report how much memory a large head needs. Raises `ModelError` if the head cannot fit."""
    dtype = str(target.embedding.dtype).removeprefix("torch.")
    need = needed(directory, dtype, target.context, target.context, target.slots)
    report = check_room(spec, need, target.embedding.device)
    if report:
        progress(report)


@contextmanager
def _explained(spec: str) -> Iterator[None]:
    """Turn errors about a head's files into a `ModelError` that names the head."""
    try:
        yield
    except KeyError as error:
        raise ModelError(
            f"Head {spec!r} could not be loaded: its config.json has no {error}."
        ) from error
    except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise ModelError(f"Head {spec!r} could not be loaded: {error}.") from error


def _config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return a head's tensors by name.

    They are read from the first of these that exists: model.safetensors, the files that its index
    lists, the only .safetensors file with another name, pytorch_model.bin.  Raises `ValueError` if
    there are several .safetensors files and no index, because a trainer's other files may use the
    same names.
    """
    tensors = {}
    files = files_of(directory)
    if files is not None:
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
    path = directory / "pytorch_model.bin"
    loaded: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return loaded
