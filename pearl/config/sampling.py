"""How a request is sampled: the distribution, the grammar, and where the text ends."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from pearl.config.section import Section
from pearl.document import parse_json
from pearl.errors import ConfigError
from pearl.printable import is_unicode

# Models compute in float32, in which much smaller values become 0 and much larger ones infinity.
LEAST_TEMPERATURE = 1e-4
MOST_TEMPERATURE = 1e30
LEAST_SHARE = 1e-30  # of probability: top_p, and min_p where it is not 0
LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY = 0.01, 100.0
MOST_PENALTY = 2.0  # OpenAI's range
MOST_BIAS, MAX_BIASES = 100.0, 1024  # OpenAI's range, which makes a token certain or impossible; biases
MOST_STOPS, LONGEST_STOP = 64, 1000  # strings, characters: each token is compared with all of them
MOST_EOS = 2048  # tokens that each end a text: each token is compared with all of them
MAX_GRAMMAR = 1 << 16  # bytes of UTF-8: a schema, or the grammar made of it
MAX_LOGPROBS = 20  # alternatives at each position, as OpenAI's
LEAST_LOGPROB = -9999.0  # as OpenAI's: JSON has no infinity

if TYPE_CHECKING:  # what a caller may pass; the validators below convert it
    Stops = Sequence[str]
    Biases = Mapping[int, float] | Sequence[tuple[int, float]]
    Schema = str | Mapping[str, Any]
else:
    Stops, Biases, Schema = tuple[str, ...], tuple[tuple[int, float], ...], str


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Penalty = Annotated[float, Field(ge=-MOST_PENALTY, le=MOST_PENALTY)]


class SamplingParams(Section):
    """How tokens are drawn and where the text ends. None: the checkpoint's own default, as transformers reads it."""

    temperature: float | None = Field(default=None, ge=0, description="0 is greedy; default: the checkpoint's.")
    top_k: int | None = Field(default=None, ge=0, lt=2**31, description="Keep the k likeliest tokens; 0: all.")
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="Keep the likeliest tokens that hold this probability."
    )
    min_p: float | None = Field(default=None, ge=0, le=1, description="Drop tokens below this share of the likeliest.")
    seed: int | None = Field(
        default=None, ge=0, lt=2**64, description="Of all random draws; default: drawn, and reported."
    )
    sample: int = Field(default=0, ge=0, lt=2**63, description="Index of this sample under one seed.")
    max_tokens: int | None = Field(
        default=None, ge=1, description="Most tokens to generate; default: the checkpoint's, else up to the context."
    )
    stop: Stops = Field(default=(), description="End before any of these strings (may be given several times).")
    stop_token_ids: tuple[TokenId, ...] = Field(
        default=(),
        max_length=MOST_STOPS,
        description="End at any of these token ids, too (may be given several times).",
    )
    ignore_eos: bool = Field(default=False, description="Do not end at an end-of-sequence token.")
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Report each token's log probability under the target, and those of this many of the likeliest "
        "tokens at its place: at temperature 1, unfiltered, without penalties and biases.",
    )

    repetition_penalty: float | None = Field(
        default=None,
        ge=LEAST_REPETITION_PENALTY,
        le=MOST_REPETITION_PENALTY,
        description="Above 1: make tokens of prompt and text less likely; default: the checkpoint's.",
    )
    presence_penalty: Penalty = Field(
        default=0.0, description="Is subtracted from the logit of each token that was generated."
    )
    frequency_penalty: Penalty = Field(
        default=0.0, description="Likewise, times the number of times that it was generated."
    )
    logit_bias: Biases = Field(
        default=(),
        max_length=MAX_BIASES,
        description=f"Add a number, {MOST_BIAS:g} at most, to the logit of a token id (may be given several times).",
    )
    json_schema: Schema | None = Field(
        default=None,
        description='Write JSON that this JSON schema allows; {"type": "object"} is any object.',
        json_schema_extra={"metavar": "JSON"},
    )
    regex: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_GRAMMAR // 16,
        description="Write text that this regular expression matches, and end.",
        json_schema_extra={"metavar": "EXPRESSION"},
    )

    @field_validator("temperature", "top_p", "min_p")
    @classmethod
    def _within_float32(cls, value: float | None, known: ValidationInfo) -> float | None:
        assert known.field_name is not None
        if value is not None and (problem := sampling_problem(**{known.field_name: value})):
            raise ValueError(problem)
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _can_be_found(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if problem := "a stop string must not be empty" if "" in value else stop_problem(value):
            raise ValueError(problem)
        return value

    @field_validator("json_schema", mode="before")
    @classmethod
    def _as_json(cls, value: object) -> object:
        if value is None:
            return None
        try:
            schema = parse_json(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from None
        if not isinstance(schema, Mapping):
            raise ValueError("must be a JSON object")
        try:
            text = json.dumps(schema)
        except (RecursionError, TypeError) as error:
            raise ValueError(f"cannot be written as JSON: {error}") from None
        if len(text) > MAX_GRAMMAR // 2:
            raise ValueError(f"has {len(text):,} characters, at most {MAX_GRAMMAR // 2:,} are read")
        return text

    @model_validator(mode="after")
    def _one_grammar(self) -> SamplingParams:
        given = [name for name in ("json_schema", "regex") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError("json_schema and regex are two grammars: a text follows one")
        if given and self.ignore_eos:
            raise ConfigError(f"{given[0]} ends a text where it is complete, which ignore_eos forbids")
        return self

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _pairs(cls, value: object) -> object:
        return tuple(value.items()) if isinstance(value, Mapping) else value

    @field_validator("logit_bias")
    @classmethod
    def _bounded(cls, value: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        for token, bias in value:
            if not 0 <= token < 2**31 or not abs(bias) <= MOST_BIAS:
                raise ValueError(
                    f"takes token ids, and numbers from {-MOST_BIAS:g} to {MOST_BIAS:g}: {token}, {bias:g}"
                )
        if len(dict(value)) < len(value):
            raise ValueError("has a token id twice")
        return value

    def with_seed(self) -> SamplingParams:
        """A copy with a seed, by default a random one that a JavaScript number can hold."""
        return self if self.seed is not None else self.model_copy(update={"seed": secrets.randbits(53)})


def stop_problem(stops: Sequence[str]) -> str | None:
    """Why these stop strings are refused; None: they are not."""
    if len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
        return f"at most {MOST_STOPS} strings of at most {LONGEST_STOP} characters each end a text"
    if not all(map(is_unicode, stops)):
        return "a stop string holds half a surrogate pair, which is no character"
    return None


def sampling_problem(temperature: float = 0.0, top_p: float = 1.0, min_p: float = 0.0) -> str | None:
    """Why nothing can be sampled with these, though each is in its range: every probability would be NaN, say."""
    if 0 < temperature < LEAST_TEMPERATURE:
        return f"0 is greedy; the least temperature above it is {LEAST_TEMPERATURE}"
    if temperature > MOST_TEMPERATURE:
        return f"the greatest temperature is {MOST_TEMPERATURE:g}"
    if top_p < LEAST_SHARE:
        return f"the least top_p is {LEAST_SHARE:g}; top_k=1 keeps the likeliest token alone"
    if 0 < min_p < LEAST_SHARE:
        return f"0 is off; the least min_p above it is {LEAST_SHARE:g}"
    return None
