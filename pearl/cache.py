"""Directories made once from a model's files and cached, until the user removes them.

The cache is $PEARL_CACHE, else $XDG_CACHE_HOME/pearl, else ~/.cache/pearl.  A directory gets its final name only when
it is complete: it is built beside it, under a file lock, and renamed.  Must not know formats of models.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from filelock import FileLock

from pearl.config.section import check_utf8
from pearl.errors import ModelError

Progress = Callable[[str], None]
Build = Callable[[Path, Progress], None]  # writes a directory that does not exist yet

GGUF_FILES = "gguf"  # the part of the cache that describes the user's GGUF files
_REPORT_SECONDS = 2.0
FORMAT = 9  # increase it where the same files would be described differently


class Watcher(Protocol):
    """Receives progress reports. `total` and `count`: units of the work, such as samples, steps or bytes."""

    def begin(self, what: str, total: int) -> None: ...

    def advance(self, count: int, note: str = "") -> None: ...

    def say(self, message: str) -> None: ...


def silent(_message: str) -> None:
    """Progress callback that discards its message."""


class Count:
    """Reports how far work is, as "layer 12 of 80": every two seconds, so that short work reports nothing."""

    def __init__(
        self, progress: Progress, what: str, total: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress = progress
        self._what = what
        self._total = total
        self._clock = clock
        self._done = 0
        self._reported = clock()

    def advance(self) -> None:
        """One more is done."""
        self._done += 1
        if self._clock() - self._reported >= _REPORT_SECONDS:
            self._progress(f"{self._what} {self._done} of {self._total}")
            self._reported = self._clock()


def cache_directory() -> Path:
    """The cache's directory; not created here."""
    if chosen := os.environ.get("PEARL_CACHE"):
        return Path(check_utf8(chosen, "$PEARL_CACHE")).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pearl"


def stamp(files: Iterable[Path]) -> str:
    """16 hexadecimal digits that change with path, size or time of any file, and with the versions that convert them.

    Raises `OSError`.
    """
    found: list[object] = [FORMAT, version("tokenizers")]
    found += [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.blake2b(json.dumps(found).encode(), digest_size=8).hexdigest()


def built_once(name: str, build: Build, progress: Progress, root: Path | None = None) -> Path:
    """Return <root>/<name>; `build` makes it, in a sibling directory, unless it exists.

    `root` None: the cache itself. Safe in several processes at once: the first builds, the others wait. Raises
    `ModelError` where it cannot be written.
    """
    root = root or cache_directory()
    final = root / name
    if final.is_dir():
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{name}.lock"):
            if not final.is_dir():
                for leftover in root.glob(
                    f".{name}.*"
                ):  # of a builder that was killed: we hold the lock
                    shutil.rmtree(leftover, ignore_errors=True)
                with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=root) as scratch:
                    building = Path(scratch) / "building"
                    build(building, progress)
                    _flush(building)
                    os.replace(building, final)
    except OSError as error:
        raise ModelError(
            f"Cannot prepare {name} in {root}: {error}. Point $PEARL_CACHE to a writable directory with 1 GB free."
        ) from error
    return final


def _flush(directory: Path) -> None:
    """Force the files to disk, so that a rename never outlives its contents in a power cut."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
