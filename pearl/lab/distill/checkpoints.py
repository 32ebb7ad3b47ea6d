"""What a run is continued from: weights that learn, the optimizer's state, and how far it has come.

No generator's state: every draw is keyed by seed and place.  The newest two are kept, and a damaged one is named.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from pearl.errors import DistillError
from pearl.lab.distill.shards import written_whole

_KEPT = 2


@dataclass(frozen=True)
class Place:
    """How far a run has come: `batch` steps of round `round`, `step` in all, on `tokens` answer tokens."""

    round: int = 0
    batch: int = 0
    step: int = 0
    tokens: int = 0


def learning(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def save(directory: Path, place: Place, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    """Raises `DistillError`; the checkpoints before are then as they were."""
    tensors = _tensors(model, optimizer)
    about = {"place": json.dumps(asdict(place)), "digest": _digest(tensors)}
    with written_whole(directory / f"step-{place.step:08d}.safetensors") as building:
        save_file(tensors, building, metadata=about)
    for old in _found(directory)[:-_KEPT]:
        old.unlink(missing_ok=True)


def restore(directory: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> Place:
    """Puts the newest checkpoint into both; the start where there is none. Raises `DistillError` for a damaged one."""
    found = _found(directory)
    if not found:
        return Place()
    tensors, place = _read(found[-1], earlier=found[-2].name if len(found) > 1 else "the start")
    parameters = learning(model)
    if {name.partition("/")[2] for name in tensors} != set(parameters):
        raise DistillError(f"{found[-1]} belongs to another draft than these settings describe")
    with torch.no_grad():
        for name, weight in parameters.items():
            weight.copy_(tensors[f"weight/{name}"])
    if f"exp_avg/{next(iter(parameters))}" in tensors:
        _restore_optimizer(tensors, parameters, optimizer)
    return place


def _tensors(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, weight in learning(model).items():
        tensors[f"weight/{name}"] = weight.detach()
        tensors |= {f"{kind}/{name}": value for kind, value in optimizer.state.get(weight, {}).items()}
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _restore_optimizer(
    tensors: dict[str, torch.Tensor], parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    for name, weight in parameters.items():
        kinds = ("step", "exp_avg", "exp_avg_sq")
        state = {kind: tensors[f"{kind}/{name}"] for kind in kinds}
        optimizer.state[weight] = {
            kind: value if kind == "step" else value.to(weight.device) for kind, value in state.items()
        }


def _found(directory: Path) -> list[Path]:
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
