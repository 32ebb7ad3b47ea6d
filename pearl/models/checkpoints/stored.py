"""Lists and removes models on this machine's disk, in the hub's cache and in ours.

This module must not import torch.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pearl.cache import cache_directory
from pearl.errors import ModelError
from pearl.models.checkpoints.checkpoint import config_in
from pearl.models.checkpoints.hub import HubName
from pearl.models.families import is_of_own_forward, reads_weights
from pearl.models.heads.kinds import describes_head

_GGUF_KIND = re.compile(r"(?i)(?<![a-z0-9])(I?Q\d\w*?|MXFP4|BF16|F16|F32)(?=[.-]|$)")


class Stored(NamedTuple):
    """A model on disk.

    Attributes:
        path: the directory of one revision.
        size: bytes of all revisions.
        used: time of the last use, in seconds since the epoch.
        weights, forward: see `Kind`.
    """

    name: str
    path: str
    size: int
    used: float
    weights: str
    forward: str


class Kind(NamedTuple):
    """How a model is stored and computed. A value that is unknown is "".

    Attributes:
        weights: the dtype or the quantisation of the weights.
        forward: the forward that computes the model, "own" or "transformers"; "head" for a drafting
            head, which serves another model.
    """

    weights: str
    forward: str


def stored() -> list[Stored]:
    """Return the models in the hub's cache and in ours, the most recently used first."""
    models = []
    for repo in _repositories():
        newest = max(repo.revisions, key=lambda item: ("main" in item.refs, item.last_modified))
        path = newest.snapshot_path
        kind = kind_of(path)
        models.append(Stored(repo.repo_id, str(path), repo.size_on_disk, repo.last_accessed, *kind))
    for path in _embedded():
        used = path.stat().st_mtime
        models.append(Stored(path.name, str(path), _size(path), used, *kind_of(path)))
    return sorted(models, key=lambda model: -model.used)


def _repositories() -> list[Any]:
    """Return the hub's models in its cache, as `huggingface_hub.CachedRepoInfo`."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return [repo for repo in repositories if repo.repo_type == "model" and repo.revisions]


def _embedded() -> list[Path]:
    """Return the cached directories of the target and the draft that `embedded` makes."""
    return [file.parent for file in cache_directory().glob("smollm2-*/config.json")]


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def kind_of(directory: Path) -> Kind:
    types = set()
    for name in (directory.name, *(file.name for file in directory.rglob("*.gguf"))):
        match = _GGUF_KIND.search(name)
        if match is not None:
            types.add(match[1].upper())
    weights = ", ".join(sorted(types))
    config = config_in(directory)
    if not config:
        return Kind(weights, "")
    scheme = config.get("quantization_config")
    if not isinstance(scheme, dict):
        scheme = {}
    method = scheme.get("quant_method", "")
    bits = scheme.get("bits")
    if method or bits:
        if bits:
            weights = f"{method} {bits} bits"
        else:
            weights = method
    elif not weights:
        weights = str(config.get("dtype") or config.get("torch_dtype") or "")
    if describes_head(config):
        return Kind(weights, "head")
    is_own = is_of_own_forward(config) and reads_weights(config)
    return Kind(weights, "own" if is_own else "transformers")


def removal(name: str) -> tuple[int, Callable[[], None]]:
    """Return (bytes that the removal of a model frees, a function that removes it).

    The function removes the model from our cache and from the hub's.  If `name` states a revision,
    only this revision is removed from the hub's cache.  Raises `ModelError` if the model is in
    neither cache.
    """
    from huggingface_hub import scan_cache_dir

    directories = [path for path in _embedded() if path.name == name]
    repo, revision, file = HubName.parse(name) or ("", None, "")
    if file:
        hashes = []
    else:
        hashes = _hashes(repo, revision)
    if not directories and not hashes:
        reason = "it is in no cache, see `pearl list`"
        if file:
            reason = f"a repository's files are removed together, with `pearl rm {repo}`"
        raise ModelError(f"{name!r} cannot be removed: {reason}.")
    strategy = None
    if hashes:
        strategy = scan_cache_dir().delete_revisions(*hashes)

    def remove() -> None:
        if strategy is not None:
            strategy.execute()
        for path in directories:
            shutil.rmtree(path)
            path.with_name(f"{path.name}.lock").unlink(missing_ok=True)

    size = sum(map(_size, directories))
    if strategy is not None:
        size += strategy.expected_freed_size
    return size, remove


def _hashes(repo: str, revision: str | None) -> list[str]:
    """Return the commits of a repository that are in the hub's cache.

    If `revision` is given, return only the commit that it names.
    """
    hashes = []
    for repository in _repositories():
        if repository.repo_id == repo:
            for item in repository.revisions:
                if not revision or revision in (*item.refs, item.commit_hash):
                    hashes.append(item.commit_hash)
    return hashes
