"""The classifier of stop policy `disco`, which predicts whether the target accepts a draft token.

The classifier has two layers. Its inputs are the ten largest probabilities and the entropy of the
draft's distribution, and the token's position in the text. Source: "Dynamic Speculation Lookahead
Accelerates Speculative Decoding of Large Language Models" (Mamou et al. 2024). This file must not
know how the classifier is trained; `pearl.lab.studies.stops` trains it.
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
FARTHEST = 1024  # a larger position counts as this one, because no training example has it
_Name = Annotated[str, Field(min_length=1, max_length=4096)]
_Weight = Annotated[float, Field(ge=-1e6, le=1e6)]
_Inputs = Annotated[tuple[_Weight, ...], Field(min_length=INPUTS, max_length=INPUTS)]


def inputs(features: Features) -> list[float]:
    """Return the classifier's inputs: ten probabilities (padded with 0), entropy in nats, position."""
    values = list(features.top[:TOP])
    values += [0.0] * (TOP - len(values))
    values.append(features.entropy)
    values.append(float(min(features.position, FARTHEST)))
    return values


class Classifier(BaseModel):
    """A classifier, with the fields of its JSON file.

    Attributes:
        target, draft: names of the models that the classifier was trained for.
        threshold: drafting ends if the confidence is at most this (tau in the paper).
        cap: the most tokens of a window.
        examples: number of training tokens.
        accepted: share of the training tokens that the target accepted.
        mean, scale: the first layer takes (input - mean) / scale for each input.
        hidden, hidden_bias: weights [units][inputs] and biases of the first layer, with ReLU.
        out, out_bias: weights and bias of the second layer, with a sigmoid.
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
        """Return the probability that the target accepts the token: sigmoid(out * relu(hidden * x + bias) + bias)."""
        scaled = []
        for x, mean, scale in zip(inputs(features), self.mean, self.scale, strict=True):
            scaled.append((x - mean) / scale)
        units = []
        for row, bias in zip(self.hidden, self.hidden_bias, strict=True):
            units.append(max(0.0, bias + sum(map(mul, row, scaled))))
        logit = self.out_bias + sum(map(mul, self.out, units))
        return 1 / (1 + exp(-logit)) if logit > -700 else 0.0

    def stop(self, features: Features) -> bool:
        """Return whether a window ends after this token: confidence <= threshold, or the window has `cap` tokens."""
        return features.index + 1 >= self.cap or self.confidence(features) <= self.threshold

    def end_window(self, accepted: int) -> None:
        """Do nothing, because the classifier learns nothing while it is in use."""

    def write(self, path: Path) -> None:
        """Write the classifier's file, completely or not at all.

        Raises `ConfigError` if the file cannot be written.
        """
        building = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            building.write_text(self.model_dump_json() + "\n")
            building.replace(path)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def read_classifier(path: Path, target: str, draft: str) -> Classifier:
    """Read the classifier for this pair of models.

    Raises `ConfigError` if the file cannot be read, is damaged or is for another pair.
    """
    try:
        classifier = Classifier.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the classifier {path}: {error.strerror}") from None
    except ValidationError as error:
        problem = error.errors()[0]
        why = f"{'.'.join(map(str, problem['loc'])) or 'contents'}: {problem['msg']}"
        raise ConfigError(
            f"{path} is no classifier that pearl disco train has made: {why}"
        ) from None
    for role, trained, model in (
        ("target", classifier.target, target),
        ("draft", classifier.draft, draft),
    ):
        if not _is_same_model(trained, model):
            raise ConfigError(
                f"the classifier {path} is for {role} {trained}, not {model}: make one with pearl disco train"
            )
    return classifier


def _is_same_model(name: str, model: str) -> bool:
    if name == model:
        return True
    return os.path.exists(name) and os.path.exists(model) and os.path.samefile(name, model)


def classifier_of(config: EngineConfig) -> Classifier | None:
    """Return the classifier of an engine; None if the engine is configured without one.

    Raises `ConfigError` as `read_classifier` does.
    """
    if config.disco is None:
        return None
    return read_classifier(Path(config.disco), config.target, config.draft)
