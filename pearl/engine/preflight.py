"""What is checked before any process starts: a mistake is told at once, not when both workers have imported torch.

Only what can be told without torch, and without a request to the hub; the workers check the rest.
"""

from __future__ import annotations

from pathlib import Path

from pearl.config import EngineConfig, ModelConfig, ModelRole
from pearl.errors import ModelError
from pearl.models.checkpoint import is_toy, resolve_checkpoint

_GPUS = ("nvidia[0-9]*", "dxg", "kfd")  # under /dev: of NVIDIA's driver, of Windows' subsystem, of AMD's


def check_models(config: EngineConfig, roles: tuple[ModelRole, ...]) -> None:
    """Raises `ModelError` for a model or device that is not on this machine."""
    for role in roles:
        model = config.model(role)
        _check_device(model)
        if not is_toy(model.spec) and not model.spec.startswith("embedded"):
            _check_files(model)


def _check_device(model: ModelConfig) -> None:
    if model.part().kind == "cuda" and not any(any(Path("/dev").glob(name)) for name in _GPUS):
        raise ModelError(f"{model.role}: device {model.device} is not there: this machine shows no GPU")


def _check_files(model: ModelConfig) -> None:
    checkpoint = resolve_checkpoint(model.spec)
    directory = Path(checkpoint.path)
    if directory.is_dir() and checkpoint.gguf_file is None and not (directory / "config.json").is_file():
        raise ModelError(
            f"Model {model.spec!r} could not be loaded: there is no config.json in that directory. Give a directory "
            "that holds a checkpoint, or a .gguf file."
        )
