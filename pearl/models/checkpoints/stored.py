"""Models on this machine's disk, in the hub's cache and in ours: list and remove them. Must not import torch."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pearl.cache import cache_directory
from pearl.errors import ModelError
from pearl.models.checkpoints.checkpoint import config_in
from pearl.models.checkpoints.hub import HubName
from pearl.models.families import QUANTISED, is_of_own_forward

_GGUF_KIND = re.compile(r"(?i)(?<![a-z0-9])(I?Q\d\w*?|MXFP4|BF16|F16|F32)(?=[.-]|$)")


class Stored(NamedTuple):
    """A model on disk. size: bytes of all revisions; path: one of them; used: seconds since the epoch; "": unknown."""

    name: str
    path: str
    size: int
    used: float
    weights: str
    forward: str


def stored() -> list[Stored]:
    """The models in both caches, the last used one first."""
    found = []
    for repo in _repositories():
        place = max(
            repo.revisions, key=lambda each: ("main" in each.refs, each.last_modified)
        ).snapshot_path
        found.append(
            Stored(repo.repo_id, str(place), repo.size_on_disk, repo.last_accessed, *kind_of(place))
        )
    found += [Stored(p.name, str(p), _size(p), p.stat().st_mtime, *kind_of(p)) for p in _made()]
    return sorted(found, key=lambda each: -each.used)


def _repositories() -> list[Any]:
    """The hub's models in its cache, as `huggingface_hub.CachedRepoInfo`."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return [
            repo for repo in scan_cache_dir().repos if repo.repo_type == "model" and repo.revisions
        ]
    except CacheNotFound:
        return []


def _made() -> list[Path]:
    """The embedded pair."""
    return [file.parent for file in cache_directory().glob("smollm2-*/config.json")]


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def kind_of(directory: Path) -> tuple[str, str]:
    """The dtype or quantisation of the weights, and the forward of its family, "own" or "transformers"."""
    names = [directory.name, *(file.name for file in directory.rglob("*.gguf"))]
    kinds = sorted({found[1].upper() for name in names if (found := _GGUF_KIND.search(name))})
    if not (config := config_in(directory)):
        return ", ".join(kinds), ""
    given = config.get("quantization_config")
    scheme = given if isinstance(given, dict) else {}
    method, bits = scheme.get("quant_method", ""), scheme.get("bits")
    own = config.get("dtype") or config.get("torch_dtype") or ""
    is_own = is_of_own_forward(config) and method in ("", *QUANTISED)
    told = f"{method} {bits} bits" if bits else method
    return told or ", ".join(kinds) or str(own), "own" if is_own else "transformers"


def removal(name: str) -> tuple[int, Callable[[], None]]:
    """The bytes that removing a model frees, and what removes it: the hub's copy, or a revision, and ours.

    Raises `ModelError` where it is in neither cache.
    """
    from huggingface_hub import scan_cache_dir

    made = [place for place in _made() if place.name == name]
    repo, revision, file = HubName.parse(name) or ("", None, "")
    every = [
        each
        for one in _repositories()
        if one.repo_id == repo and not file
        for each in one.revisions
    ]
    revisions = [
        each for each in every if not revision or revision in (*each.refs, each.commit_hash)
    ]
    hashes = [each.commit_hash for each in revisions]
    if not made and not hashes:
        whole = (
            f"a repository's files are removed together, with `pearl rm {repo}`"
            if file
            else "it is in no cache, see `pearl list`"
        )
        raise ModelError(f"{name!r} cannot be removed: {whole}.")
    strategy = scan_cache_dir().delete_revisions(*hashes) if hashes else None

    def remove() -> None:
        if strategy is not None:
            strategy.execute()
        for place in made:
            shutil.rmtree(place)
            place.with_name(f"{place.name}.lock").unlink(missing_ok=True)

    return (strategy.expected_freed_size if strategy is not None else 0) + sum(
        map(_size, made)
    ), remove
