"""The Hugging Face hub: parses names of models, and downloads files that its cache lacks.

This module must not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from pearl.cache import Progress
from pearl.errors import ModelError
from pearl.printable import cause_of
from pearl.text.tokenizer import FILES

_HUB_SECONDS = 10.0  # time limit of a lookup
_HUB_NAME = re.compile(
    r"(?P<repo>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>[\w./-]+))?(:(?P<file>[^:]+))?"
)
_WEIGHTS = (  # patterns of weight files; the first line that matches files of a repository is used
    ("model.safetensors",),
    ("model-*.safetensors", "pytorch_model-*.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin",),
    ("pytorch_model-*.bin", "pytorch_model.bin.index.json"),
)


class HubName(NamedTuple):
    """A name ID, ID@REVISION, ID:FILE or ID@REVISION:FILE, such as "Qwen/Qwen3-8B-GGUF:Q4_K_M".

    FILE is the name of a GGUF file, or a part of the name that no other GGUF file of the repository has.
    """

    repo: str
    revision: str | None
    file: str

    @classmethod
    def parse(cls, spec: str) -> HubName | None:
        """Parse `spec`; return None if it has none of these forms."""
        match = _HUB_NAME.fullmatch(spec)
        return match and cls(match["repo"], match["revision"], match["file"] or "")

    def gguf(self, files: Iterable[str]) -> str:
        """Return the one GGUF file among a repository's `files` that this name means.

        Raises `ModelError` if it means none or several.
        """
        ggufs = sorted(file for file in files if file.endswith(".gguf"))
        if self.file in ggufs:
            return self.file
        matching = [file for file in ggufs if self.file.lower() in file.lower()]
        if len(matching) == 1:
            return matching[0]
        names = ", ".join(matching or ggufs) or "no GGUF file"
        raise ModelError(f"{self.repo} has {names}: name one, as {self.repo}:FILE.")


def pull(spec: str, progress: Progress, weights: bool = True) -> Path:
    """Fetch the files of the model `spec`, a `HubName`, that PEARL needs.

    Return the model's directory in the hub's cache, or its GGUF file there.  The size is reported
    before a download.  If the hub cannot be reached, what is in the cache is returned.  Raises
    `ModelError`.

    Args:
        weights: whether to fetch the weights; False if only the tokenizer and the sampling settings
            are needed.
    """
    from huggingface_hub import snapshot_download

    name = HubName.parse(spec)
    if name is None:
        raise ModelError(
            f"{spec!r} is no hub id: give ID, ID@REVISION or ID:FILE, with an ID such as Qwen/Qwen3-0.6B."
        )
    try:
        files = _looked_up(spec, name, progress, weights)
        snapshot = snapshot_download(name.repo, revision=name.revision, allow_patterns=files)
    except ModelError:
        raise
    except Exception as error:  # the network, a proxy, the disk: no common base
        cause = _refusal(name, error)
        if not cause:
            cached = in_cache(spec)
            if cached is not None:
                progress(f"the hub cannot be reached: taking {spec} as it is in the cache")
                return cached
            cause = (
                f"it is no directory, nor in its cache, and the hub cannot be reached ({cause_of(error)}). Check the "
                "network, $HF_ENDPOINT and $HF_HUB_OFFLINE"
            )
        raise ModelError(f"{name.repo} was not fetched: {cause}.") from error
    return Path(snapshot) / next((file for file in files if file.endswith(".gguf")), "")


def _looked_up(spec: str, name: HubName, progress: Progress, weights: bool) -> list[str]:
    """Ask the hub which files to fetch, and report their size if some are not in the cache."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    info = HfApi().model_info(
        name.repo, revision=name.revision, files_metadata=True, timeout=_HUB_SECONDS
    )
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    files = _wanted(name, sizes, weights)
    total = 0
    missing = 0
    for file in files:
        total += sizes[file]
        if not isinstance(try_to_load_from_cache(name.repo, file, revision=info.sha), str):
            missing += sizes[file]
    if missing:
        plural = ""
        if len(files) > 1:
            plural = "s"
        text = f"{spec}: {size_text(total)} in {len(files)} file{plural}"
        progress(f"{text}, {size_text(missing)} to download")
    return list(files)


def _refusal(name: HubName, error: Exception) -> str:
    """Return why the hub refuses a name; "" for other errors, such as those of the network."""
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return f"it is gated: accept its terms at https://huggingface.co/{name.repo}, then `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return (
            "there is no such directory, and the hub has no such model that you may read. Check the name; a "
            "private one needs `hf auth login`"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"it has no revision {name.revision}"
    return ""


def _wanted(name: HubName, files: Collection[str], weights: bool) -> set[str]:
    """Return the files to fetch: config, tokenizer and weights, or a GGUF file and generation_config.json."""

    def matching(*patterns: str) -> set[str]:
        names = set()
        for pattern in patterns:
            for file in files:
                if fnmatch(file, pattern) and file.count("/") == pattern.count("/"):
                    names.add(file)
        return names

    stored_weights: set[str] = set()
    for patterns in _WEIGHTS:
        stored_weights = stored_weights or matching(*patterns)
    if name.file or not stored_weights:
        # If the name does not decide for one of several GGUF files, `gguf` raises an error that lists them.
        return {name.gguf(files), *matching("generation_config.json")}
    # Python files, too: a model may have a tokenizer of its own.
    names = matching("config.json", "*.py", *FILES)
    if weights:
        return names | stored_weights
    return names


def in_cache(name: str) -> Path | None:
    """Return a model's directory in the hub's cache, or its GGUF file, without using the network.

    Return None if the cache lacks the model.
    """
    hub_name = HubName.parse(name)
    if hub_name is None:
        return None
    from huggingface_hub import snapshot_download  # an import of a quarter of a second
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot: str | None = snapshot_download(
            hub_name.repo, revision=hub_name.revision, local_files_only=True
        )
    except LocalEntryNotFoundError as error:
        # Some of the repository's files may be missing, such as those that `pearl pull` leaves out.
        snapshot = getattr(error, "snapshot_path", None)
    except ValueError:
        return None
    if snapshot is None:
        return None
    directory = Path(snapshot)
    files = [str(file.relative_to(directory)) for file in directory.rglob("*.gguf")]
    if not hub_name.file and (len(files) != 1 or (directory / "config.json").exists()):
        return directory
    if files:
        return directory / hub_name.gguf(files)
    return None


def size_text(count: float) -> str:
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.1f} MB"
