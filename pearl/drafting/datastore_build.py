"""Builds datastores from files: reads texts, tokenizes them and packs their tokens into bytes.

A text file is one document. Each line of a JSONL file is one document. A folder stands for all
files below it.
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
    """A file to read.

    `is_named`: whether the user named the file itself rather than a folder above it. `size`: in
    bytes.
    """

    path: Path
    is_named: bool
    size: int


# ---- reading ----


def listed(names: Sequence[str]) -> list[File]:
    """Return the named files and the files below named folders.

    Hidden files and links below a folder are left out. Raises `ConfigError` for a name that does
    not exist.
    """
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

    The document of a JSONL record is its "text".  If it has no "text", the document is all strings
    of the record, joined by blank lines.  Example: {"text": "a", "id": 7} is the document "a", and
    {"ask": "b", "turns": ["c", "d"]} is b, c and d, with a blank line between them.

    A file that is not UTF-8 text is skipped if it was found in a named folder.  Raises
    `ConfigError`, which names the file, if such a file was itself named, or if any file cannot be
    read.
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
    """Return [the file's text]; [] if the file is not UTF-8 text and was found in a folder.

    Raises `ConfigError` if the file is not UTF-8 text and was named by the user.
    """
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
    """Tokenize documents on all cores, and pack their tokens as `tokens.bin` holds them.

    All tokens are in reverse order. Each has `width` bytes, and a 0 marks the end of a document.
    Empty documents are left out.

    Returns: (the bytes, number of documents).
    """
    import numpy as np

    documents = 0

    def pieces() -> Iterator[tuple[str, bytes]]:
        """Yield (piece, end) for each piece of each text.

        `end` marks the end of a document after its last piece, and is b"" after any other piece.
        """
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
    """Yield pieces of at most `_PIECE` characters. A piece ends at a line's end if possible."""
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
    """Make a datastore in `directory` from the named files and folders; return its header.

    Args:
        spec: name of the model whose tokenizer is used.
        watcher: is told the progress.

    Raises `ConfigError` if a file cannot be read, if there is no text, or if `directory` is not
    free.
    """
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
