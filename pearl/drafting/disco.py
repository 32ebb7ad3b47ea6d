"""The classifier of stop policy `disco`: how sure one may be that the target accepts a draft token. One small file.

Source: "Dynamic Speculation Lookahead Accelerates Speculative Decoding of Large Language Models" (Mamou et al. 2024):
two layers over the draft's ten largest probabilities, its entropy and the token's position.
`pearl.lab.experiments.disco` trains it.
"""

from __future__ import annotations

import json
import os
from math import exp
from operator import mul
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pearl.config import EngineConfig
from pearl.document import parse_json
from pearl.drafting.proposer import TOP, Features
from pearl.errors import ConfigError

INPUTS = TOP + 2
FARTHEST = 1024  # tokens: a position beyond counts as this one, for none was seen
_Name = Annotated[str, Field(min_length=1, max_length=4096)]
_Weight = Annotated[float, Field(ge=-1e6, le=1e6)]
_Inputs = Annotated[tuple[_Weight, ...], Field(min_length=INPUTS, max_length=INPUTS)]


def inputs(features: Features) -> list[float]:
    """What the classifier sees: ten probabilities (0 where the vocabulary has fewer), entropy in nats, position."""
    top = [*features.top[:TOP], *[0.0] * (TOP - len(features.top))]
    return [*top, features.entropy, float(min(features.position, FARTHEST))]


class Classifier(BaseModel):
    """A file's contents.

    Attributes:
        target, draft: the pair that it is for, as the models are named.
        threshold: the confidence (tau) up to which drafting ends.
        cap: most tokens of a window.
        examples: tokens that it was trained on; `accepted`: the share that the target agreed with.
        mean, scale: of the inputs: a unit sees (input - mean) / scale.
        hidden, hidden_bias: of the units [units][inputs], each with ReLU.
        out, out_bias: of the confidence, behind which there is a sigmoid.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    pearl_disco: Literal[1] = 1
    target: _Name
    draft: _Name
    threshold: Annotated[float, Field(ge=0, le=1)]
    cap: Annotated[int, Field(ge=1, le=64)]
    examples: Annotated[int, Field(ge=0)]
    accepted: Annotated[float, Field(ge=0, le=1)]
    mean: _Inputs
    scale: Annotated[tuple[Annotated[float, Field(ge=1e-9, le=1e6)], ...], Field(min_length=INPUTS, max_length=INPUTS)]
    hidden: Annotated[tuple[_Inputs, ...], Field(min_length=1, max_length=256)]
    hidden_bias: tuple[_Weight, ...]
    out: tuple[_Weight, ...]
    out_bias: _Weight

    @model_validator(mode="after")
    def _of_one_width(self) -> Classifier:
        if not len(self.hidden) == len(self.hidden_bias) == len(self.out):
            raise ValueError("its layers are of different widths")
        return self

    def confidence(self, features: Features) -> float:
        """That the target accepts the token, in [0, 1]."""
        seen = [(x - mean) / scale for x, mean, scale in zip(inputs(features), self.mean, self.scale, strict=True)]
        units = (
            max(0.0, bias + sum(map(mul, row, seen))) for row, bias in zip(self.hidden, self.hidden_bias, strict=True)
        )
        logit = self.out_bias + sum(map(mul, self.out, units))
        return 1 / (1 + exp(-logit)) if logit > -700 else 0.0

    def write(self, path: Path) -> None:
        """In one step: a file that was there stays until this one is whole. Raises `ConfigError`."""
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            beside.write_text(json.dumps(self.model_dump()) + "\n")
            beside.replace(path)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        finally:
            beside.unlink(missing_ok=True)


def read_classifier(path: Path, target: str, draft: str) -> Classifier:
    """The one of this pair. Raises `ConfigError` for a file that is none, or that is another pair's."""
    try:
        found = Classifier.model_validate_json(json.dumps(parse_json(path.read_text(encoding="utf-8"))))
    except OSError as error:
        raise ConfigError(f"cannot read the classifier {path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "contents"
        raise ConfigError(f"{path} is no classifier that pearl disco train has made: {where}: {first['msg']}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no classifier that pearl disco train has made: {error}") from None
    for role, own, wanted in (("target", found.target, target), ("draft", found.draft, draft)):
        if not _same(own, wanted):
            raise ConfigError(
                f"the classifier {path} is for {role} {own}, not {wanted}: make one with pearl disco train"
            )
    return found


def classifier_of(config: EngineConfig) -> Classifier | None:
    """The one that an engine is to have; None: none. Raises `ConfigError`."""
    return None if config.disco is None else read_classifier(Path(config.disco), config.target, config.draft)


def _same(one: str, other: str) -> bool:
    """Whether two names are of one model: equal, or the same directory or file."""
    if one == other:
        return True
    try:
        return Path(one).exists() and Path(one).samefile(other)
    except (OSError, ValueError):
        return False
