"""What is made of a model's files once and kept: whole directories in the cache, within a bound on disk space.

The cache is $PEARL_CACHE, else $XDG_CACHE_HOME/pearl, else ~/.cache/pearl.  A directory stands under its final name
only when it is complete: it is built beside it, under a file lock, and renamed.  Knows no formats of models.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock, Timeout

from pearl.config.section import check_utf8
from pearl.errors import ConfigError, ModelError

Progress = Callable[[str], None]

CONVERTED = "converted"  # the cache's part that is bounded; the embedded pair stands beside it
DEFAULT_GIGABYTES = 50.0
FORMAT = 5  # of what is kept; raise it where the same files would be converted otherwise
_SIZES = "sizes.json"
_IN_USE = 24 * 3600.0  # seconds since it was used: what a convenience must not displace


def silent(_message: str) -> None:
    """Progress callback that discards its message."""


def cache_directory() -> Path:
    """Where converted models are kept; not created here."""
    if chosen := os.environ.get("PEARL_CACHE"):
        return Path(check_utf8(chosen, "$PEARL_CACHE")).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pearl"


def stamp(files: Iterable[Path], contents: bool = False, also: Sequence[object] = ()) -> str:
    """16 hexadecimal digits that change with any of the files, with what converts them, and with `also`, as JSON.

    By path, size and time of a file; or by its name and `contents`, where that does not take long.  Raises `OSError`.
    """
    found: list[object] = [FORMAT, version("transformers"), *also]
    for path in files:
        if contents:
            found.append((path.name, hashlib.blake2b(path.read_bytes()).hexdigest()))
        else:
            found.append((str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns))
    return hashlib.blake2b(json.dumps(found).encode(), digest_size=8).hexdigest()


def converted(name: str, build: Callable[[Path, Progress], None], progress: Progress) -> Path:
    """As `built_once`, in the bounded part of the cache.

    What is found damaged is built anew.  What was not used for longest is removed where all would take more than
    $PEARL_CACHE_GB (`DEFAULT_GIGABYTES`).
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
    """What `converted` has made under this name, if it is there and whole."""
    final = cache_directory() / CONVERTED / name
    if not _is_whole(final):
        return None
    with suppress(OSError):  # another user's, or a file system that is read only
        os.utime(final)
    return final


def fits(size: int) -> bool:
    """Whether so many bytes have room beside all that was used within a day, and twice on the disk: for what can do
    without being kept.

    Else two that are used in turn might displace one another at each start. Raises `ConfigError`, `OSError`.
    """
    root, oldest = cache_directory() / CONVERTED, time.time() - _IN_USE
    root.mkdir(parents=True, exist_ok=True)
    used = sum(each for last, each, _ in _conversions(root) if last > oldest)
    return size + used <= _bound() and 2 * size <= shutil.disk_usage(root).free


def built_once(
    name: str,
    build: Callable[[Path, Progress], None],
    progress: Progress,
    root: Path | None = None,
    is_whole: Callable[[Path], bool] = Path.is_dir,
) -> Path:
    """Return <root>/<name>, made by `build` into a sibling directory unless it is there already, and whole.

    `root`: the cache itself where there is none. Safe to call from several processes at once: the first builds, the
    others wait. Raises `ModelError` where it cannot be written.
    """
    root = root or cache_directory()
    final = root / name
    if is_whole(final):
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{name}.lock", progress):
            if not is_whole(final):
                _sweep(root, name)
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


def _sweep(root: Path, name: str) -> None:
    """Remove the directories of builders that were killed. The caller holds the lock, so no builder is at work."""
    for leftover in root.glob(f".{name}.*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _flush(directory: Path) -> None:
    """Forces the files to disk, so that a rename never outlives its contents in a power cut."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock; the kernel drops it when the holder dies."""
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        progress("waiting for another process to prepare the model")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _sizes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(directory.iterdir()) if path.name != _SIZES}


def _is_whole(directory: Path) -> bool:
    """Whether all files are there, as long as they were written."""
    try:
        return bool(json.loads((directory / _SIZES).read_text()) == _sizes(directory))
    except (OSError, ValueError):
        return False


def _bound() -> float:
    """Bytes that conversions may take together. Raises `ConfigError`."""
    given = os.environ.get("PEARL_CACHE_GB", "")
    try:
        gigabytes = float(given or DEFAULT_GIGABYTES)
    except ValueError:
        gigabytes = -1.0
    if not 0 <= gigabytes < float("inf"):
        raise ConfigError(f"$PEARL_CACHE_GB is {given!r}: give a number of gigabytes, such as 50")
    return gigabytes * 1e9


def _remove_oldest(root: Path, room: float) -> None:
    """Remove the conversions that were not used for longest, until the others take no more than `room` bytes.

    A process that has mapped the files of what is removed keeps them until it ends.
    """
    total = 0
    for _, size, directory in sorted(_conversions(root), reverse=True):
        total += size
        if total > room:
            shutil.rmtree(directory, ignore_errors=True)


def _conversions(root: Path) -> list[tuple[float, int, Path]]:
    """When each was used last, and the bytes that it takes."""
    found = []
    for directory in root.iterdir():
        with suppress(OSError):  # it is being removed by another process
            if directory.is_dir() and not directory.name.startswith("."):
                found.append((directory.stat().st_mtime, sum(_sizes(directory).values()), directory))
    return found
