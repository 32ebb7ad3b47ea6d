"""A run's files: answers and checkpoints, written atomically and checked when read.

States are `torch.save` files, whose zip checksums cover every byte of content.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch.optim import Optimizer
from transformers import PreTrainedModel

from pearl.document import parse_json
from pearl.errors import DistillError
from pearl.lab.distill.answers import Answer

_MAX_CHECKPOINTS = 2


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write; at the end of the block sync it and rename it to `path`.

    Raises `DistillError` if there is no room or no permission, and then leaves `path` unchanged.
    """
    building = path.with_name(f".{path.name}.building")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield building
        with building.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(building, path)
    except OSError as error:
        building.unlink(missing_ok=True)
        raise DistillError(
            f"cannot write {path}: {error}. Nothing that was saved before is lost: make room, and go on with --resume"
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Write a file atomically. Raises `DistillError`."""
    with written_whole(path) as building:
        building.write_text(json.dumps(value, indent=1))


def read_json(path: Path) -> Any:
    """The parsed file; None if there is none. Raises `DistillError` if it is not JSON or cannot be read."""
    try:
        return parse_json(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DistillError(
            f"{path} is damaged ({error}). Remove it, or begin a new run in another directory"
        ) from error


def _write_state(path: Path, state: Any) -> None:
    content = io.BytesIO()
    torch.save(state, content)
    with written_whole(path) as building:
        building.write_bytes(content.getbuffer())


def _read_state(path: Path, advice: str) -> Any:
    """Raises `DistillError` with `advice` if the file is missing or damaged."""
    try:
        with zipfile.ZipFile(path) as file:
            if (bad := file.testzip()) is not None:
                raise ValueError(f"{bad} has a wrong checksum")
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, EOFError, LookupError, zipfile.BadZipFile) as error:
        raise DistillError(f"{path} is damaged: {str(error).partition(chr(10))[0]}. {advice}") from error


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other processes out of a run. Raises `DistillError` if one is at work in it, or there can be no lock."""
    lock = FileLock(directory / ".lock")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise DistillError(f"another process works in {directory}") from None
    except OSError as error:
        raise DistillError(f"cannot write in {directory}: {error}") from error
    try:
        yield
    finally:
        lock.release()


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    _write_state(path, [vars(each) for each in answers])


def read_answers(path: Path) -> list[Answer]:
    """Raises `DistillError` if the file is missing or damaged."""
    return [Answer(**each) for each in _read_state(path, "Remove it; --resume then makes it again")]


# ---- checkpoints ----


@dataclass(frozen=True)
class Place:
    """A position in a run. All random numbers are keyed by it, so checkpoints hold no generator state.

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


def save_checkpoint(directory: Path, place: Place, model: PreTrainedModel, optimizers: Sequence[Optimizer]) -> None:
    """Write a checkpoint and delete all but the newest two. Raises `DistillError`, and then changes nothing."""
    state = {
        "place": asdict(place),
        "weights": {name: weight.detach() for name, weight in trainable_parameters(model).items()},
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    _write_state(directory / f"step-{place.step:08d}.pt", state)
    for old in _checkpoints(directory)[:-_MAX_CHECKPOINTS]:
        old.unlink(missing_ok=True)


def restore_checkpoint(directory: Path, model: PreTrainedModel, optimizers: Sequence[Optimizer]) -> Place:
    """Load the newest checkpoint into model and optimizers; return its place, or the start if there is none.

    Raises `DistillError` if it is damaged, or belongs to another draft.
    """
    if not (found := _checkpoints(directory)):
        return Place()
    earlier = found[-2].name if len(found) > 1 else "the start"
    state = _read_state(found[-1], f"Remove it; --resume then goes on from {earlier}")
    parameters = trainable_parameters(model)
    if set(state["weights"]) != set(parameters):
        raise DistillError(f"{found[-1]} belongs to another draft than these settings describe")
    with torch.no_grad():
        for name, weight in parameters.items():
            weight.copy_(state["weights"][name])
    for optimizer, own in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(own)
    return Place(**state["place"])


def _checkpoints(directory: Path) -> list[Path]:
    return sorted(directory.glob("step-*.pt"))
