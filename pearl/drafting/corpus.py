"""From files to a datastore: texts read and tokenized, documents packed.

Text files are one document each, lines of a JSONL file one each, and of a folder all text files below it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pearl.document import parse_json
from pearl.drafting.datastore import HEADER, Datastore, Header, Origin, Writer, check_tokenizer, read_header, width_of
from pearl.errors import ConfigError
from pearl.text.stream import Tokenizer
from pearl.text.tokenizer import vocabulary_digest

DEFAULT_FIELD = "text"
_PIECE = 1 << 18  # characters that are tokenized together
_WAITING = 16  # pieces ahead of the one that is packed
_JSONL = (".jsonl", ".ndjson")


class Watcher(Protocol):
    """Who is told how far it is; `total` and `count` are bytes."""

    def begin(self, what: str, total: int) -> None: ...

    def advance(self, count: int, note: str = "") -> None: ...


@dataclass(frozen=True)
class File:
    """A file to read. `of`: the argument that named it, itself or a folder above it."""

    path: Path
    of: str
    size: int

    @property
    def is_named(self) -> bool:
        return str(self.path) == self.of


class Document(NamedTuple):
    text: str
    of: str


# ---- reading ----


def listed(names: Sequence[str]) -> list[File]:
    """The files that are named, and those below the folders that are: hidden ones and links left out.

    Raises `ConfigError`.
    """
    files: list[File] = []
    for name in names:
        path = Path(name)
        if not path.exists():
            raise ConfigError(f"{name} is not there")
        for each in _below(path) if path.is_dir() else [path]:
            files.append(File(each, name if path.is_dir() else str(each), each.stat().st_size))
    return files


def _below(folder: Path) -> Iterator[Path]:
    for directory, folders, files in os.walk(folder):
        folders[:] = sorted(one for one in folders if not one.startswith("."))
        for name in sorted(files):
            path = Path(directory) / name
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


def documents(files: Iterable[File], fields: Sequence[str], watcher: Watcher) -> Iterator[Document]:
    """Their texts; those of a folder that are no UTF-8 text are passed over. Raises `ConfigError`, naming the file.

    Args:
        fields: of JSONL records, joined by a blank line. None given: "text", or where a record has none all its texts.
    """
    for file in files:
        try:
            if file.path.suffix in _JSONL:
                yield from (Document(text, file.of) for text in _records(file.path, fields))
            elif (text := _text(file)) is not None:
                yield Document(text, file.of)
        except OSError as error:
            raise ConfigError(f"cannot read {file.path}: {error.strerror}") from None
        watcher.advance(file.size)


def _text(file: File) -> str | None:
    content = file.path.read_bytes()
    if b"\0" not in content:
        try:
            return content.decode()
        except UnicodeDecodeError:
            pass
    if file.is_named:
        raise ConfigError(f"{file.path} is no UTF-8 text")
    return None


def _records(path: Path, fields: Sequence[str]) -> Iterator[str]:
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = parse_json(line)
            except ValueError as error:
                raise ConfigError(f"{path} line {number} is not JSON: {' '.join(str(error).split())[:200]}") from None
            yield "\n\n".join(_strings(record, fields, f"{path} line {number}"))


def _strings(record: Any, fields: Sequence[str], where: str) -> list[str]:
    if isinstance(record, dict):
        if missing := [name for name in fields if name not in record]:
            raise ConfigError(
                f"{where} has no field {missing[0]!r}; it has {' '.join(', '.join(record).split())[:200]}"
            )
        chosen = fields or ([DEFAULT_FIELD] if isinstance(record.get(DEFAULT_FIELD), str) else list(record))
        record = [record[name] for name in chosen]
    elif fields:
        raise ConfigError(f"{where} is no record with fields")
    return [text.encode("utf-8", "replace").decode() for text in _flat(record)]  # JSON may hold half a character


def _flat(value: Any) -> Iterator[str]:
    """The strings in a value and in lists within it, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            if isinstance(each, (str, list)):
                yield from _flat(each)


# ---- packing ----


@dataclass
class Packed:
    """Documents as a datastore has them, and what they came from."""

    tokens: bytearray
    origins: list[Origin]

    @property
    def documents(self) -> int:
        return sum(origin.documents for origin in self.origins)


def pack(texts: Iterable[Document], tokenizer: Tokenizer, width: int) -> Packed:
    """The documents' tokens, `width` bytes each and a 0 after each document, back to front. Tokenizes on all cores."""
    import numpy as np

    parts: list[bytes] = []
    sizes: dict[str, tuple[int, int]] = {}  # of what was named: documents, bytes

    def encoded(text: str) -> bytes:
        ids = np.array(tokenizer.encode(text, special=False)[::-1], dtype=np.uint32) + 1
        return ids.astype(">u4").view(np.uint8).reshape(-1, 4)[:, 4 - width :].tobytes()

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        waiting: deque[tuple[Future[bytes], bool]] = deque()

        def take() -> None:
            done, ends = waiting.popleft()
            parts.append(done.result())
            if ends:
                parts.append(bytes(width))

        for text, of in texts:
            if not text:
                continue
            number, size = sizes.get(of, (0, 0))
            sizes[of] = number + 1, size + len(text.encode())
            pieces = list(_pieces(text))
            for i, piece in enumerate(pieces, start=1):
                waiting.append((pool.submit(encoded, piece), i == len(pieces)))
                if len(waiting) > _WAITING:
                    take()
        while waiting:
            take()
    packed = bytearray().join(reversed(parts))
    return Packed(packed, [Origin(name=of, documents=number, size=size) for of, (number, size) in sizes.items()])


def _pieces(text: str) -> Iterator[str]:
    """The text in parts that end with a line where there are lines: a tokenizer's time and memory would run away."""
    start = 0
    while len(text) - start > _PIECE:
        end = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield text[start:end]
        start = end
    yield text[start:]


# ---- datastores ----


def build(
    directory: Path, names: Sequence[str], fields: Sequence[str], spec: str, tokenizer: Tokenizer, watcher: Watcher
) -> Header:
    """Makes a datastore of the files, folders and JSONL files named. Raises `ConfigError`."""
    check_free(directory)
    size = tokenizer.vocab_size
    width = width_of(size)
    packed = _packed(names, fields, tokenizer, width, watcher)
    watcher.begin("sorting", 1)
    with Writer(directory) as writer:
        check_free(directory)  # another process may have been faster
        header = writer.write(
            packed.tokens,
            tokenizer=spec,
            digest=vocabulary_digest(tokenizer, size).hex(),
            vocab_size=size,
            width=width,
            documents=packed.documents,
            origins=tuple(packed.origins),
        )
    watcher.advance(1)
    return header


def add(directory: Path, names: Sequence[str], fields: Sequence[str], tokenizer: Tokenizer, watcher: Watcher) -> Header:
    """Adds documents to a datastore; what is made is what one build of all would have made. Raises `ConfigError`."""
    known = read_header(directory)
    check_tokenizer(known, tokenizer, directory)
    packed = _packed(names, fields, tokenizer, known.width, watcher)
    watcher.begin("sorting", 1)
    with Writer(directory) as writer:
        store = Datastore(directory, verified=True)
        known = store.header
        check_tokenizer(known, tokenizer, directory)
        header = writer.write(
            packed.tokens + store.tokens[:],
            **known.model_dump(include={"tokenizer", "digest", "vocab_size", "width", "tuned"}),
            weights=known.weights,
            documents=known.documents + packed.documents,
            origins=(*known.origins, *packed.origins),
        )
    watcher.advance(1)
    return header


def check_free(directory: Path) -> None:
    """Raises `ConfigError` where a datastore is there already."""
    if (directory / HEADER).exists():
        raise ConfigError(f"{directory} holds a datastore: `pearl datastore add` adds to it, or name another directory")


def _packed(names: Sequence[str], fields: Sequence[str], tokenizer: Tokenizer, width: int, watcher: Watcher) -> Packed:
    files = listed(names)
    watcher.begin("tokenizing", sum(file.size for file in files))
    packed = pack(documents(files, fields, watcher), tokenizer, width)
    if not packed.tokens:
        raise ConfigError(f"there is no text in {', '.join(names)[:200]}")
    return packed
