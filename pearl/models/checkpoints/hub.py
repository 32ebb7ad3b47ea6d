"""The hub: names of its models, and their files in its cache, downloaded where they are missing. No torch."""

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

_HUB_SECONDS = 10.0  # for the one lookup
_HUB_NAME = re.compile(
    r"(?P<repo>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>[\w./-]+))?(:(?P<file>[^:]+))?"
)
_WEIGHTS = (  # the first of these that a repository has are loaded
    ("model.safetensors",),
    ("model-*.safetensors", "pytorch_model-*.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin",),
    ("pytorch_model-*.bin", "pytorch_model.bin.index.json"),
)


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
        found = [each for each in ggufs if each == self.file] or [
            g for g in ggufs if self.file.lower() in g.lower()
        ]
        if len(found) == 1:
            return found[0]
        raise ModelError(
            f"{self.repo} has {', '.join(found or ggufs) or 'no GGUF file'}: name one, as {self.repo}:FILE."
        )


def pull(spec: str, progress: Progress, weights: bool = True) -> Path:
    """Fetch what we load of `spec`, a `HubName`, and return its directory, or its GGUF file, in the hub's cache.

    Reports the size before a download.  Where the hub cannot be reached, takes what is in the cache.  Raises
    `ModelError`.

    Args:
        weights: False: the tokenizer and how to sample are enough.
    """
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if (name := HubName.parse(spec)) is None:
        raise ModelError(
            f"{spec!r} is no hub id: give ID, ID@REVISION or ID:FILE, with an ID such as Qwen/Qwen3-0.6B."
        )
    try:
        info = HfApi().model_info(
            name.repo, revision=name.revision, files_metadata=True, timeout=_HUB_SECONDS
        )
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        files = _wanted(name, sizes, weights)
        there = {
            file
            for file in files
            if isinstance(try_to_load_from_cache(name.repo, file, revision=info.sha), str)
        }
        total, missing = (sum(sizes[file] for file in some) for some in (files, files - there))
        if missing:
            text = f"{spec}: {size_text(total)} in {len(files)} file{'s' * (len(files) > 1)}"
            progress(f"{text}, {size_text(missing)} to download")
        directory = Path(
            snapshot_download(name.repo, revision=name.revision, allow_patterns=[*files])
        )
        return directory / next((file for file in files if file.endswith(".gguf")), "")
    except ModelError:
        raise
    except Exception as error:  # the network, a proxy, the disk: no common base
        if isinstance(error, GatedRepoError):
            cause = f"it is gated: accept its terms at https://huggingface.co/{name.repo}, then `hf auth login`"
        elif isinstance(error, RepositoryNotFoundError):
            cause = (
                "there is no such directory, and the hub has no such model that you may read. Check the name; a "
                "private one needs `hf auth login`"
            )
        elif isinstance(error, RevisionNotFoundError):
            cause = f"it has no revision {name.revision}"
        elif (found := in_cache(spec)) is not None:
            progress(f"the hub cannot be reached: taking {spec} as it is in the cache")
            return found
        else:
            cause = (
                f"it is no directory, nor in its cache, and the hub cannot be reached ({cause_of(error)}). Check the "
                "network, $HF_ENDPOINT and $HF_HUB_OFFLINE"
            )
        raise ModelError(f"{name.repo} was not fetched: {cause}.") from error


def _wanted(name: HubName, files: Collection[str], weights: bool) -> set[str]:
    """Config, tokenizer and weights; or a GGUF file, and how to sample."""

    def matching(*patterns: str) -> set[str]:
        return {
            f for f in files for p in patterns if fnmatch(f, p) and f.count("/") == p.count("/")
        }

    found = next((found for patterns in _WEIGHTS if (found := matching(*patterns))), None)
    if (
        name.file or found is None
    ):  # without a file's name it is refused, with the names of those that there are
        return {name.gguf(files), *matching("generation_config.json")}
    # The code of a tokenizer that is one's own, too.
    return matching("config.json", "*.py", *FILES) | (found if weights else set())


def in_cache(name: str) -> Path | None:
    """The directory of a model's files in the hub's cache, or the GGUF file, without the network; None: not there."""
    named = HubName.parse(name)
    if named is None:
        return None
    from huggingface_hub import snapshot_download  # takes a process a quarter of a second
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        directory = Path(
            snapshot_download(named.repo, revision=named.revision, local_files_only=True)
        )
    except LocalEntryNotFoundError as error:
        if (found := getattr(error, "snapshot_path", None)) is None:
            return None
        directory = Path(
            found
        )  # some of the repository's files are missing: those that `pearl pull` leaves out, say
    except ValueError:
        return None
    files = [str(file.relative_to(directory)) for file in directory.rglob("*.gguf")]
    if not named.file and (len(files) != 1 or (directory / "config.json").exists()):
        return directory
    return directory / named.gguf(files) if files else None


def size_text(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
