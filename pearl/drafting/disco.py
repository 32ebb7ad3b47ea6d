"""The classifier of stop policy `disco`, which predicts whether the target accepts a draft token, and its file.

Two layers over the draft's ten largest probabilities, its entropy and the token's position.  Source: "Dynamic
Speculation Lookahead Accelerates Speculative Decoding of Large Language Models" (Mamou et al. 2024).  It must not know
how it is trained: see `pearl.lab.studies.stops`.
"""

from __future__ import annotations

import os
from math import exp
from operator import mul
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pearl.config import EngineConfig
from pearl.drafting.stops import TOP, Features
from pearl.errors import ConfigError

INPUTS = TOP + 2
FARTHEST = 1024  # larger positions count as this one: there are no examples of them
_Name = Annotated[str, Field(min_length=1, max_length=4096)]
_Weight = Annotated[float, Field(ge=-1e6, le=1e6)]
_Inputs = Annotated[tuple[_Weight, ...], Field(min_length=INPUTS, max_length=INPUTS)]


def inputs(features: Features) -> list[float]:
    """The classifier's inputs: ten probabilities (padded with 0), entropy in nats, position."""
    top = [*features.top[:TOP], *[0.0] * (TOP - len(features.top))]
    return [*top, features.entropy, float(min(features.position, FARTHEST))]


class Classifier(BaseModel):
    """The contents of a file.

    Attributes:
        target, draft: names of the pair's models.
        threshold: drafting ends at this confidence (tau) or below.
        cap: most tokens of a window.
        examples, accepted: number of training tokens, and share of them that the target accepted.
        mean, scale: the layers see (input - mean) / scale.
        hidden, hidden_bias: first layer [units][inputs], with ReLU.
        out, out_bias: second layer, with a sigmoid.
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
    scale: Annotated[
        tuple[Annotated[float, Field(ge=1e-9, le=1e6)], ...],
        Field(min_length=INPUTS, max_length=INPUTS),
    ]
    hidden: Annotated[tuple[_Inputs, ...], Field(min_length=1, max_length=256)]
    hidden_bias: tuple[_Weight, ...]
    out: tuple[_Weight, ...]
    out_bias: _Weight

    @model_validator(mode="after")
    def _check_widths(self) -> Classifier:
        if not len(self.hidden) == len(self.hidden_bias) == len(self.out):
            raise ValueError("its layers are of different widths")
        return self

    def confidence(self, features: Features) -> float:
        """The probability that the target accepts the token."""
        seen = [
            (x - mean) / scale
            for x, mean, scale in zip(inputs(features), self.mean, self.scale, strict=True)
        ]
        units = (
            max(0.0, bias + sum(map(mul, row, seen)))
            for row, bias in zip(self.hidden, self.hidden_bias, strict=True)
        )
        logit = self.out_bias + sum(map(mul, self.out, units))
        return 1 / (1 + exp(-logit)) if logit > -700 else 0.0

    def write(self, path: Path) -> None:
        """Write the file whole or not at all. Raises `ConfigError`."""
        building = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            building.write_text(self.model_dump_json() + "\n")
            building.replace(path)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def read_classifier(path: Path, target: str, draft: str) -> Classifier:
    """Read the classifier of this pair. Raises `ConfigError` for a damaged file or another pair's."""
    try:
        found = Classifier.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the classifier {path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc'])) or 'contents'}: {first['msg']}"
        raise ConfigError(
            f"{path} is no classifier that pearl disco train has made: {why}"
        ) from None
    for role, own, wanted in (("target", found.target, target), ("draft", found.draft, draft)):
        is_same = own == wanted or (
            os.path.exists(own) and os.path.exists(wanted) and os.path.samefile(own, wanted)
        )
        if not is_same:
            raise ConfigError(
                f"the classifier {path} is for {role} {own}, not {wanted}: make one with pearl disco train"
            )
    return found


def classifier_of(config: EngineConfig) -> Classifier | None:
    """An engine's classifier, if it is configured with one. Raises `ConfigError`."""
    return (
        None
        if config.disco is None
        else read_classifier(Path(config.disco), config.target, config.draft)
    )
