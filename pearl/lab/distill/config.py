"""All settings of a distillation.

As in `pearl.config`, a configuration file is a flat YAML mapping, and each field has a command-line
flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import yaml
from pydantic import Field, field_validator, model_validator

from pearl.config import Section, read_file
from pearl.config.engine import ShortDType
from pearl.config.section import refuse_unknown
from pearl.errors import ConfigError

Count = Annotated[int, Field(ge=1)]

# Beginnings of user requests, which the target continues.
OPENINGS = yaml.decode(
    (files("pearl.lab.distill") / "openings.yaml").read_bytes(), type=tuple[str, ...]
)


class DistillConfig(Section):
    """One run: the pair, the text that the draft learns from, and how it learns."""

    target: str = Field(
        "embedded", description="Model to imitate: directory, .gguf file, hub id or embedded."
    )
    out: str = Field(
        description="Directory of the run: answers, checkpoints, log, and the draft itself."
    )
    init_from: str | None = Field(
        None, description="Draft to train further; default: made of the target's own layers."
    )
    layers: tuple[int, ...] = Field(
        (0, 1), description="The target's layers that a new draft starts from, from 0."
    )
    head: Literal["none", "dflash", "dflash2", "dspark", "eagle3", "peagle", "xpress"] = Field(
        "none", description="Kind of head of the target to make instead of a draft model."
    )
    head_tokens: int = Field(
        8192, ge=0, description="Tokens that a head knows, the likeliest ones; 0: all."
    )
    head_layers: Count = Field(1, description="Layers of a head.")
    block_size: int = Field(
        6, ge=2, le=64, description="Positions of a head's block; of eagle3, trained steps."
    )
    markov_rank: Count = Field(
        64,
        description="Rank of what makes a block a chain: dspark's bias, dflash2's selector, xpress's refiner.",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of all random numbers.")
    device: str = Field("auto", description="auto, cpu or cuda:N.")
    dtype: Annotated[Literal["bfloat16", "float32"], ShortDType] = Field(
        "bfloat16", description="Of forwards; trained weights are float32."
    )
    trust_remote_code: bool = Field(False, description="Run code that comes with a checkpoint.")

    prompts: tuple[str, ...] = Field(
        (), description="Files of prompts, .jsonl or a line each (may be given again)."
    )
    openings: tuple[str, ...] = Field(
        OPENINGS, description="Starts of user turns, which the target continues."
    )
    held_out: Count = Field(
        64, description="Invented prompts kept for measuring, never trained on."
    )
    rounds: Count = Field(8, description="Rounds of answering, then learning.")
    answers_per_round: Count = Field(512, description="Answers that each round adds.")
    answer_batch: Count = Field(128, description="Answers generated at once.")
    max_prompt_tokens: Count = Field(96, description="Longest user turn.")
    max_answer_tokens: Count = Field(
        256, description="Longest answer; it ends at EOS, or when it repeats itself."
    )
    temperatures: tuple[float, ...] = Field(
        (0.0, 0.6, 1.0), description="Answers take these in turn; 0 is greedy."
    )
    top: int = Field(
        32,
        ge=1,
        le=1024,
        description="Likeliest tokens recorded for each position; samples are of these.",
    )

    on_policy: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of answers that the draft writes, and the target judges (DistillSpec).",
    )
    divergence: Literal["fkl", "rkl", "jsd", "tvd"] = Field(
        "fkl",
        description="Of target and draft: forward or reverse KL, Jensen-Shannon, total variation.",
    )
    passes: Count = Field(
        4, description="Tokens learnt from in a round, as a multiple of the tokens it added."
    )
    batch_tokens: Count = Field(2048, description="Tokens of a training batch, padding included.")
    negatives: int = Field(
        0,
        ge=0,
        description="Other tokens that the loss looks at, drawn anew for each batch; 0: the whole vocabulary.",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="muon: for the layers' matrices, AdamW for all else; learns more of as many tokens.",
    )
    learning_rate: float = Field(1e-3, gt=0, description="Highest learning rate.")
    checkpoint_steps: Count = Field(
        200, description="Steps between two checkpoints; the end of a round has its own."
    )

    @field_validator("prompts", "openings", "layers", "temperatures", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        return (value,) if isinstance(value, (str, int, float)) else value

    @field_validator("layers", "temperatures")
    @classmethod
    def _sensible(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or min(value) < 0:
            raise ValueError("at least one, none of them negative")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> DistillConfig:
        if self.init_from is not None and "layers" in self.model_fields_set:
            raise ConfigError("init_from brings its own layers: leave them out")
        if self.head != "none" and (
            self.init_from is not None or "layers" in self.model_fields_set
        ):
            raise ConfigError("a head begins anew: leave init_from and layers out")
        if self.head != "none" and (self.on_policy or self.divergence != "fkl"):
            raise ConfigError(
                "a head learns by forward KL from the target's own texts: leave on_policy and divergence out"
            )
        return self


def load_config(path: Path | None, overrides: Mapping[str, Any]) -> DistillConfig:
    """Return the settings of the configuration file `path`, if it is given, and of `overrides`.

    `overrides` (flags) take precedence. Raises `ConfigError` for unknown or wrong settings, and
    without `out`.
    """
    written = read_file(path) if path else {}
    try:
        refuse_unknown(written, DistillConfig.model_fields)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    values = {**written, **overrides}
    if not values.get("out"):
        raise ConfigError("where is the run to live? Give --out DIRECTORY")
    return DistillConfig(**values)
