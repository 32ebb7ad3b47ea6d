"""From the name of a model to its files: the embedded pair, local directories, GGUF files and the hub.

Imports no torch: the front, which holds no model, resolves its tokenizer here too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pearl.errors import ModelError
from pearl.models.embedded import Progress, embedded_draft, embedded_target, silent

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class Checkpoint:
    """The arguments of `from_pretrained`: a directory or hub id, and the name of the GGUF file in it, if any."""

    path: str
    gguf_file: str | None = None


def is_toy(spec: str) -> bool:
    """Whether `spec` names a toy model, "toy" or "toy:KEY=VALUE,...", which has no checkpoint."""
    return spec.partition(":")[0] == "toy"


def resolve_checkpoint(spec: str, progress: Progress = silent) -> Checkpoint:
    """Resolve `spec`: "embedded", "embedded-draft", a directory, a .gguf file or a hub id.

    Builds the embedded models where they are not in the cache yet; makes no request to the hub. Raises `ModelError`.
    """
    if spec == "embedded":
        return Checkpoint(str(embedded_target(progress)))
    if spec == "embedded-draft":
        return Checkpoint(str(embedded_draft(progress)))
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        return Checkpoint(str(path))
    if path.is_file() and path.suffix == ".gguf":
        return Checkpoint(str(path.parent), path.name)
    if path.is_file() or path.suffix == ".gguf" or not _HUB_ID.fullmatch(spec):
        raise ModelError(
            f"Model {spec!r}: no such directory or .gguf file. Give a directory with config.json, a .gguf "
            'file, a hub id such as "Qwen/Qwen3-0.6B", "embedded" or "embedded-draft".'
        )
    return Checkpoint(spec)
