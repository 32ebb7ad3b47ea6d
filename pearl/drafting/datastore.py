"""A datastore: the tokens of many texts, indexed by a suffix array, on disk and mapped into memory.

A datastore is a directory with a header, `datastore.json`, and two files.  `tokens.bin` has the
tokens of all documents in reverse order.  Each token is stored as id + 1 in `width` bytes,
big-endian, and a 0 separates documents.  So tokens can be compared by comparing bytes, and no match
crosses the end of a document.  `order.bin` is the suffix array: the start of each suffix of these
tokens, in lexicographic order, as little-endian uint32.

A place is the index of a token in `tokens.bin`.  Tokens are reversed, so the suffix that starts at place p
reads a document backwards: first the token at p, then the token before it in the document, and so
on.  This suffix is the context of the document's next token, which is at place p - 1.  A binary
search in the suffix array finds the places with the longest matching context.  In the array, places
with shorter matches stand before and after the places with the longest match.

A build gives the directory its name only when it is complete, so a killed build leaves no
datastore. Files are not trusted: their sizes are checked on opening, and lookups in invalid data
find nothing. Texts are read in `datastore_build`.  Source: SSSD (Marzollo et al. 2024), which
improves on REST (He et al. 2023).
"""

import mmap
import os
import sys
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pearl.document import damaged
from pearl.drafting.ngram import MOST_MATCHED, Occurrence
from pearl.errors import ConfigError, installing
from pearl.text.stream import Tokenizer
from pearl.text.tokenizer import vocabulary_digest

HEADER = "datastore.json"
CONTINUATIONS = 50  # most occurrences per lookup; if there are more, every n-th is taken
DAMPING = 1.5  # an occurrence with `matched` matching tokens before it weighs DAMPING ** matched
FEW = 8  # with fewer occurrences than this, places with shorter matches are added
# Inner bounds of the bins of a candidate's share, which is the weight of its occurrences / (weight
# of all occurrences + weight of the longest match). Because of the last term, a share is near 1
# only if there are many occurrences.
BINS = (0.1, 0.25, 0.4, 0.6, 0.8, 0.93)
_MAX_HEADER = 1 << 24  # bytes
_MAX_TOKENS = 2**32 - 1
_MAX_IDS = 2**24 - 2


class DatastoreHeader(BaseModel):
    """The contents of `datastore.json`. Unknown keys, which earlier versions wrote, are ignored.

    Attributes:
        pearl_datastore: version of the format.
        tokenizer: name of the model whose tokenizer was used.
        digest: `vocabulary_digest` of that tokenizer's first `vocab_size` ids, in hex.
        tokens: number of tokens, including the zeros that separate documents.
        documents: number of documents.
        width: bytes per token in `tokens.bin`.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    pearl_datastore: Literal[2] = 2
    tokenizer: str
    digest: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    vocab_size: Annotated[int, Field(ge=1, le=_MAX_IDS)]
    tokens: Annotated[int, Field(ge=1, le=_MAX_TOKENS)]
    documents: Annotated[int, Field(ge=1)]
    width: Literal[2, 3]

    def files(self, directory: Path) -> tuple[tuple[Path, int], tuple[Path, int]]:
        """Return (path, size in bytes) of `tokens.bin` and of `order.bin`."""
        tokens = (directory / "tokens.bin", self.tokens * self.width)
        order = (directory / "order.bin", self.tokens * 4)
        return tokens, order


def width_of(vocab_size: int) -> int:
    """Return the number of bytes per token. Raises `ConfigError` if the vocabulary is too large."""
    if vocab_size > _MAX_IDS:
        raise ConfigError(
            f"a datastore takes vocabularies of up to {_MAX_IDS:,} tokens, not {vocab_size:,}"
        )
    return 2 if vocab_size < 2**16 else 3


# ---- reading ----


def read_header(directory: Path) -> DatastoreHeader:
    """Read the header of a datastore, and check the sizes of the files that the header describes.

    Raises `ConfigError` if a file is missing, damaged or not readable.
    """
    path = directory / HEADER
    try:
        if not path.is_file():
            raise ConfigError(
                f"{directory} is no datastore: it has no {HEADER}; `pearl datastore build` makes one"
            )
        if path.stat().st_size > _MAX_HEADER:
            raise ConfigError(f"datastore {directory} is damaged: {HEADER} is too large")
        with damaged(f"datastore {directory}", ConfigError):
            text = path.read_text(encoding="utf-8-sig", errors="replace")
            header = DatastoreHeader.model_validate_json(text)
        for file, size in header.files(directory):
            if not file.is_file() or file.stat().st_size != size:
                raise ConfigError(
                    f"datastore {directory} is damaged: {file.name} should have {size:,} bytes"
                )
    except OSError as error:
        raise ConfigError(f"cannot read the datastore {directory}: {error.strerror}") from None
    return header


def check_tokenizer(header: DatastoreHeader, tokenizer: Tokenizer, directory: Path) -> None:
    """Raise `ConfigError` unless every id of the datastore means the same token in the tokenizer."""
    size = header.vocab_size
    if tokenizer.vocab_size < size or vocabulary_digest(tokenizer, size).hex() != header.digest:
        model = " ".join(header.tokenizer.split())[:200]
        raise ConfigError(
            f"datastore {directory} was built with another tokenizer, that of {model}: build one with this model's"
        )


class Datastore:
    """A datastore that is open for lookups. Processes that open the same one share its page cache.

    Args:
        vocab_size: ids from this number on are never returned; None for no limit.

    Raises `ConfigError` for files that are missing, damaged or of another format.
    """

    def __init__(self, directory: Path, vocab_size: int | None = None) -> None:
        assert sys.byteorder == "little"
        self.directory = directory
        self.header = read_header(directory)
        self.width = self.header.width
        self._num_ids = min(self.header.vocab_size, vocab_size or self.header.vocab_size)
        (tokens, _), (order, _) = self.header.files(directory)
        self.tokens = _mapped(tokens)
        self.order = memoryview(_mapped(order)).cast("I")

    def __len__(self) -> int:
        return self.header.tokens

    def followed(self, occurrences: Sequence[Occurrence]) -> dict[int, list[Occurrence]]:
        """Return token -> the occurrences that this token follows.

        Occurrences at the end of a document are left out, and so are those before a token whose id
        is not below `vocab_size`.
        """
        tokens = self.tokens
        width = self.width
        by_bytes: dict[bytes, list[Occurrence]] = {}
        for occurrence in occurrences:
            end = occurrence[0] * width
            # The slice is empty at the end of the last document.
            by_bytes.setdefault(tokens[end - width : end], []).append(occurrence)
        by_token = {}
        for packed, places in by_bytes.items():
            token = int.from_bytes(packed, "big") - 1
            if 0 <= token < self._num_ids:
                by_token[token] = places
        return by_token

    def occurrences(self, text: Sequence[int], most: int = CONTINUATIONS) -> list[Occurrence]:
        """Return (place, match length) of places whose context matches the end of `text`.

        The longest matches come first.  A match has at most `MOST_MATCHED` tokens.  The search
        begins with the longest match.  Until it has found `FEW` places (a constant of this module),
        it halves the required match length, and adds the places that now match.  If all of them are
        too many, it adds only some of them, evenly spaced, so that there are at most `most` places.
        """
        key = self._key(text[-MOST_MATCHED:])
        order = self.order
        start = bisect_left(order, key, key=self._prefix(len(key)))
        end = start
        length = self._longest(key, start)
        matches: dict[int, int] = {}  # place -> match length
        while length and len(matches) < min(FEW, most):
            size = length * self.width
            prefix = self._prefix(size)
            start = bisect_left(order, key[:size], 0, start, key=prefix)
            end = bisect_right(order, key[:size], end, key=prefix)
            stride = max(1, -(-(end - start) // (most - len(matches))))
            for place in order[start:end:stride].tolist():
                matches.setdefault(place, length)
            length //= 2
        return list(matches.items())

    def _longest(self, key: bytes, at: int) -> int:
        """Return how many tokens the longest common prefix of `key` with any suffix has.

        `at`: the index in the suffix array at which `key` would be inserted. The suffix with the
        longest common prefix is next to it.
        """
        longest = 0
        prefix = self._prefix(len(key))
        for neighbour in self.order[max(0, at - 1) : at + 1].tolist():
            suffix = prefix(neighbour)
            size = (longest + 1) * self.width
            while size <= len(key) and suffix[:size] == key[:size]:
                longest += 1
                size += self.width
        return longest

    def _prefix(self, size: int) -> Callable[[int], bytes]:
        """Return a function: place of a suffix -> the suffix's first `size` bytes."""
        tokens = self.tokens
        width = self.width

        def prefix(start: int) -> bytes:
            offset = start * width
            return tokens[offset : offset + size]

        return prefix

    def _key(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of `tokens` in reverse, as `tokens.bin` would hold them.

        A token whose id the datastore cannot hold is left out, with all tokens before it. Example:
        for tokens 5 X 7 8, where X is such a token, return the bytes of 8 7.
        """
        width = self.width
        key = []
        for token in reversed(tokens):
            if not 0 <= token < self.header.vocab_size:
                break
            key.append((token + 1).to_bytes(width, "big"))
        return b"".join(key)


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # removed or truncated since its size was checked
        raise ConfigError(f"cannot read {path}: {error}") from None


# ---- writing ----


def _suffix_array(tokens: bytearray, width: int) -> Any:
    """Return the place of each suffix, in lexicographic order of the suffixes: [tokens], uint32.

    Raises `ConfigError` if pydivsufsort is not installed.
    """
    try:
        import numpy as np
        from pydivsufsort import divsufsort
    except ImportError:
        raise ConfigError(
            f"building a datastore needs pydivsufsort: install the extra, {installing('datastore')}"
        ) from None
    # The library sorts the suffixes of bytes; keep those that begin a token, at multiples of `width`.
    order = divsufsort(np.frombuffer(tokens, dtype=np.uint8))
    order = order[order % width == 0]
    order //= width
    return order.astype("<u4")


def check_free(directory: Path) -> None:
    """Raise `ConfigError` if `directory` exists and is not an empty directory."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is there already: name another directory")


def write(directory: Path, tokens: bytearray, **described: Any) -> DatastoreHeader:
    """Write a datastore to `directory`; return its header.

    Args:
        tokens: the packed documents, see `datastore_build.pack`.
        described: the fields of the header except `tokens`.

    Raises `ConfigError` if this fails, for example because another process has made the directory
    meanwhile. A failed build leaves no files.
    """
    if len(tokens) // described["width"] > _MAX_TOKENS:
        raise ConfigError(
            f"a datastore holds at most {_MAX_TOKENS:,} tokens: make several of these files"
        )
    order = _suffix_array(tokens, described["width"])
    header = DatastoreHeader(tokens=len(order), **described)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{directory.name}.", dir=directory.parent
        ) as scratch:
            building = Path(scratch) / directory.name
            building.mkdir()
            for (path, _), data in zip(header.files(building), (tokens, order), strict=True):
                path.write_bytes(data)
            (building / HEADER).write_text(header.model_dump_json(indent=1), encoding="utf-8")
            os.replace(building, directory)
    except OSError as error:
        raise ConfigError(f"cannot write the datastore {directory}: {error.strerror}") from None
    return header
