"""Builds datastores from files: reads texts, tokenizes them, packs documents.

A text file is one document, and so is each line of a JSONL file. A folder stands for all text files below it.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from pearl.cache import Watcher
from pearl.document import parse_json
from pearl.drafting.datastore import DatastoreHeader, check_free, width_of, write
from pearl.errors import ConfigError
from pearl.text.stream import Tokenizer
from pearl.text.tokenizer import vocabulary_digest

# Characters tokenized at once: a tokenizer's time and memory grow faster than the text.
_PIECE = 1 << 18
_BATCH = 64  # pieces that are tokenized in parallel before the next are read


class File(NamedTuple):
    """A file to read. `is_named`: whether the user named the file itself, and not a folder above it."""

    path: Path
    is_named: bool
    size: int


# ---- reading ----


def listed(names: Sequence[str]) -> list[File]:
    """Return the named files, and those below named folders, without hidden files and links. Raises `ConfigError`."""
    files = []
    for name in names:
        path = Path(name)
        if not path.exists():
            raise ConfigError(f"{name} is not there")
        paths = _below(path) if path.is_dir() else [path]
        for file in paths:
            files.append(File(file, not path.is_dir(), file.stat().st_size))
    return files


def _below(folder: Path) -> Iterator[Path]:
    for directory, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(directory) / name
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


def documents(files: Iterable[File], watcher: Watcher) -> Iterator[str]:
    """Yield the documents in files.

    The document of a JSONL record is its "text", or all its texts joined by blank lines if it has no "text".  Example:
    {"text": "a", "id": 7} is the document "a", and {"ask": "b", "turns": ["c", "d"]} is b, c and d, with a blank line
    between them.  Skips files of a folder that are not UTF-8 text.  Raises `ConfigError`, which names the file.
    """
    for file in files:
        try:
            if file.path.suffix in (".jsonl", ".ndjson"):
                yield from _records(file.path)
            else:
                yield from _text(file)
        except OSError as error:
            raise ConfigError(f"cannot read {file.path}: {error.strerror}") from None
        watcher.advance(file.size)


def _text(file: File) -> list[str]:
    """Return the file's text as a list of one; an empty list if it is no UTF-8 text and was not named itself."""
    content = file.path.read_bytes()
    try:
        if b"\0" not in content:
            return [content.decode()]
    except UnicodeDecodeError:
        pass
    if file.is_named:
        raise ConfigError(f"{file.path} is no UTF-8 text")
    return []


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
            joined = "\n\n".join(_flat(record))
            yield joined.encode("utf-8", "replace").decode()  # JSON may hold lone surrogates


def _flat(value: Any) -> Iterator[str]:
    """Yield the strings in a value and in lists within it, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _flat(item)


# ---- packing ----


def pack(texts: Iterable[str], tokenizer: Tokenizer, width: int) -> tuple[bytearray, int]:
    """Tokenize documents on all cores; pack all tokens in reverse, in `width` bytes each, a document's end as 0.

    Returns: (the bytes, number of documents).
    """
    import numpy as np

    documents = 0

    def pieces() -> Iterator[tuple[str, bytes]]:
        """Yield each piece of each text, with the document's end after the last piece and b"" after any other."""
        nonlocal documents
        for text in texts:
            if not text:
                continue
            documents += 1
            parts = list(_pieces(text))
            for part in parts[:-1]:
                yield part, b""
            yield parts[-1], bytes(width)

    def packed(piece: tuple[str, bytes]) -> bytes:
        text, end = piece
        ids = np.array(tokenizer.encode(text, special=False)[::-1], dtype=np.uint32) + 1
        return end + ids.astype(">u4").view(np.uint8).reshape(-1, 4)[:, 4 - width :].tobytes()

    parts: list[bytes] = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        waiting = pieces()
        while batch := list(islice(waiting, _BATCH)):
            parts += pool.map(packed, batch)
    return bytearray().join(reversed(parts)), documents


def _pieces(text: str) -> Iterator[str]:
    """Cut the text into pieces of at most `_PIECE` characters. Each ends at a line's end if possible."""
    start = 0
    while len(text) - start > _PIECE:
        end = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield text[start:end]
        start = end
    yield text[start:]


# ---- datastores ----


def build(
    directory: Path, names: Sequence[str], spec: str, tokenizer: Tokenizer, watcher: Watcher
) -> DatastoreHeader:
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
