"""Recorded texts: what a target said, and what a draft made of every position of it. One file; no torch.

A file is a zip of numpy arrays (npz), each with the zip's checksum:

    header    uint8: JSON, see `Header`
    tokens    int32 [n]: prompt and answer of each text, one after the other
    lengths   int64 [texts, 2]: tokens of each prompt and of each answer
    ids       int32 [answer tokens, top]: what the draft holds likeliest at each position of the answers
    logits    float32 [answer tokens, top]: of these, before the temperature
    features  float32 [answer tokens, 12]: of the draft's whole row at temperature 1, its ten largest probabilities, its
              entropy in nats, and the probability of the token that it draws; older files lack them

The last token of a row is the one that the draft draws there, likely or not.  So whoever draws again from the row finds
that token, and the same runners-up.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pearl.document import parse_json
from pearl.errors import ModelError
from pearl.protocol.options import Sampling

FEATURES = 12  # of a token, as stop policies see them
_ARRAYS = {"header": "uint8", "tokens": "int32", "lengths": "int64", "ids": "int32", "logits": "float32"}
_Ints = npt.NDArray[np.int32]
_Floats = npt.NDArray[np.float32]


class Header(BaseModel):
    """What a file says of its texts.

    Attributes:
        target, draft: the models, as they were named.
        vocab_size: of the target.
        eos: ids that end a text.
        seed: text number n, from 1 on, was drawn with seed + n, as `pearl bench` draws its n-th.
        max_tokens: of an answer: what is shorter ended by an EOS.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    pearl_texts: Literal[1] = 1
    target: str
    draft: str
    vocab_size: Annotated[int, Field(ge=2, le=2**31 - 1)]
    eos: tuple[Annotated[int, Field(ge=0)], ...]
    temperature: Annotated[float, Field(ge=0)]
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: int
    max_tokens: Annotated[int, Field(ge=1)]

    def sampling(self, number: int) -> Sampling:
        """How text `number` was drawn, from 1 on."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed + number)


@dataclass(frozen=True, eq=False)
class RecordedText:
    """One of them. Row i of `ids` and `logits` [answer, top] is the draft's for answer[i], given all before it.

    The last of a row is the token that the draft draws. `features`: [answer, FEATURES]; None in an older file.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    ids: _Ints
    logits: _Floats
    features: _Floats | None = None

    @property
    def right(self) -> list[bool]:
        """Of each token of the answer whether the draft draws it too."""
        return [drawn == token for drawn, token in zip(self.ids[:, -1].tolist(), self.answer, strict=True)]


@dataclass(frozen=True)
class RecordedTexts:
    header: Header
    texts: tuple[RecordedText, ...]


def write_texts(path: Path, header: Header, texts: Sequence[RecordedText]) -> None:
    """In one step: a file that was there stays until this one is whole. Raises `ModelError`."""
    arrays: dict[str, Any] = {
        "header": np.frombuffer(header.model_dump_json().encode(), np.uint8),
        "tokens": np.array([token for text in texts for token in (*text.prompt, *text.answer)], np.int32),
        "lengths": np.array([(len(text.prompt), len(text.answer)) for text in texts], np.int64).reshape(-1, 2),
        "ids": np.concatenate([text.ids for text in texts]),
        "logits": np.concatenate([text.logits for text in texts]),
    }
    features = [text.features for text in texts if text.features is not None]
    if len(features) == len(texts):
        arrays["features"] = np.concatenate(features)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            np.savez_compressed(file, **arrays)
        os.replace(beside, path)
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror}") from None
    finally:
        beside.unlink(missing_ok=True)


def read_texts(path: Path) -> RecordedTexts:
    """Raises `ModelError`, which names the file and what is wrong with it."""
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise ModelError(f"cannot read the recorded texts {path}: {error.strerror}") from None
    return _read(path, changed)


@lru_cache(maxsize=2)  # a simulation asks for the same ones for each text
def _read(path: Path, changed: int) -> RecordedTexts:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in _ARRAYS}
            if "features" in file.files:
                arrays["features"] = file["features"]
        return _checked(arrays)
    except OSError as error:
        why = error.strerror or "it is not a file of numpy arrays"
    except (zipfile.BadZipFile, EOFError) as error:
        why = f"it is damaged: {error}"
    except KeyError as error:
        why = f"it has no {error.args[0]}"
    except ValidationError as error:
        first = error.errors()[0]
        why = f"its header: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (ValueError, TypeError, json.JSONDecodeError) as error:
        why = str(error).partition("\n")[0]
    raise ModelError(f"{path} holds no texts that `pearl simulate record` wrote: {why}")


def _checked(arrays: dict[str, Any]) -> RecordedTexts:
    """Raises `ValueError`."""
    for name, dtype in _ARRAYS.items():
        if not isinstance(arrays[name], np.ndarray) or arrays[name].dtype != dtype:
            raise ValueError(f"{name} is not of {dtype}")
    header = Header.model_validate_json(json.dumps(parse_json(arrays["header"].tobytes().decode())))
    tokens, lengths, ids, logits = (arrays[name] for name in ("tokens", "lengths", "ids", "logits"))
    if lengths.ndim != 2 or lengths.shape[1:] != (2,) or not len(lengths) or lengths.min() < 1:
        raise ValueError("a text has no prompt or no answer")
    if tokens.ndim != 1 or lengths.sum() != len(tokens):
        raise ValueError("its tokens are not as many as its texts should have")
    if ids.ndim != 2 or ids.shape != logits.shape or len(ids) != lengths[:, 1].sum() or not ids.shape[1]:
        raise ValueError("its rows are not as many as its answers have tokens")
    if not all(each.min() >= 0 and each.max() < header.vocab_size for each in (tokens, ids)):
        raise ValueError(f"a token lies outside the vocabulary of {header.vocab_size}")
    if any(token >= header.vocab_size for token in header.eos):
        raise ValueError(f"an EOS lies outside the vocabulary of {header.vocab_size}")
    if not np.isfinite(logits).all():
        raise ValueError("a logit is not finite")
    features = arrays.get("features")
    if features is not None and (features.dtype != np.float32 or features.shape != (len(ids), FEATURES)):
        raise ValueError("its features are not as many as its answers have tokens")
    if features is not None and not (features.min() >= 0 and features.max() < 1e3):
        raise ValueError("a feature is no probability or entropy")
    texts, start, row = [], 0, 0
    for prompt, answer in lengths.tolist():
        whole, rows = tuple(tokens[start : start + prompt + answer].tolist()), slice(row, row + answer)
        own = None if features is None else features[rows]
        texts.append(RecordedText(whole[:prompt], whole[prompt:], ids[rows], logits[rows], own))
        start, row = start + prompt + answer, row + answer
    return RecordedTexts(header, tuple(texts))
