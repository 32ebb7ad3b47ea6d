"""Answers on disk: one safetensors file per batch, written atomically, and a manifest of their digests.

Several processes may work at one run: each file is made by one of them, under a lock that ends with its process.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pearl.document import parse_json
from pearl.errors import DistillError
from pearl.lab.distill.answers import Answer

_MANIFEST = "manifest.json"


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
    except (OSError, SafetensorError) as error:
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


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a file that is made here; yield False, holding nothing, if another process has it.

    Args:
        wait: for that process, and then yield True.

    Raises `DistillError` where there may be no lock.
    """
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=wait)
    except Timeout:
        yield False
        return
    except OSError as error:
        raise DistillError(f"cannot write in {path.parent}: {error}") from error
    try:
        yield True
    finally:
        lock.release()


class Shards:
    """The answers of a run, in shards with names."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def _manifest(self) -> dict[str, dict[str, Any]]:
        """As it is now: other processes may write shards too."""
        return read_json(self._directory / _MANIFEST) or {}

    def __contains__(self, name: str) -> bool:
        return name in self._manifest

    def tokens(self, name: str) -> int:
        """Number of answer tokens in a shard."""
        return int(self._manifest[name]["tokens"])

    def write(self, name: str, answers: list[Answer]) -> None:
        """Write a shard, then add it to the manifest. Raises `DistillError`."""
        path = self._path(name)
        with written_whole(path) as building:
            save_file(_pack(answers), building)
        about = {"sha256": file_digest(path), "answers": len(answers), "tokens": sum(len(a.tokens) for a in answers)}
        manifest = self._directory / _MANIFEST
        with locked(manifest):
            write_json(manifest, self._manifest | {name: about})

    def make(self, name: str, answers: Callable[[], list[Answer]], wait: bool) -> None:
        """Write a shard if it is missing. Where another process makes it: `wait` for that, or do nothing."""
        with locked(self._path(name), wait) as held:
            if held and name not in self:
                self.write(name, answers())

    def read(self, name: str) -> list[Answer]:
        """Raises `DistillError` if the file is missing or its digest is wrong."""
        path = self._path(name)
        if not path.is_file() or file_digest(path) != self._manifest[name]["sha256"]:
            raise DistillError(
                f"{path} is missing or damaged. Take its entry out of {self._directory / _MANIFEST}; --resume then "
                "generates it again"
            )
        return _unpack(load_file(path))

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.safetensors"


def _pack(answers: list[Answer]) -> dict[str, torch.Tensor]:
    """Concatenate the prompts, tokens and records of all answers; the ends split them again."""
    return {
        "prompts": torch.tensor([t for a in answers for t in a.prompt], dtype=torch.int32),
        "prompt_ends": torch.tensor([0, *(len(a.prompt) for a in answers)]).cumsum(0),
        "tokens": torch.tensor([t for a in answers for t in a.tokens], dtype=torch.int32),
        "token_ends": torch.tensor([0, *(len(a.tokens) for a in answers)]).cumsum(0),
        "top_ids": torch.cat([a.top_ids for a in answers]),
        "top_probs": torch.cat([a.top_probs for a in answers]),
    }


def _unpack(packed: dict[str, torch.Tensor]) -> list[Answer]:
    prompts, tokens = packed["prompts"].tolist(), packed["tokens"].tolist()
    spans = zip(pairwise(packed["prompt_ends"].tolist()), pairwise(packed["token_ends"].tolist()), strict=True)
    return [
        Answer(prompts[p:p_end], tokens[t:t_end], packed["top_ids"][t:t_end], packed["top_probs"][t:t_end])
        for (p, p_end), (t, t_end) in spans
    ]
