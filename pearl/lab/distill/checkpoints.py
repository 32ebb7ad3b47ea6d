"""Checkpoints of a run: trainable weights, the optimizers' states, and the position in the run.

They hold no generator state: every random number is keyed by seed and position.  The newest two checkpoints are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.optim import Optimizer
from transformers import PreTrainedModel

from pearl.errors import DistillError
from pearl.lab.distill.shards import written_whole

_MAX_KEPT = 2


@dataclass(frozen=True)
class Place:
    """A position in a run.

    Attributes:
        round, batch: the current round, and the steps done in it.
        step, tokens: steps done in all, and answer tokens learnt from.
    """

    round: int = 0
    batch: int = 0
    step: int = 0
    tokens: int = 0


def trainable_parameters(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """By name."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def save(directory: Path, place: Place, model: PreTrainedModel, optimizers: Sequence[Optimizer]) -> None:
    """Write a checkpoint and delete old ones. Raises `DistillError`, and then leaves earlier checkpoints unchanged."""
    tensors = _tensors(model, optimizers)
    about = {"place": json.dumps(asdict(place)), "digest": _digest(tensors)}
    with written_whole(directory / f"step-{place.step:08d}.safetensors") as building:
        save_file(tensors, building, metadata=about)
    for old in _checkpoints(directory)[:-_MAX_KEPT]:
        old.unlink(missing_ok=True)


def restore(directory: Path, model: PreTrainedModel, optimizers: Sequence[Optimizer]) -> Place:
    """Load the newest checkpoint into model and optimizers; return its position, or the start if there is none.

    Raises `DistillError` if it is damaged, or belongs to another draft.
    """
    found = _checkpoints(directory)
    if not found:
        return Place()
    tensors, place = _read(found[-1], earlier=found[-2].name if len(found) > 1 else "the start")
    parameters = trainable_parameters(model)
    if {name.partition("/")[2] for name in tensors} != set(parameters):
        raise DistillError(f"{found[-1]} belongs to another draft than these settings describe")
    with torch.no_grad():
        for name, weight in parameters.items():
            weight.copy_(tensors[f"weight/{name}"])
    for optimizer in optimizers:
        _restore_optimizer(tensors, parameters, optimizer)
    return place


def _tensors(model: PreTrainedModel, optimizers: Sequence[Optimizer]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, weight in trainable_parameters(model).items():
        tensors[f"weight/{name}"] = weight.detach()
        for optimizer in optimizers:
            tensors |= {f"{kind}/{name}": value for kind, value in optimizer.state.get(weight, {}).items()}
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _restore_optimizer(
    tensors: dict[str, torch.Tensor], parameters: dict[str, torch.nn.Parameter], optimizer: Optimizer
) -> None:
    own = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        weight = parameters[name]
        if kind != "weight" and id(weight) in own:
            optimizer.state[weight][kind] = value if kind == "step" else value.to(weight.device)


def _checkpoints(directory: Path) -> list[Path]:
    return sorted(directory.glob("step-*.safetensors"))


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def _read(path: Path, earlier: str) -> tuple[dict[str, torch.Tensor], Place]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = file.metadata() or {}
        if about["digest"] != _digest(tensors):
            raise ValueError("its contents are not what was written")
        return tensors, Place(**json.loads(about["place"]))
    except (OSError, SafetensorError, LookupError, ValueError, TypeError) as error:
        raise DistillError(
            f"the checkpoint {path} is damaged: {error}. Remove it; --resume then goes on from {earlier}"
        ) from error
