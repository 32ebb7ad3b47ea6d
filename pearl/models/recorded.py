"""The file format of recorded texts: a target's answers and what the draft draws at every position. No torch.

A file is a zip of numpy arrays (npz), each with the zip's checksum:

    header    uint8: JSON, see `Header`
    tokens    int32 [n]: prompt and answer of each text, concatenated
    lengths   int64 [texts, 2]: tokens of each prompt and of each answer
    drawn     int32 [answer tokens]: the token that the draft draws at each position of the answers
    features  float32 [answer tokens, 12]: the ten largest probabilities of the draft's whole row at temperature 1, its
              entropy in nats, and the probability of the token that it draws
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pearl.document import parse_json
from pearl.errors import ModelError
from pearl.protocol.options import Sampling

FEATURES = 12  # of a token, as stop policies see them
_DTYPES = {
    "header": "uint8",
    "tokens": "int32",
    "lengths": "int64",
    "drawn": "int32",
    "features": "float32",
}
_Ints = npt.NDArray[np.int32]
_Floats = npt.NDArray[np.float32]


class Header(BaseModel):
    """How the texts were made.

    Attributes:
        target, draft: names of the models.
        vocab_size: of the target.
        eos: ids that end a text.
        seed: text number n, from 1 on, was drawn with seed + n, as `pearl bench` draws its n-th.
        max_tokens: of an answer; a shorter one ended by an EOS.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    pearl_texts: Literal[2] = 2
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
        """How text `number`, from 1 on, was drawn."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed + number)


@dataclass(frozen=True, eq=False)
class RecordedText:
    """One text. drawn[i] of `drawn` [answer] and row i of `features` [answer, FEATURES] belong to answer[i]."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    drawn: _Ints
    features: _Floats

    @property
    def right(self) -> list[bool]:
        """For each token of the answer, whether the draft draws it too."""
        return [drawn == token for drawn, token in zip(self.drawn.tolist(), self.answer, strict=True)]


@dataclass(frozen=True)
class RecordedTexts:
    header: Header
    texts: tuple[RecordedText, ...]


def write_texts(path: Path, header: Header, texts: Sequence[RecordedText]) -> None:
    """Write a file atomically. Raises `ModelError`."""
    arrays: dict[str, Any] = {
        "header": np.frombuffer(header.model_dump_json().encode(), np.uint8),
        "tokens": np.array([token for text in texts for token in (*text.prompt, *text.answer)], np.int32),
        "lengths": np.array([(len(text.prompt), len(text.answer)) for text in texts], np.int64).reshape(-1, 2),
        "drawn": np.concatenate([text.drawn for text in texts]),
        "features": np.concatenate([text.features for text in texts]),
    }
    building = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with building.open("wb") as file:
            np.savez_compressed(file, **arrays)
        os.replace(building, path)
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror}") from None
    finally:
        building.unlink(missing_ok=True)


def read_texts(path: Path) -> RecordedTexts:
    """Raises `ModelError`, which names the file and what is wrong with it."""
    if not path.exists():
        raise ModelError(f"cannot read the recorded texts {path}: No such file or directory")
    try:
        with np.load(path, allow_pickle=False) as file:
            return _checked({name: file[name] for name in _DTYPES})
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
    for name, dtype in _DTYPES.items():
        _require(isinstance(arrays[name], np.ndarray) and arrays[name].dtype == dtype, f"{name} is not of {dtype}")
    header = Header.model_validate_json(json.dumps(parse_json(arrays["header"].tobytes().decode())))
    tokens, lengths, drawn = (arrays[name] for name in ("tokens", "lengths", "drawn"))
    features, most = arrays["features"], header.vocab_size
    _require(
        lengths.ndim == 2 and lengths.shape[1:] == (2,) and len(lengths) > 0 and lengths.min() > 0,
        "a text has no prompt or no answer",
    )
    _require(tokens.ndim == 1 and lengths.sum() == len(tokens), "tokens and lengths differ")
    _require(drawn.shape == (lengths[:, 1].sum(),), "its draws are not as many as its answers have tokens")
    for each in (tokens, drawn, np.array([0, *header.eos])):
        _require(each.min() >= 0 and each.max() < most, f"a token lies outside the vocabulary of {most}")
    _require(features.shape == (len(drawn), FEATURES), "features has a wrong shape")
    _require(features.min() >= 0 and features.max() < 1e3, "a feature is no probability or entropy")
    texts, start, row = [], 0, 0
    for prompt, answer in lengths.tolist():
        whole, rows = tuple(tokens[start : start + prompt + answer].tolist()), slice(row, row + answer)
        texts.append(RecordedText(whole[:prompt], whole[prompt:], drawn[rows], features[rows]))
        start, row = start + prompt + answer, row + answer
    return RecordedTexts(header, tuple(texts))


def _require(holds: Any, what: str) -> None:
    if not holds:
        raise ValueError(what)
