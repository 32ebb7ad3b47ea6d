"""A cache on disk of directories that are derived from a model's files.

Each directory is built once and kept until the user removes it. The cache is $PEARL_CACHE or, if
that is not set, $XDG_CACHE_HOME/pearl or ~/.cache/pearl. A directory is built under a temporary
name next to its final path, while a file lock is held, and renamed once it is complete. This file
must not know model formats.
"""

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

GGUF_FILES = "gguf"  # subdirectory of the cache that describes the user's GGUF files
_REPORT_SECONDS = 2.0
FORMAT = 9  # to be increased when a change of the code makes other directories from the same files


class Watcher(Protocol):
    """Receives progress reports.

    The arguments `total` and `count` are amounts of work, in units such as samples or bytes.
    """

    def begin(self, what: str, total: int) -> None: ...

    def advance(self, count: int, note: str = "") -> None: ...

    def say(self, message: str) -> None: ...


def silent(_message: str) -> None:
    """Discard a progress message."""


class Count:
    """Reports progress such as "layer 12 of 80", at most every two seconds.

    So work that takes less than two seconds reports nothing.
    """

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
        """Count one more unit of work as done."""
        self._done += 1
        if self._clock() - self._reported >= _REPORT_SECONDS:
            self._progress(f"{self._what} {self._done} of {self._total}")
            self._reported = self._clock()


def cache_directory() -> Path:
    """Return the cache's directory, which may not exist yet."""
    cache = os.environ.get("PEARL_CACHE")
    if cache:
        return Path(check_utf8(cache, "$PEARL_CACHE")).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pearl"


def stamp(files: Iterable[Path]) -> str:
    """Return a hash, in 16 hexadecimal digits, of the path, size and modification time of each file.

    The hash also covers the number `FORMAT` of this module, and the version of the package
    `tokenizers`. So it changes, too, if other code converts the files.

    Raises `OSError` if a file cannot be read.
    """
    facts: list[object] = [FORMAT, version("tokenizers")]
    for path in files:
        status = path.stat()
        facts.append((str(path.resolve()), status.st_size, status.st_mtime_ns))
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def built_once(name: str, build: Build, progress: Progress, root: Path | None = None) -> Path:
    """Return the directory <root>/<name>; if it does not exist yet, call `build` to make it.

    `root` defaults to the cache's directory. If several processes call this at once, the first
    builds, and the others wait. Raises `ModelError` if the directory cannot be written.
    """
    root = root or cache_directory()
    final = root / name
    if final.is_dir():
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{name}.lock"):
            if not final.is_dir():
                _build(final, build, progress)
    except OSError as error:
        raise ModelError(
            f"Cannot prepare {name} in {root}: {error}. Point $PEARL_CACHE to a writable directory with 1 GB free."
        ) from error
    return final


def _build(final: Path, build: Build, progress: Progress) -> None:
    """Build in a temporary directory next to `final`, then rename it.

    The caller holds the lock, so no other process is building this directory now. A temporary
    directory that is there already was left by a killed process, and is removed.
    """
    root = final.parent
    for leftover in root.glob(f".{final.name}.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{final.name}.", dir=root) as scratch:
        building = Path(scratch) / "building"
        build(building, progress)
        _flush(building)
        os.replace(building, final)


def _flush(directory: Path) -> None:
    """Force a directory's files to disk before the directory is renamed.

    Otherwise a power cut could leave a directory under its final name with missing contents.
    """
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
