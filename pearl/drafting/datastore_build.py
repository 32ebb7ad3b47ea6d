"""Builds datastores from files: reads texts, tokenizes them, packs documents.

A text file is one document, each line of a JSONL file is one, and a folder stands for all text files below it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from pearl.cache import Watcher
from pearl.document import parse_json
from pearl.drafting.datastore import Header, check_free, width_of, write
from pearl.errors import ConfigError
from pearl.text.stream import Tokenizer
from pearl.text.tokenizer import vocabulary_digest

_PIECE = (
    1 << 18
)  # characters tokenized at once: a tokenizer's time and memory grow faster than the text
_BATCH = 64  # pieces that wait for each other


class File(NamedTuple):
    """A file to read. `of`: the argument that named it or a folder above it."""

    path: Path
    of: str
    size: int


# ---- reading ----


def listed(names: Sequence[str]) -> list[File]:
    """The named files, and those below named folders except hidden files and links. Raises `ConfigError`."""
    files: list[File] = []
    for name in names:
        path = Path(name)
        if not path.exists():
            raise ConfigError(f"{name} is not there")
        files += [
            File(each, name, each.stat().st_size)
            for each in (_below(path) if path.is_dir() else [path])
        ]
    return files


def _below(folder: Path) -> Iterator[Path]:
    for directory, folders, files in os.walk(folder):
        folders[:] = sorted(one for one in folders if not one.startswith("."))
        for name in sorted(files):
            path = Path(directory) / name
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


def documents(files: Iterable[File], watcher: Watcher) -> Iterator[str]:
    """The texts of files: of a JSONL record its "text", or if it has none all its texts, joined by blank lines.

    Skips files of a folder that are not UTF-8 text. Raises `ConfigError`, naming the file.
    """
    for file in files:
        try:
            if file.path.suffix in (".jsonl", ".ndjson"):
                yield from _records(file.path)
            elif (text := _text(file)) is not None:
                yield text
        except OSError as error:
            raise ConfigError(f"cannot read {file.path}: {error.strerror}") from None
        watcher.advance(file.size)


def _text(file: File) -> str | None:
    content = file.path.read_bytes()
    try:
        if b"\0" not in content:
            return content.decode()
    except UnicodeDecodeError:
        pass
    if str(file.path) == str(Path(file.of)):
        raise ConfigError(f"{file.path} is no UTF-8 text")
    return None


def _records(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = parse_json(line)
            except ValueError as error:
                raise ConfigError(
                    f"{path} line {number} is not JSON: {' '.join(str(error).split())[:200]}"
                ) from None
            if isinstance(record, dict):
                text = record.get("text")
                record = text if isinstance(text, str) else list(record.values())
            yield (
                "\n\n".join(_flat(record)).encode("utf-8", "replace").decode()
            )  # JSON may hold lone surrogates


def _flat(value: Any) -> Iterator[str]:
    """The strings in a value and in lists within it, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _flat(each)


# ---- packing ----


def pack(texts: Iterable[str], tokenizer: Tokenizer, width: int) -> tuple[bytearray, int]:
    """Tokenize documents on all cores and reverse them: `width` bytes per token, a 0 after each document.

    Returns: (the bytes, number of documents).
    """
    import numpy as np

    documents = 0

    def pieces() -> Iterator[tuple[str, bytes]]:
        """Each piece of each text, with what follows it."""
        nonlocal documents
        for text in texts:
            if text:
                documents += 1
                *parts, last = _pieces(text)
                yield from ((part, b"") for part in parts)
                yield last, bytes(width)

    def packed(piece: tuple[str, bytes]) -> bytes:
        text, end = piece
        ids = np.array(tokenizer.encode(text, special=False)[::-1], dtype=np.uint32) + 1
        return end + ids.astype(">u4").view(np.uint8).reshape(-1, 4)[:, 4 - width :].tobytes()

    parts: list[bytes] = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        waiting = pieces()
        while some := list(islice(waiting, _BATCH)):
            parts += pool.map(packed, some)
    return bytearray().join(reversed(parts)), documents


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces that end with a line if possible."""
    start = 0
    while len(text) - start > _PIECE:
        end = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield text[start:end]
        start = end
    yield text[start:]


# ---- datastores ----


def build(
    directory: Path, names: Sequence[str], spec: str, tokenizer: Tokenizer, watcher: Watcher
) -> Header:
    """Make a datastore of the named files, folders and JSONL files. Raises `ConfigError`."""
    check_free(directory)
    size = tokenizer.vocab_size
    files = listed(names)
    watcher.begin("tokenizing", sum(file.size for file in files))
    tokens, count = pack(documents(files, watcher), tokenizer, width_of(size))
    if not tokens:
        raise ConfigError(f"there is no text in {', '.join(names)[:200]}")
    watcher.begin("sorting", 1)
    header = write(
        directory,
        tokens,
        tokenizer=spec,
        digest=vocabulary_digest(tokenizer, size).hex(),
        vocab_size=size,
        width=width_of(size),
        documents=count,
    )
    watcher.advance(1)
    return header
