"""Every setting there is, validated by pydantic: how an engine is built, how a request is decoded and sampled.

A configuration file is one flat YAML mapping of these fields; every field is also a flag of the command line.  Unknown
keys and bad values are refused by name.  Knows no models, sockets or processes.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from pearl.decoding.registry import RULES, Parameters, find, named_parameters
from pearl.device import Device
from pearl.document import parse_json, parse_yaml
from pearl.drafting.registry import CAP, FIXED, STOPS, check_stop
from pearl.errors import ConfigError

# Models compute in float32, which makes 0 of what is far smaller and infinity of what is far larger.
LEAST_TEMPERATURE = 1e-4
MOST_TEMPERATURE = 1e30
LEAST_SHARE = 1e-30  # of probability: top_p, and min_p where it is not 0
LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY = 0.01, 100.0
MOST_PENALTY = 2.0  # OpenAI's range
MOST_BIAS, MAX_BIASES = 100.0, 1024  # likewise; enough to make a token certain or impossible
MAX_GRAMMAR = 1 << 16  # bytes of UTF-8: a schema, or what is made of it

# What `pearl.protocol.window.METHODS` says of them, for who must not import the protocol; a test compares the two.
DRAFTLESS = ("ar", "ngram")  # methods that need no draft
BRANCHING = ("auto", "pearl", "ssd")  # methods whose draft may prepare for other outcomes
LOOKING_AHEAD = ("auto", "ngram", "pearl")  # methods whose target verifies guesses too
# Methods whose draft may stop where a policy says so. Not ssd and pearl-no-post-verify: what the one prepares no policy
# sees, and the windows of the other would depend on when a verdict comes, and with them its text under ratio.
STOPPING = ("auto", "sd", "pearl", "pearl-no-pre-verify")
LOOK_AHEAD, DRAFT_LOOKUP = 16, 8  # guesses in one forward, of the target and of the draft
MAX_LOGPROBS = 20  # tokens told of at each place, as OpenAI's; JSON has no infinity, so theirs is the least, too
LEAST_LOGPROB = -9999.0
MAX_SLOTS = 32  # requests that are worked on side by side: half of what one front may have waiting
BRANCHES = 8  # outcomes that a draft prepares for at a time: so many sequences its cache has room for beside the text
AS_PUBLISHED: dict[str, int] = {"look_ahead": 0, "draft_lookup": 0, "branches": 0}  # the settings of the paper's PEARL

Seconds = Annotated[float, Field(gt=0)]
NUMBER_WORDS: dict[str, int | None] = {"auto": None, "off": 0}
WordedNumber = BeforeValidator(lambda given: NUMBER_WORDS.get(given, given) if isinstance(given, str) else given)
Guesses = Annotated[Annotated[int, Field(ge=0, le=256)] | None, WordedNumber]
Outcomes = Annotated[Annotated[int, Field(ge=0, le=BRANCHES)] | None, WordedNumber]
_ONE_HOST = ("ipc", "tcp")
_ADDRESS = re.compile(
    r"tcp://[^:\s/]+:(\*|\d{1,5})|tcp://\[[^]\s]+\]:(\*|\d{1,5})"
)  # what may be bound is for the transport
ModelRole = Literal["target", "draft"]
DType = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"]


class Section(BaseModel):
    """Raises `ConfigError`, naming each bad field and what it may be, however it is made."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _told_by_name(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(values, dict):
            _refuse_unknown(values, cls.model_fields)
        try:
            return handler(values)
        except ValidationError as error:
            problems = (f"{'.'.join(str(part) for part in e['loc'])}: {_told(e)}" for e in error.errors())
            raise ConfigError("; ".join(problems)) from None


class EngineConfig(Section):
    """What is fixed for an engine's life: the pair, where it runs and how its processes talk."""

    target: str = Field(
        "embedded",
        description="Target model: embedded, directory, hub id, .gguf file, toy:vocab=32,alpha=0.8, or replay:FILE, "
        "recorded texts (see pearl simulate record --help).",
    )
    draft: str = Field("embedded-draft", description="Draft model, named likewise; 'none' for methods ar and ngram.")
    target_device: str = Field("auto", description="cuda:0, cuda:0-1 (spread over GPUs), cpu:0 or cpu:0-3 (pinned).")
    draft_device: str = Field("auto", description="Likewise; a draft is shared by several GPUs (draft_tp), not spread.")
    target_dtype: DType = Field(
        "auto",
        description="Weights of the target; auto: the checkpoint's or, on a CPU that has no instructions for it, "
        "float32 (4 bits where they are so in the file). int8 and int4, on CPUs, round them to another model.",
    )
    draft_dtype: DType = Field(
        "auto",
        description="Of the draft. int8 and int4, on CPUs: it guesses a little worse. auto may be int8 on a CPU that "
        "has no instructions for bfloat16.",
    )
    target_tp: int = Field(
        1, ge=1, description="Tensor parallelism: ranks that share the target, each on its part of target_device."
    )
    draft_tp: int = Field(
        1, ge=1, validate_default=True, description="Likewise, ranks that share the draft and draft_device."
    )
    target_device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] = Field(
        "auto", description="How a target on several GPUs is spread over them."
    )
    forwards: Literal["auto", "eager", "transformers"] = Field(
        "auto",
        description="auto: our own forward pass where it knows the model; eager: on a GPU neither recorded nor "
        "chained; transformers: always theirs.",
    )
    exact: bool = Field(
        False,
        description="Refuse a model whose logits depend on how many tokens are fed together: all but our own forward.",
    )
    max_context: int | None = Field(None, ge=2, description="Tokens of KV cache; default: the model's, at most 8192.")
    slots: int = Field(
        1,
        ge=1,
        le=MAX_SLOTS,
        description="Requests that are worked on side by side, each in a KV cache of its own; others wait.",
    )
    datastore: str | None = Field(
        None,
        description="Directory of texts from which ngram and pearl guess too, beside the text so far; see "
        "pearl datastore --help.",
    )
    disco: str | None = Field(
        None,
        description="File with the classifier of --draft-stop disco for this pair, as pearl disco train has made it.",
    )
    target_pace: Seconds | None = Field(None, description="Emulation: seconds that each target forward lasts.")
    draft_pace: Seconds | None = Field(None, description="Emulation: seconds that each draft forward lasts.")
    control: str = Field(
        "ipc",
        description="Control channel: ipc (private socket files), tcp (127.0.0.1), or for two hosts tcp://HOST:PORT, "
        "an address of the target's host; PORT * is a free one.",
    )
    keys: str | None = Field(
        None,
        validate_default=True,
        description="File of the keys that secure the control channel; pearl keys FILE makes one.",
    )
    tensors: Literal["auto", "frames", "gloo", "nccl"] = Field(
        "auto", description="How dense draft distributions travel; auto: ZeroMQ frames, between GPUs too."
    )
    draft_timeout: Seconds = Field(10.0, description="Seconds of silence after which the draft counts as lost.")
    target_timeout: Seconds = Field(120.0, description="Seconds of silence after which the target counts as lost.")
    startup_timeout: Seconds = Field(900.0, description="Seconds within which both models must be loaded.")
    profile: str = Field(
        "auto",
        description="What is known of the pair's speeds at start: auto (of this pair on this machine, as pearl "
        "calibrate has kept it, if it has), none, or such a file.",
    )
    draft_restarts: int = Field(
        3, ge=0, description="How often in a row, for one cause, a lost draft is started again."
    )
    trust_remote_code: bool = Field(False, description="Run code that comes with a checkpoint.")
    trace: str | None = Field(None, description="File to write a timeline of both workers to; see pearl trace --help.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("warning", description="How much to log on stderr.")

    @field_validator("target_device", "draft_device")
    @classmethod
    def _device(cls, value: str) -> str:
        Device.parse(value)
        return value

    @field_validator("target_tp", "draft_tp")
    @classmethod
    def _equal_parts(cls, value: int, known: ValidationInfo) -> int:
        of = str(known.field_name).replace("_tp", "_device")
        name = known.data.get(of, "auto")  # where it was bad, that is what is told
        device = Device.parse(name)
        if value == 1 < len(device.gpus) and of == "draft_device":
            raise ValueError(f"{of} {name}: a draft is not spread; name one GPU, or share it with draft_tp")
        if value > 1 and (len(device.gpus) not in (0, value) or len(device.cores or ()) % value):
            raise ValueError(
                f"{of} {name} cannot be shared: name as many GPUs as there are ranks, or as many cores each"
            )
        return value

    @field_validator("control")
    @classmethod
    def _channel(cls, value: str) -> str:
        if value not in _ONE_HOST and not _ADDRESS.fullmatch(value):
            raise ValueError("use ipc, tcp or tcp://HOST:PORT, an address of the target's host")
        return value

    @field_validator("keys")
    @classmethod
    def _secured(cls, value: str | None, known: ValidationInfo) -> str | None:
        if value is None and not _on_one_host(known):
            raise ValueError(
                "other hosts can reach this control address, so it takes keys: make them with `pearl keys FILE`, "
                "copy FILE to the other host, and give --keys FILE on both"
            )
        return value and os.path.abspath(value)  # whoever attaches may do so from another directory

    @field_validator("tensors")
    @classmethod
    def _not_in_the_clear(cls, value: str, known: ValidationInfo) -> str:
        if value in ("gloo", "nccl") and not _on_one_host(known):
            raise ValueError(
                "it is not encrypted, and its two ends meet in a file of one host; between hosts take frames or auto"
            )
        return value

    @field_validator("profile")
    @classmethod
    def _named(cls, value: str) -> str:
        return value if value in ("auto", "none") else os.path.abspath(os.path.expanduser(value))

    @field_validator("datastore", "disco")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return value and os.path.abspath(os.path.expanduser(value))  # a worker may run in another directory

    @field_validator("trace")
    @classmethod
    def _writable(cls, value: str | None) -> str | None:
        if value is None:
            return None
        path = Path(value).absolute()
        if not value or path.is_dir() or not os.access(path.parent, os.W_OK):
            raise ValueError("not a file that can be written: name one in a directory that exists")
        return str(path)

    @property
    def has_draft(self) -> bool:
        return self.draft != "none"

    @property
    def roles(self) -> tuple[ModelRole, ...]:
        """Of the models that there are."""
        return ("target", "draft") if self.has_draft else ("target",)

    def check_method(self, method: str) -> None:
        """Raises `ConfigError` where the method needs a draft and there is none."""
        if method not in (*DRAFTLESS, "auto") and not self.has_draft:
            use = " or ".join(DRAFTLESS)
            raise ConfigError(f"method {method} needs a draft model and this engine has none; use method {use}")

    def check_decoding(self, decoding: DecodingConfig) -> None:
        """Raises `ConfigError` where the method or the stop policy needs what this engine has not."""
        self.check_method(decoding.method)
        if STOPS[decoding.draft_stop].is_trained and self.disco is None:
            raise ConfigError(
                f"draft_stop {decoding.draft_stop} needs a classifier of this pair: make one with pearl disco train, "
                "and name its file with --disco"
            )

    def model(self, role: ModelRole) -> ModelConfig:
        """The settings of one model, and those that both have."""
        values = self.model_dump()
        names = [field.name for field in fields(ModelConfig) if field.name not in ("role", "spec")]
        own: dict[str, Any] = {name: values.get(f"{role}_{name}", values.get(name)) for name in names}
        return ModelConfig(role, values[role], **own)

    @property
    def one_host(self) -> bool:
        """Whether both workers are on one host, and share the engine's directory."""
        return self.control in _ONE_HOST


@dataclass(frozen=True)
class ModelConfig:
    """One model of the pair. All but `role` and `spec` are fields of `EngineConfig`, less the role before their names.

    Attributes:
        spec: which model, as `EngineConfig.target` names it.
        device: of all its ranks; `part` is one's.
        device_map: how it is spread over several GPUs; None: it is a draft, which is not.
    """

    role: ModelRole
    spec: str
    device: str
    dtype: DType
    tp: int
    pace: float | None
    device_map: str | None
    forwards: str
    exact: bool
    max_context: int | None
    slots: int
    trust_remote_code: bool

    def part(self, rank: int = 0) -> Device:
        """Where the worker of that rank runs."""
        return Device.parse(self.device).part(rank, self.tp)


def _on_one_host(known: ValidationInfo) -> bool:
    return known.data.get("control", "ipc") in _ONE_HOST  # where it was bad, that is what is told


_Decoding = TypeVar("_Decoding", bound="DecodingConfig")


def with_registered_rules(section: type[_Decoding]) -> type[_Decoding]:
    """The section with what rules and stop policies declare: the values that `rule` and `draft_stop` may have, and an
    optional field a parameter.
    """
    summaries = "; ".join(f"{spec.label}: {spec.description}" for spec in RULES.values())
    choice = Field(next(iter(RULES)), description=f"Acceptance rule under sampling. {summaries}.")
    policies = "; ".join(f"{spec.name}: {spec.description}" for spec in STOPS.values())
    stop = Field(
        FIXED,
        description=f"Where the draft ends a window before its bound. {policies}. For methods {', '.join(STOPPING)}; "
        f"under sd --gamma is then the bound, {CAP} by default. It changes no text but that of sd under a rule whose "
        "text depends on drafts, and never its distribution.",
    )
    fields: dict[str, Any] = {"rule": (Literal[tuple(RULES)], choice), "draft_stop": (Literal[tuple(STOPS)], stop)}
    of_rules, of_stops = named_parameters(RULES.values()), named_parameters(STOPS.values())
    assert not set(of_rules) & set(of_stops), "a flag is either a rule's or a stop policy's"
    for name, declared in (of_rules | of_stops).items():
        whose = "rule" if name in of_rules else "draft_stop"
        described = " ".join(f"Of {whose} {owner}: {one}: {one.description}." for owner, one in declared.items())
        low, high = min(one.low for one in declared.values()), max(one.high for one in declared.values())
        kind = next(iter(declared.values())).kind
        fields[name] = (kind | None, Field(None, ge=low, le=high, description=described))
    return create_model(section.__name__, __base__=section, __doc__=section.__doc__, __module__=__name__, **fields)


@with_registered_rules
class DecodingConfig(Section):
    """How a request is decoded: the method, its window, the acceptance rule and that rule's parameters."""

    method: Literal["auto", "ar", "ngram", "sd", "ssd", "pearl", "pearl-no-pre-verify", "pearl-no-post-verify"] = Field(
        "auto",
        description="auto: pearl or ngram, what is faster, found out while a text is written; ar: target alone; "
        "ngram: target alone, verifying guesses from the text so far; sd: draft and "
        "target in turn; ssd: the same, but the draft prepares for what the target may decide meanwhile; pearl and its "
        "two ablations.",
    )
    window: Literal["stream", "fixed"] = Field("stream", description="stream: no full windows; fixed: the paper's.")
    gamma: int | None = Field(None, ge=1, le=1024, description="Window in tokens; default: the measured speed ratio c.")
    rule: str = next(iter(RULES))
    draft_stop: str = FIXED
    look_ahead: Guesses = Field(
        None,
        description="Most guesses, n-grams of the text so far, that the target verifies in a forward beside what is "
        "drafted: of these so many as make most tokens a second; 0 or off: none, as published. Default, auto: "
        f"{LOOK_AHEAD} for ngram and pearl, which alone take them.",
    )
    draft_lookup: Guesses = Field(
        None,
        description="Most such guesses that the draft verifies in a forward, to draft several tokens by one, of which "
        f"it likewise takes what pays; 0 or off: none, as published. Default, auto: {DRAFT_LOOKUP} for pearl, else 0.",
    )
    branches: Outcomes = Field(
        None,
        description="Most outcomes other than the expected one that the draft prepares for, in rows of its forwards "
        "that cost little; 0 or off: none, as published. Default, auto: "
        f"{BRANCHES} for pearl and ssd, else 0.",
    )

    @property
    def rule_in_use(self) -> str:
        """`rule`; where nobody has chosen one, method auto takes the one under which no choice changes a text."""
        return "coupled" if self.method == "auto" and "rule" not in self.model_fields_set else self.rule

    @property
    def guesses(self) -> tuple[int, int, int]:
        """`look_ahead`, `draft_lookup` and `branches`, with their defaults."""
        ahead = LOOK_AHEAD if self.method in LOOKING_AHEAD else 0
        lookup = DRAFT_LOOKUP if self.method in ("auto", "pearl") else 0
        branches = BRANCHES if self.method in BRANCHING else 0
        defaults = {"look_ahead": ahead, "draft_lookup": lookup, "branches": branches}
        chosen = (default if getattr(self, name) is None else getattr(self, name) for name, default in defaults.items())
        look_ahead, draft_lookup, most = chosen
        return look_ahead, draft_lookup, most

    @property
    def parameters(self) -> Parameters:
        """Those of the rule that are set, as they travel: (name, value)."""
        return self._set(named_parameters(RULES.values()))

    @property
    def stop_parameters(self) -> Parameters:
        """Likewise of the stop policy."""
        return self._set(named_parameters(STOPS.values()))

    def _set(self, names: Iterable[str]) -> Parameters:
        given = ((name, getattr(self, name, None)) for name in names)
        return tuple((name, value) for name, value in given if value is not None)

    @property
    def gamma_in_use(self) -> int | None:
        """`gamma`; where a policy ends the windows of a target that waits for them, a bound that seldom does."""
        waits = self.method == "sd" and self.draft_stop != FIXED
        return CAP if waits and self.gamma is None else self.gamma

    @model_validator(mode="after")
    def _parameters_of_the_rule(self) -> Self:
        try:
            find(self.rule).values(self.parameters)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return self

    @model_validator(mode="after")
    def _stops_of_the_method(self) -> Self:
        try:
            check_stop(self.draft_stop).values(self.stop_parameters)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if self.draft_stop != FIXED and self.method not in STOPPING:
            raise ConfigError(
                f"draft_stop {self.draft_stop} is for methods {', '.join(STOPPING)}, not {self.method}, which takes "
                f"{FIXED}"
            )
        return self

    @model_validator(mode="after")
    def _guesses_of_the_method(self) -> Self:
        if self.look_ahead and self.method not in LOOKING_AHEAD:
            raise ConfigError(f"look_ahead is for method {' and '.join(LOOKING_AHEAD)}, not {self.method}")
        if self.look_ahead == 0 and self.method == "ngram":
            raise ConfigError("method ngram with look_ahead 0 is method ar")
        if self.draft_lookup and self.method in DRAFTLESS:
            raise ConfigError(f"draft_lookup is for methods with a draft, not {self.method}")
        if self.branches and self.method not in BRANCHING:
            raise ConfigError(f"branches are for methods {', '.join(BRANCHING)}, not {self.method}")
        if self.branches == 0 and self.method == "ssd":
            raise ConfigError("method ssd with branches 0 is method sd")
        return self


class SamplingParams(Section):
    """How tokens are drawn and where the text ends. None: the checkpoint's own default, as transformers reads it."""

    temperature: float | None = Field(None, ge=0, description="0 is greedy; default: the checkpoint's.")
    top_k: int | None = Field(None, ge=0, lt=2**31, description="Keep the k likeliest tokens; 0: all.")
    top_p: float | None = Field(None, gt=0, le=1, description="Keep the likeliest tokens that hold this probability.")
    min_p: float | None = Field(None, ge=0, le=1, description="Drop tokens below this share of the likeliest.")
    seed: int | None = Field(None, ge=0, lt=2**64, description="Default: drawn, and reported.")
    sample: int = Field(0, ge=0, lt=2**63, description="Index of this sample under one seed.")
    max_tokens: int | None = Field(None, ge=1, description="Most tokens to generate; default: up to the context.")
    stop: tuple[str, ...] = Field((), description="End before any of these strings (may be given several times).")
    ignore_eos: bool = Field(False, description="Do not end at an end-of-sequence token.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Tell of each token its log probability under the target, and of so many of the likeliest tokens "
        "at its place: at temperature 1, unfiltered, without penalties and biases.",
    )

    repetition_penalty: float | None = Field(
        None,
        ge=LEAST_REPETITION_PENALTY,
        le=MOST_REPETITION_PENALTY,
        description="Above 1: make tokens that prompt or text have less likely; default: the checkpoint's.",
    )
    presence_penalty: float = Field(
        0.0,
        ge=-MOST_PENALTY,
        le=MOST_PENALTY,
        description="Is taken from the logit of each token that was generated.",
    )
    frequency_penalty: float = Field(
        0.0, ge=-MOST_PENALTY, le=MOST_PENALTY, description="Likewise, times how often it was."
    )
    logit_bias: tuple[tuple[int, float], ...] = Field(
        (),
        max_length=MAX_BIASES,
        description=f"Add a number, {MOST_BIAS:g} at most, to the logit of a token id (may be given several times).",
    )
    json_schema: str | None = Field(
        None, description='Write JSON that this JSON schema allows; {"type": "object"} is any object.'
    )
    regex: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_GRAMMAR // 16,
        description="Write what this regular expression matches, and end.",
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
        stops = (value,) if isinstance(value, str) else value
        if isinstance(stops, (list, tuple)) and any(s == "" for s in stops):
            raise ValueError("a stop string must not be empty")
        return stops

    @field_validator("json_schema", mode="before")
    @classmethod
    def _as_json(cls, value: object) -> object:
        if value is None:
            return None
        schema = parse_json(value) if isinstance(value, str) else value
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
            raise ConfigError("json_schema and regex are two grammars: a text keeps to one")
        if given and self.ignore_eos:
            raise ConfigError(f"{given[0]} ends a text where it is whole, which ignore_eos forbids")
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
        """Itself, with a seed drawn where none was given."""
        return self if self.seed is not None else self.model_copy(update={"seed": secrets.randbits(63)})


def sampling_problem(temperature: float = 0.0, top_p: float = 1.0, min_p: float = 0.0) -> str | None:
    """Why nothing can be sampled so, though each is in its range as a number: every probability would be NaN, say."""
    if 0 < temperature < LEAST_TEMPERATURE:
        return f"0 is greedy; the least temperature above it is {LEAST_TEMPERATURE}"
    if temperature > MOST_TEMPERATURE:
        return f"the greatest temperature is {MOST_TEMPERATURE:g}"
    if top_p < LEAST_SHARE:
        return f"the least top_p is {LEAST_SHARE:g}; top_k=1 keeps the likeliest token alone"
    if 0 < min_p < LEAST_SHARE:
        return f"0 is off; the least min_p above it is {LEAST_SHARE:g}"
    return None


# Known elsewhere, not here: refused by name, so that nobody believes they took effect.
UNSUPPORTED = {
    "n": "one text a request: submit it several times with sample=0, 1, 2, ...",
    "best_of": "one text a request",
    "prompt_logprobs": "log probabilities are told of generated tokens alone",
    "num_beams": "no beam search",
    "typical_p": "filters are top_k, top_p and min_p",
}

SECTIONS: tuple[type[Section], ...] = (EngineConfig, DecodingConfig, SamplingParams)


def _told(error: Any) -> str:
    given = repr(error["input"])
    return f"{error['msg'].removeprefix('Value error, ')} (got {given[:200]}{'...' if given[200:] else ''})"


def _refuse_unknown(values: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    for key in values:
        if key in UNSUPPORTED:
            raise ConfigError(f"{key} is not supported: {UNSUPPORTED[key]}")
        if key not in allowed:
            near = get_close_matches(key, allowed, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"unknown setting {key!r}; {meant}allowed are {', '.join(sorted(allowed))}")


@dataclass(frozen=True)
class Settings:
    """A whole run: the three sections."""

    engine: EngineConfig
    decoding: DecodingConfig
    sampling: SamplingParams


def load_settings(path: Path | None, overrides: Mapping[str, Any]) -> Settings:
    """A configuration file, if any, with `overrides` (flags given by the user) on top."""
    values = read_file(path) if path else {}
    try:
        return _settings({**values, **overrides})
    except ConfigError as error:
        if path is None or _sound(values):
            raise
        raise ConfigError(f"{path}: {error}") from None


def _sound(values: Mapping[str, Any]) -> bool:
    try:
        _settings(values)
    except ConfigError:
        return False
    return True


def _settings(values: Mapping[str, Any]) -> Settings:
    _refuse_unknown(values, {name: field for section in SECTIONS for name, field in section.model_fields.items()})
    engine, decoding, sampling = (s(**{k: v for k, v in values.items() if k in s.model_fields}) for s in SECTIONS)
    assert isinstance(engine, EngineConfig)
    assert isinstance(decoding, DecodingConfig)
    assert isinstance(sampling, SamplingParams)
    return Settings(engine, decoding, sampling)


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `ConfigError` where there is none."""
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not YAML that PEARL reads: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, not a {type(values).__name__}")
    return {str(key): value for key, value in values.items()}
