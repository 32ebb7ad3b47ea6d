"""Directories made once from a model's files and cached, within a bound on disk space.

The cache is $PEARL_CACHE, else $XDG_CACHE_HOME/pearl, else ~/.cache/pearl.  A directory gets its final name only when
it is complete: it is built beside it, under a file lock, and renamed.  Must not know formats of models.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock, Timeout

from pearl.config.section import check_utf8
from pearl.errors import ConfigError, ModelError

Progress = Callable[[str], None]
Build = Callable[[Path, Progress], None]  # writes a directory that does not exist yet

CONVERTED = "converted"  # the bounded part of the cache; the embedded pair is outside it
DEFAULT_GIGABYTES = 50.0
FORMAT = 6  # increase it where the same files would be converted differently
_SIZES = "sizes.json"


def silent(_message: str) -> None:
    """Progress callback that discards its message."""


def cache_directory() -> Path:
    """The cache's directory; not created here."""
    if chosen := os.environ.get("PEARL_CACHE"):
        return Path(check_utf8(chosen, "$PEARL_CACHE")).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pearl"


def stamp(files: Iterable[Path], contents: bool = False, also: Sequence[object] = ()) -> str:
    """16 hexadecimal digits that change with any of the files, the versions that convert them, and `also` (JSON).

    A file counts by path, size and time, or by name and `contents`. Raises `OSError`.
    """
    found: list[object] = [FORMAT, version("transformers"), *also]
    for path in files:
        if contents:
            found.append((path.name, hashlib.blake2b(path.read_bytes()).hexdigest()))
        else:
            found.append((str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns))
    return hashlib.blake2b(json.dumps(found).encode(), digest_size=8).hexdigest()


def converted(name: str, build: Build, progress: Progress) -> Path:
    """Like `built_once`, in the bounded part of the cache; a damaged directory is rebuilt.

    Removes the least recently used directories where all would take more than $PEARL_CACHE_GB (`DEFAULT_GIGABYTES`).
    """
    bound = _bound()
    root = cache_directory() / CONVERTED

    def build_and_measure(building: Path, progress: Progress) -> None:
        if (root / name).is_dir():
            progress(f"{name} in {root} is damaged: making it anew")
        build(building, progress)
        (building / _SIZES).write_text(json.dumps(_sizes(building)))
        _remove_oldest(root, bound - sum(_sizes(building).values()))

    return find(name) or built_once(name, build_and_measure, progress, root, _is_whole)


def find(name: str) -> Path | None:
    """What `converted` has made under this name; None where it is missing or damaged."""
    final = cache_directory() / CONVERTED / name
    if not _is_whole(final):
        return None
    with suppress(OSError):  # another user's, or a read-only file system
        os.utime(final)
    return final


def built_once(
    name: str,
    build: Build,
    progress: Progress,
    root: Path | None = None,
    is_whole: Callable[[Path], bool] = Path.is_dir,
) -> Path:
    """Return <root>/<name>; `build` makes it, in a sibling directory, unless it exists and is whole.

    `root` None: the cache itself. Safe in several processes at once: the first builds, the others wait. Raises
    `ModelError` where it cannot be written.
    """
    root = root or cache_directory()
    final = root / name
    if is_whole(final):
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{name}.lock", progress):
            if not is_whole(final):
                for leftover in root.glob(f".{name}.*"):  # of a builder that was killed: we hold the lock
                    shutil.rmtree(leftover, ignore_errors=True)
                with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=root) as scratch:
                    building = Path(scratch) / "building"
                    build(building, progress)
                    _flush(building)
                    shutil.rmtree(final, ignore_errors=True)
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


def _locked(path: Path, progress: Progress) -> AbstractContextManager[object]:
    """Hold an exclusive lock; the kernel releases it when the holder dies."""
    lock = FileLock(path)
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        progress("waiting for another process to prepare the model")
        return lock.acquire()


def _sizes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(directory.iterdir()) if path.name != _SIZES}


def _is_whole(directory: Path) -> bool:
    try:
        return bool(json.loads((directory / _SIZES).read_text()) == _sizes(directory))
    except (OSError, ValueError):
        return False


def _bound() -> float:
    """Bytes that all conversions together may take. Raises `ConfigError`."""
    given = os.environ.get("PEARL_CACHE_GB", "")
    try:
        gigabytes = float(given or DEFAULT_GIGABYTES)
    except ValueError:
        gigabytes = -1.0
    if not 0 <= gigabytes < float("inf"):
        raise ConfigError(f"$PEARL_CACHE_GB is {given!r}: give a number of gigabytes, such as 50")
    return gigabytes * 1e9


def _remove_oldest(root: Path, room: float) -> None:
    """Remove the least recently used conversions until the others take at most `room` bytes.

    A process that has mapped their files keeps them until it ends.
    """
    total, found = 0, []
    for directory in root.iterdir():
        with suppress(OSError):  # another process is removing it
            if directory.is_dir() and not directory.name.startswith("."):
                found.append((directory.stat().st_mtime, sum(_sizes(directory).values()), directory))
    for _, size, directory in sorted(found, reverse=True):
        total += size
        if total > room:
            shutil.rmtree(directory, ignore_errors=True)
