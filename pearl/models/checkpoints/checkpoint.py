"""From the name of a model to its files: the embedded pair, local directories, GGUF files and the hub.

Must not import torch: the front, which holds no model, resolves its tokenizer here too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pearl.cache import Progress, silent
from pearl.errors import ModelError
from pearl.models.checkpoints.embedded import embedded_draft, embedded_target
from pearl.models.checkpoints.gguf import directory_of

_HUB_SECONDS = 10.0  # for the one lookup: transformers asks for each file, and retries each for long
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def is_toy(spec: str) -> bool:
    """Whether `spec` names a model without weights: "toy" or "toy:KEY=VALUE,..."."""
    return spec.partition(":")[0] == "toy"


def toy_options(spec: str) -> dict[str, Any]:
    """The options of "toy" or "toy:KEY=VALUE,...", with their defaults; "eos" only where it is given.

    Raises `ModelError` for an unknown key or a bad value.
    """
    kinds: dict[str, Callable[[str], Any]] = {"vocab": int, "alpha": float, "seed": int, "context": int, "eos": int}
    kinds |= {"coin": int}
    values: dict[str, Any] = {"vocab": 32, "alpha": 0.8, "seed": 0, "context": 1 << 20, "coin": 0}
    for item in filter(None, spec.partition(":")[2].split(",")):
        key, _, value = item.partition("=")
        if key not in kinds:
            raise ModelError(f"toy model {spec!r}: unknown key {key!r}; known are {', '.join(kinds)}")
        try:
            values[key] = kinds[key](value)
        except ValueError:
            raise ModelError(f"toy model {spec!r}: {key}={value!r} is not {kinds[key].__name__}") from None
    if values["vocab"] < 2 or not 0 <= values["alpha"] <= 1:
        raise ModelError(f"toy model {spec!r}: vocab must be at least 2 and alpha between 0 and 1")
    return values


def resolve_checkpoint(spec: str, progress: Progress = silent, dtype: str = "any") -> str:
    """Resolve `spec` to a directory or hub id: "embedded", "embedded-draft", a directory, a .gguf file or a hub id.

    Builds the embedded models, and converts a .gguf file, where they are not in the cache yet; looks a hub id up once.
    `dtype`: of a .gguf file's weights, "any" where they are not needed (`directory_of`).  Raises `ModelError`.
    """
    if spec == "embedded":
        return str(embedded_target(progress))
    if spec == "embedded-draft":
        return str(embedded_draft(progress))
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        return str(path)
    if path.is_file() and path.suffix == ".gguf":
        return str(directory_of(path, dtype, progress))
    if path.is_file() or path.suffix == ".gguf" or not _HUB_ID.fullmatch(spec):
        raise ModelError(
            f"Model {spec!r}: no such directory or .gguf file. Give a directory with config.json, a .gguf "
            'file, a hub id such as "Qwen/Qwen3-0.6B", "embedded" or "embedded-draft".'
        )
    return _found_on_hub(spec, progress)


def _found_on_hub(name: str, progress: Progress) -> str:
    """`name` where the hub has a model of that name; the directory of its files where only the hub's cache has.

    Raises `ModelError` where neither has, with the cause.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=_HUB_SECONDS)
        return name
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"Model {name!r} could not be loaded: there is no such directory, and the hub has no model of that name "
            "that you may read. Check the name; a gated or private model needs `hf auth login`."
        ) from error
    except Exception as error:  # the network, a proxy, an impossible name: no common base
        cause = next(iter(str(error).splitlines()), "") or type(error).__name__
    try:
        directory = snapshot_download(name, local_files_only=True)
    except (LocalEntryNotFoundError, ValueError) as error:
        raise ModelError(
            f"Model {name!r} could not be loaded: it is no directory, it is not in the hub's cache, and the hub cannot "
            f"be reached ({cause.rstrip('.')}). Check the name, the network or $HF_ENDPOINT, or give a local directory."
        ) from error
    progress(f"the hub cannot be reached: taking {name} as it is in the cache")
    return str(directory)


def in_cache(name: str) -> Path | None:
    """The directory of a model's files in the hub's cache, without the network; None where they are not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None
