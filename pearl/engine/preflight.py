"""Checks that need no torch. They run before any worker starts, so that mistakes show at once.

The workers make all other checks, after they have imported torch.
"""

import json
from pathlib import Path

from pearl.cache import Progress, silent
from pearl.config import EngineConfig, ModelConfig, ModelRole
from pearl.device import has_gpu
from pearl.drafting.disco import classifier_of
from pearl.errors import ModelError
from pearl.models.checkpoints.checkpoint import is_head, is_toy, resolve_checkpoint, toy_options
from pearl.models.checkpoints.gguf import TABLE
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.text.tokenizer import Tokenizer, check_same_vocabulary


def check(config: EngineConfig, roles: tuple[ModelRole, ...], progress: Progress = silent) -> None:
    """Check the models and devices of `roles`, and other files that the settings name.

    `roles` run on this machine. This also reads the headers of .gguf files, because workers have
    not enough time for that when they start. Raises `ModelError` for a model, a head or a device,
    and `ConfigError` for any other file.
    """
    classifier_of(config)
    for role in roles:
        _check_model(config.model(role), progress)
    if config.tensors == "nccl":
        kinds = {config.model(role).place.kind for role in roles}
        if "cpu" in kinds or not has_gpu():
            raise ModelError("tensors nccl is for two GPUs: use auto or frames")
    has_toy = is_toy(config.target) or is_toy(config.draft)
    if config.has_draft and not is_head(config.draft) and has_toy:
        target = _tokenizer(config.target, config)
        draft = _tokenizer(config.draft, config)
        check_same_vocabulary(target, draft, config.target, config.draft)
    if config.head is not None and "target" in roles:
        files = resolve_checkpoint(config.head, progress)
        if not (files / "config.json").is_file():
            raise ModelError(
                f"Head {config.head!r} could not be loaded: {files} has no config.json."
            )
    if config.datastore is not None:
        from pearl.drafting.datastore import check_tokenizer, read_header

        directory = Path(config.datastore)
        header = read_header(directory)  # first, because the tokenizer may take long to load
        check_tokenizer(header, _tokenizer(config.target, config, progress), directory)


def _tokenizer(spec: str, config: EngineConfig, progress: Progress = silent) -> Tokenizer:
    trust = config.trust_remote_code
    tokenizer, _ = load_tokenizer(spec, trust_remote_code=trust, progress=progress)
    return tokenizer


def _check_model(model: ModelConfig, progress: Progress) -> None:
    if model.place.kind == "cuda" and not has_gpu():
        raise ModelError(
            f"{model.role}: device {model.device} is not there: this machine shows no GPU"
        )
    if is_toy(model.spec):
        toy_options(model.spec)
        return
    _check_dtype(model)
    if not (model.spec.startswith("embedded") or (model.role == "draft" and is_head(model.spec))):
        _check_files(model, progress)


def _check_dtype(model: ModelConfig) -> None:
    """Raise `ModelError` for settings that a model cannot have if transformers runs it.

    These settings need PEARL's own forward pass. It can round weights (int8, int4) and their inputs
    (setting `rows`), and its logits do not depend on how many tokens are fed together (setting
    `exact`).
    """
    if model.rounding and model.forwards == "transformers":
        raise ModelError(
            f"{model.role}_dtype {model.dtype} is for models of our own forward with --forwards "
            "auto. Choose another dtype."
        )
    if model.rows != "auto" and model.forwards == "transformers":
        raise ModelError(
            f"rows {model.rows} is for models of our own forward: leave rows at auto, or take --forwards auto"
        )
    if model.exact and model.forwards == "transformers":
        raise ModelError(
            "exact refuses every model that runs through transformers: leave --exact off, or "
            "--forwards auto"
        )


def _check_files(model: ModelConfig, progress: Progress) -> None:
    directory = resolve_checkpoint(model.spec, progress)
    try:
        config = json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        raise _refused(model, "there is no config.json in that directory") from None
    except (OSError, ValueError) as error:
        raise _refused(model, f"its config.json cannot be read ({error})") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise _refused(model, "its config.json names no model_type")
    if not any(next(directory.glob(name), None) for name in ("*.safetensors", "*.bin", TABLE)):
        raise _refused(model, "there are no weights (*.safetensors) in that directory")


def _refused(model: ModelConfig, why: str) -> ModelError:
    return ModelError(
        f"Model {model.spec!r} could not be loaded: {why}. Give a directory that holds a "
        "checkpoint, or a .gguf file."
    )
