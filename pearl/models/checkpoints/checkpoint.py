"""From the name of a model to its files: the embedded pair, local directories, GGUF files and the hub.

Must not import torch: the front, which holds no model, resolves its tokenizer here too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pearl.cache import Progress, silent
from pearl.errors import ModelError
from pearl.models.checkpoints.embedded import embedded_draft, embedded_target
from pearl.models.checkpoints.gguf import directory_of

_HUB_SECONDS = 10.0  # for the one lookup: transformers asks for each file, and retries each for long
_HUB_NAME = re.compile(r"(?P<repo>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>[\w./-]+))?(:(?P<file>[^:]+))?")


class HubName(NamedTuple):
    """ID, ID@REVISION, ID:FILE or ID@REVISION:FILE; FILE is a GGUF file, or a part of its name that others lack."""

    repo: str
    revision: str | None
    file: str

    @classmethod
    def parse(cls, spec: str) -> HubName | None:
        """None for what cannot be one."""
        found = _HUB_NAME.fullmatch(spec)
        return found and cls(found["repo"], found["revision"], found["file"] or "")

    def gguf(self, files: Iterable[str]) -> str:
        """Which of a repository's files `file` names. Raises `ModelError`."""
        ggufs = sorted(file for file in files if file.endswith(".gguf"))
        found = [each for each in ggufs if each == self.file] or [g for g in ggufs if self.file.lower() in g.lower()]
        if len(found) == 1:
            return found[0]
        raise ModelError(
            f"{self.repo} has {', '.join(found or ggufs) or 'no GGUF file'}: name one, as {self.repo}:FILE."
        )


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


def resolve_checkpoint(spec: str, progress: Progress = silent) -> str:
    """Resolve `spec` to a directory or hub id: "embedded", "embedded-draft", a directory, a .gguf file or a `HubName`.

    Builds the embedded models, and what describes a .gguf file, where they are not in the cache yet; looks a hub id up
    once.  Raises `ModelError`.
    """
    if spec == "embedded":
        return str(embedded_target(progress))
    if spec == "embedded-draft":
        return str(embedded_draft(progress))
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        return str(path)
    if path.is_file() and path.suffix == ".gguf":
        return str(directory_of(path, progress))
    named = HubName.parse(spec)
    if named and (named.revision or named.file):
        if (found := in_cache(spec)) is None:
            raise ModelError(f"Model {spec!r} is not in the hub's cache: get it with `pearl pull {spec}`.")
        return str(directory_of(found, progress) if named.file else found)
    if path.is_file() or path.suffix == ".gguf" or not named:
        raise ModelError(
            f"Model {spec!r}: no such directory or .gguf file. Give a directory with config.json, a .gguf "
            'file, a hub id such as "Qwen/Qwen3-0.6B", "embedded" or "embedded-draft".'
        )
    return _found_on_hub(spec, progress)


def _found_on_hub(name: str, progress: Progress) -> str:
    """`name` where the hub has a model of that name; the directory of its files where only the hub's cache has.

    Raises `ModelError` where neither has, with the cause.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=_HUB_SECONDS)
        return name
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"Model {name!r} could not be loaded: there is no such directory, and the hub has no model of that name "
            "that you may read. Check the name; a gated or private model needs `hf auth login`."
        ) from error
    except Exception as error:  # the network, a proxy, an impossible name: no common base
        if (directory := in_cache(name)) is not None:
            progress(f"the hub cannot be reached: taking {name} as it is in the cache")
            return str(directory)
        cause = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelError(
            f"Model {name!r} could not be loaded: it is no directory, it is not in the hub's cache, and the hub cannot "
            f"be reached ({cause.rstrip('.')}). Check the name, the network or $HF_ENDPOINT, or give a local directory."
        ) from error


def is_head(spec: str) -> bool:
    """Whether it names a head of another model (EAGLE-3), and not a model."""
    if is_toy(spec) or spec in ("none", "embedded", "embedded-draft"):
        return False
    directory = Path(spec) if Path(spec).is_dir() else in_cache(spec)
    return directory is not None and "draft_vocab_size" in config_in(directory)


def config_in(directory: Path) -> dict[str, Any]:
    """What config.json says; nothing where there is none that can be read."""
    with suppress(OSError, ValueError):
        if isinstance(found := json.loads((directory / "config.json").read_text()), dict):
            return found
    return {}


def in_cache(name: str) -> Path | None:
    """The directory of a model's files in the hub's cache, or the GGUF file, without the network; None: not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if (named := HubName.parse(name)) is None:
        return None
    try:
        directory = Path(snapshot_download(named.repo, revision=named.revision, local_files_only=True))
    except LocalEntryNotFoundError as error:
        if (found := getattr(error, "snapshot_path", None)) is None:
            return None
        directory = Path(found)  # some of the repository's files are missing: those that `pearl pull` leaves out, say
    except ValueError:
        return None
    if not named.file:
        return directory
    files = [str(file.relative_to(directory)) for file in directory.rglob("*.gguf")]
    return directory / named.gguf(files) if files else None
