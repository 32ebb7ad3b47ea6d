"""A datastore: the tokens of many texts, indexed by a suffix array, on disk and mapped into memory.

A directory holds a header, `datastore.json`, and two files that it names.  `tokens-*.bin`: the tokens of all documents
back to front, the last one's last token first, each as its id + 1 in `width` bytes, big-endian, and a 0 between
documents.  `order-*.bin`: where each suffix of these begins, as uint32, little-endian, in the order of the suffixes.

To compare bytes is to compare tokens, and nothing that is looked up matches across a document's end.  Back to front,
the suffixes are the contexts of each place, nearest token first: one binary search finds the places whose contexts
match longest, and those that match less far stand around them.

The header is written last, in one step: a build that is killed leaves the datastore that was there before, or none.
A datastore comes from outside, so nothing in it is believed: sizes are checked when it is opened, contents are compared
with their checksums on request, and a lookup that finds nonsense finds nothing.  Source: SSSD (Marzollo et al. 2024)
and REST (He et al. 2023), which it improves.  Reads no texts: see `corpus.py`.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import sys
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pearl.document import parse_json
from pearl.drafting.ngram import MOST_MATCHED
from pearl.errors import ConfigError
from pearl.extras import installing
from pearl.text.stream import Tokenizer
from pearl.text.tokenizer import vocabulary_digest

VERSION = 1
HEADER = "datastore.json"
CONTINUATIONS = 50  # looked at for one place, taken at regular intervals over all that match
BINS = (0.1, 0.25, 0.4, 0.6, 0.8, 0.93)  # of a candidate's share, see `Weights`: their inner bounds
_MOST_HEADER = 1 << 24  # bytes
_MOST_TOKENS = 2**32 - 1
_MOST_IDS = 2**24 - 2
_CHUNK = 1 << 24  # bytes between two looks at the page cache

Occurrence = tuple[int, int]  # position, tokens before it that match
Rate = Annotated[float, Field(ge=0, le=1)]
_PLAIN = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

# How often a candidate is right, by its share (rows) and by how many tokens before it match (columns). Measured with
# 104 MB of Python source on 36 answers of SmolLM2-135M (4,203 tokens, greedy and at temperature 0.7) to HumanEval,
# GSM8K and MT-bench; a text soon has rates of its own.
_PRIOR: tuple[tuple[float, ...], ...] = (
    (0.03, 0.03, 0.05, 0.03, 0.07, 0.02, 0.03, 0.06, 0.11, 0.02, 0.04, 0.02),
    (0.07, 0.10, 0.12, 0.11, 0.10, 0.10, 0.25, 0.07, 0.09, 0.13, 0.12, 0.06),
    (0.10, 0.19, 0.28, 0.24, 0.33, 0.29, 0.12, 0.24, 0.21, 0.28, 0.21, 0.20),
    (0.05, 0.27, 0.49, 0.41, 0.35, 0.27, 0.34, 0.33, 0.39, 0.24, 0.44, 0.61),
    (0.20, 0.43, 0.63, 0.52, 0.61, 0.60, 0.66, 0.55, 0.48, 0.60, 0.44, 0.72),
    (0.25, 0.28, 0.83, 0.58, 0.77, 0.70, 0.74, 0.64, 0.76, 0.79, 0.64, 0.89),
    (0.80, 0.80, 0.72, 0.81, 0.57, 0.80, 0.85, 0.84, 0.82, 0.82, 0.82, 0.96),
)


class Weights(BaseModel):
    """How counts become chances; `pearl datastore tune` finds a datastore's own.

    An occurrence weighs `damping ** matched`, where `matched` tokens before it match.  A candidate's share is its
    occurrences' weight over that of all and of one more that matches as far as the longest: near 1 only where there are
    many.

    Attributes:
        few: occurrences; where there are fewer, those of shorter suffixes are added.
        fade: factor on the chance of a candidate behind a guess.
        rates: how often a candidate is right: [share, `BINS`] [matched - 1, up to `MOST_MATCHED`].
    """

    model_config = _PLAIN

    damping: Annotated[float, Field(ge=1, le=100)] = 1.5
    few: Annotated[int, Field(ge=1, le=CONTINUATIONS)] = 8
    fade: Annotated[float, Field(gt=0, le=1)] = 1.0
    rates: Annotated[
        tuple[Annotated[tuple[Rate, ...], Field(min_length=MOST_MATCHED, max_length=MOST_MATCHED)], ...],
        Field(min_length=len(BINS) + 1, max_length=len(BINS) + 1),
    ] = _PRIOR


class Origin(BaseModel):
    """What a part of a datastore was built from: a file or folder as it was named, its documents and bytes of text."""

    model_config = _PLAIN

    name: str
    documents: Annotated[int, Field(ge=0)]
    size: Annotated[int, Field(ge=0)]


class Header(BaseModel):
    """What a datastore says of itself.

    Attributes:
        tokenizer: the model whose tokenizer it was, as it was named.
        digest: `vocabulary_digest` of that tokenizer's first `vocab_size` ids, in hex.
        tokens: ends of documents included.
        build: in the names of the two files.
        checksums: CRC-32 of tokens and order.
        tuned: what the weights were tuned on; empty: they are the defaults.
    """

    model_config = _PLAIN

    pearl_datastore: Literal[1] = 1
    tokenizer: str
    digest: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    vocab_size: Annotated[int, Field(ge=1, le=_MOST_IDS)]
    tokens: Annotated[int, Field(ge=1, le=_MOST_TOKENS)]
    documents: Annotated[int, Field(ge=1)]
    width: Literal[2, 3]
    build: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    checksums: tuple[int, int]
    origins: tuple[Origin, ...] = ()
    weights: Weights = Weights()
    tuned: str = ""

    def files(self, directory: Path) -> tuple[tuple[Path, int], tuple[Path, int]]:
        """Tokens and order, with the bytes that each must have."""
        tokens, order = (directory / f"{name}-{self.build}.bin" for name in ("tokens", "order"))
        return (tokens, self.tokens * self.width), (order, self.tokens * 4)


def width_of(vocab_size: int) -> int:
    """Bytes a token. Raises `ConfigError` for a vocabulary that is too large."""
    if vocab_size > _MOST_IDS:
        raise ConfigError(f"a datastore takes vocabularies of up to {_MOST_IDS:,} tokens, not {vocab_size:,}")
    return 2 if vocab_size < 2**16 else 3


# ---- opening ----


def read_header(directory: Path) -> Header:
    """The header of the datastore in `directory`, whose files are there in full. Raises `ConfigError`."""
    try:
        header = _parsed(directory, _header_text(directory))
        for path, size in header.files(directory):
            if not path.is_file() or path.stat().st_size != size:
                raise ConfigError(f"datastore {directory} is damaged: {path.name} should have {size:,} bytes")
    except OSError as error:
        raise ConfigError(f"cannot read the datastore {directory}: {error.strerror}") from None
    return header


def _header_text(directory: Path) -> str:
    path = directory / HEADER
    if not path.is_file():
        raise ConfigError(f"{directory} is no datastore: it has no {HEADER}; `pearl datastore build` makes one")
    if path.stat().st_size > _MOST_HEADER:
        raise ConfigError(f"datastore {directory} is damaged: {HEADER} is too large")
    return path.read_text(encoding="utf-8-sig", errors="replace")


def _parsed(directory: Path, text: str) -> Header:
    try:
        version = parse_json(text)["pearl_datastore"]
        if version != VERSION:
            raise ConfigError(
                f"datastore {directory} has format {_line(version)[:20]}, this PEARL reads {VERSION}: build it anew"
            )
        return Header.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (KeyError, TypeError, IndexError):
        why = "it is another program's"
    except ValueError as error:
        why = str(error)
    raise ConfigError(f"datastore {directory} is damaged: {HEADER}: {_line(why)}")


def _line(value: object) -> str:
    """What a file says, as part of a message."""
    return " ".join(str(value).split())[:200]


def check_tokenizer(header: Header, tokenizer: Tokenizer, directory: Path) -> None:
    """Raises `ConfigError` unless the datastore's ids are the tokenizer's. It may have more."""
    size = header.vocab_size
    if tokenizer.vocab_size < size or vocabulary_digest(tokenizer, size).hex() != header.digest:
        raise ConfigError(
            f"datastore {directory} was built with another tokenizer, that of {_line(header.tokenizer)}: "
            "build one with this model's"
        )


class Datastore:
    """A datastore, open for lookups. Its memory is the page cache's: processes that open the same one share it.

    Args:
        vocab_size: ids that whoever asks can use; others are never given. None: all.
        verified: whether to compare the contents with their checksums, which reads all of them.

    Raises `ConfigError` for what is missing, damaged or of another format.
    """

    def __init__(self, directory: Path, vocab_size: int | None = None, verified: bool = False) -> None:
        self.directory, self.header = directory, read_header(directory)
        self.weights, self.width = self.header.weights, self.header.width
        self._last = min(self.header.vocab_size, self.header.vocab_size if vocab_size is None else vocab_size)
        assert sys.byteorder == "little"
        (tokens, _), (order, _) = self.header.files(directory)
        self.tokens, self._mapped_order = _mapped(tokens), _mapped(order)
        self.order = memoryview(self._mapped_order).cast("I")
        if verified:
            self._verify()

    def __len__(self) -> int:
        return self.header.tokens

    def _verify(self) -> None:
        files, contents = self.header.files(self.directory), (self.tokens, self._mapped_order)
        for (path, _), data, known in zip(files, contents, self.header.checksums, strict=True):
            if _checksum(data) != known:
                raise ConfigError(f"datastore {self.directory} is damaged: {path.name} differs from its checksum")

    def followed(self, occurrences: Sequence[Occurrence]) -> dict[int, list[Occurrence]]:
        """The occurrences by the token that stands there; without those at a document's end, or that nobody can use."""
        tokens, width = self.tokens, self.width
        found: dict[bytes, list[Occurrence]] = {}
        for each in occurrences:
            end = each[0] * width
            token = tokens[end - width : end]  # at the very end, where there is none: empty
            if (known := found.get(token)) is None:
                found[token] = [each]
            else:
                known.append(each)
        usable = {int.from_bytes(token, "big") - 1: those for token, those in found.items()}
        return {token: those for token, those in usable.items() if 0 <= token < self._last}

    def occurrences(self, text: Sequence[int], most: int = CONTINUATIONS) -> list[Occurrence]:
        """Where what `text` ends with has been seen, as (place, tokens before it that match); see `followed`.

        The longest match first, of at most `MOST_MATCHED` tokens; where that has been seen less than `Weights.few`
        times, those that match half as far too, and so on. Of many `most` are taken, at regular intervals over the
        order: a sample of them all.
        """
        key, width, order = self._key(text[-MOST_MATCHED:]), self.width, self.order
        first = bisect_left(order, key, key=self._prefix(len(key)))
        length = self._longest(key, first)
        found: dict[int, int] = {}
        last = first
        while length and len(found) < min(self.weights.few, most):
            first, last = self._widened(key[: length * width], first, last)
            stride = max(1, -(-(last - first) // (most - len(found))))
            for place in order[first:last:stride].tolist():
                found.setdefault(place, length)
            length //= 2
        return list(found.items())

    def _longest(self, key: bytes, at: int) -> int:
        """Tokens at the beginning of `key` that a suffix begins with too, where `key` belongs at `at` in the order."""
        longest, width, prefix = 0, self.width, self._prefix(len(key))
        for neighbour in self.order[max(0, at - 1) : at + 1].tolist():
            suffix = prefix(neighbour)
            while suffix[: (longest + 1) * width] == key[: (longest + 1) * width] and longest * width < len(key):
                longest += 1
        return longest

    def _widened(self, key: bytes, first: int, last: int) -> tuple[int, int]:
        """The range of the order around `first` to `last` whose suffixes begin with `key`."""
        order, prefix, end = self.order, self._prefix(len(key)), len(self.order)
        step = 1
        while first - step >= 0 and prefix(order[first - step]) == key:
            step *= 2
        first = bisect_left(order, key, max(0, first - step), first, key=prefix)
        step = 1
        while last + step <= end and prefix(order[last + step - 1]) == key:
            step *= 2
        return first, bisect_right(order, key, last, min(end, last + step), key=prefix)

    def _prefix(self, size: int) -> Callable[[int], bytes]:
        """A suffix's first `size` bytes, by where it begins. Beyond the end there are none."""
        tokens, width = self.tokens, self.width

        def prefix(start: int) -> bytes:
            at = start * width
            return tokens[at : at + size]

        return prefix

    def _key(self, tokens: Sequence[int]) -> bytes:
        """The tokens back to front, as the file has them; only those after the last one that it cannot have."""
        width, most, usable = self.width, self.header.vocab_size, 0
        for token in reversed(tokens):
            if not 0 <= token < most:
                break
            usable += 1
        return b"".join([(token + 1).to_bytes(width, "big") for token in tokens[: -usable - 1 : -1]])


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # removed, or emptied, since its size was read
        raise ConfigError(f"cannot read {path}: {error}") from None


def _checksum(data: Any) -> int:
    view, value = memoryview(data).cast("B"), 0
    for at in range(0, len(view), _CHUNK):
        value = zlib.crc32(view[at : at + _CHUNK], value)
    return value


# ---- writing ----


def suffix_array(tokens: bytearray, width: int) -> Any:
    """Where each suffix of the packed tokens begins, in their order: [tokens], uint32.

    Raises `ConfigError` where the library that builds it is missing.
    """
    try:
        import numpy as np
        from pydivsufsort import divsufsort
    except ImportError:
        raise ConfigError(
            f"building a datastore needs pydivsufsort: install the extra, {installing('datastore')}"
        ) from None
    order = divsufsort(np.frombuffer(tokens, dtype=np.uint8))  # of bytes: every `width`-th suffix is one of tokens
    order = order[order % width == 0]
    order //= width
    return order.astype("<u4")


class Writer:
    """The only one that writes into `directory`, once entered, which waits for others. Raises `ConfigError`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._saved: set[Path] = set()

    def __enter__(self) -> Writer:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.directory / ".lock")
            self._lock.acquire()
        except OSError as error:
            raise ConfigError(f"cannot write the datastore {self.directory}: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._saved:  # of a build that came to nothing
            path.unlink(missing_ok=True)
        self._lock.release()

    def write(self, tokens: bytearray, **described: Any) -> Header:
        """Makes a datastore of packed documents; the rest is the header's. What was there before is replaced."""
        if len(tokens) // described["width"] > _MOST_TOKENS:
            raise ConfigError(f"a datastore holds at most {_MOST_TOKENS:,} tokens: make several of these files")
        order = suffix_array(tokens, described["width"])
        header = Header(
            tokens=len(order),
            build=secrets.token_hex(8),
            checksums=(_checksum(tokens), _checksum(order)),
            **described,
        )
        for (path, _), data in zip(header.files(self.directory), (tokens, order), strict=True):
            self._save(path, data)
        self.publish(header)
        return header

    def publish(self, header: Header) -> None:
        """Makes `header` the one that counts."""
        new = self.directory / f"{HEADER}.new"
        self._save(new, json.dumps(header.model_dump(), indent=1).encode())
        os.replace(new, self.directory / HEADER)
        entry = os.open(self.directory, os.O_RDONLY)
        os.fsync(entry)
        os.close(entry)
        self._saved.clear()
        self._sweep(header)

    def _save(self, path: Path, data: Any) -> None:
        self._saved.add(path)
        try:
            with path.open("wb") as file:
                file.write(memoryview(data).cast("B"))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None

    def _sweep(self, header: Header) -> None:
        """Removes the files of earlier builds, and what a killed one has left."""
        named = {path for path, _ in header.files(self.directory)}
        for pattern in ("tokens-*.bin", "order-*.bin"):
            for path in set(self.directory.glob(pattern)) - named:
                path.unlink(missing_ok=True)
