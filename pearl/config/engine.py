"""The settings of an engine, which do not change while the engine runs."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from pearl.config.option_values import wide_window
from pearl.config.options import RequestOptions
from pearl.config.section import Section, check_utf8
from pearl.device import Device
from pearl.errors import ConfigError
from pearl.spec.control import ON_ONE_HOST, is_control
from pearl.spec.methods import DRAFTLESS, MAX_WINDOW, METHODS
from pearl.spec.stops import STOPS

_EMBEDDED = "embedded"
_EMBEDDED_DRAFT = "embedded-draft"
MAX_SLOTS = 64  # most requests decoded at once; half of `MAX_REQUESTS` in `pearl.worker.fronts`

Seconds = Annotated[float, Field(gt=0)]
ModelRole = Literal["target", "draft"]
# Other names of data types, as other tools write them -> our names.
SHORT_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "half": "float16",
    "float": "float32",
    "f16": "float16",
    "f32": "float32",
}


def _whole_dtype(name: object) -> object:
    if isinstance(name, str):
        return SHORT_DTYPES.get(name, name)
    return name


ShortDType = BeforeValidator(_whole_dtype)
DType = Annotated[Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"], ShortDType]
Rows = Literal["auto", "int8"]


def is_toy(spec: str) -> bool:
    """Return whether `spec` names a model without weights: "toy" or "toy:KEY=VALUE,..."."""
    return spec.partition(":")[0] == "toy"


class EngineConfig(Section):
    """The settings of an engine: the pair of models, their devices, and how the processes communicate."""

    # `default` is passed by name, for type checkers without pydantic's plugin.
    target: str = Field(
        default=_EMBEDDED,
        description="Target model: embedded, directory, hub id, .gguf file, or toy:vocab=32,alpha=0.8.",
    )
    draft: str = Field(
        default=_EMBEDDED_DRAFT,
        validate_default=True,
        description="Draft model, named likewise, or a head of the target (EAGLE-3); 'none' for methods ar and ngram. "
        "That of a toy target is by default the target itself.",
    )
    target_device: str = Field(
        default="auto",
        description="cuda:0, cuda:0-1 (spread over GPUs), cpu:0 or cpu:0-3 (pinned).",
    )
    draft_device: str = Field(
        default="auto", description="Likewise, but of GPUs one: a draft is not spread."
    )
    target_dtype: DType = Field(
        default="auto",
        description="Weights of the target; auto: the checkpoint's, in its own bits if it is quantised; on a CPU "
        "float32 if that has no instructions for bfloat16. int8 and int4 round them to another model.",
    )
    draft_dtype: DType = Field(
        default="auto",
        description="Of the draft. int8 and int4: slightly lower acceptance. auto is int4 on a CPU for a draft "
        "of 100M weights or more.",
    )
    rows: Rows = Field(
        default="auto",
        description="How a CPU multiplies quantised weights; auto: by inputs of 16 bits; int8: by inputs rounded to "
        "8 bits, 16 of them with one scale, so that tokens fed together cost less. That is slightly another model.",
    )
    forwards: Literal["auto", "transformers"] = Field(
        default="auto",
        description="auto: our own forward pass if it supports the model; transformers: always "
        "theirs.",
    )
    exact: bool = Field(
        default=False,
        description="Refuse a model whose logits depend on how many tokens are fed together: all but our own forward.",
    )
    max_context: int | None = Field(
        default=None, ge=2, description="Tokens of KV cache; default: the model's, at most 8192."
    )
    slots: int = Field(
        default=1,
        ge=1,
        le=MAX_SLOTS,
        description="Requests decoded side by side, each in a KV cache of its own; others wait.",
    )
    head: str | None = Field(
        default=None,
        description="Head of the target (EAGLE-3, DFlash, DSpark), a directory or hub id; the target's own name for "
        "its layer for multi-token prediction: method head verifies its guesses; auto and pearl take them too.",
    )
    datastore: str | None = Field(
        default=None,
        description="Directory of texts from which ngram and pearl also guess; see pearl datastore --help.",
    )
    habits: bool = Field(
        default=False,
        description="ngram and pearl also guess from the target's texts for earlier requests: counts of a few tokens "
        "in a row, in its worker's memory. The speed of a text then shows what it has in common with those of others.",
    )
    disco: str | None = Field(
        default=None,
        description="File with the classifier of --draft-stop disco for this pair; pearl disco train makes one.",
    )
    target_pace: Seconds | None = Field(
        default=None, description="Emulation: seconds that each target forward lasts."
    )
    draft_pace: Seconds | None = Field(
        default=None, description="Emulation: seconds that each draft forward lasts."
    )
    control: str = Field(
        default="ipc",
        description="Control channel: ipc (private socket files), or for two hosts tcp://HOST:PORT, an address of the "
        "target's host; PORT * is a free one.",
    )
    keys: str | None = Field(
        default=None,
        validate_default=True,
        description="File of the keys that secure a tcp:// control channel; pearl keys FILE makes one.",
    )
    tensors: Literal["auto", "frames", "nccl"] = Field(
        default="auto",
        description="How dense draft distributions travel; auto: as frames of messages, between GPUs too.",
    )
    draft_timeout: Seconds = Field(
        default=10.0, description="Seconds of silence after which the draft counts as lost."
    )
    target_timeout: Seconds = Field(
        default=120.0, description="Seconds of silence after which the target counts as lost."
    )
    startup_timeout: Seconds = Field(
        default=900.0, description="Seconds within which both models must be loaded."
    )
    profile: Literal["auto", "none"] = Field(
        default="auto",
        description="Measured speeds of the pair to start with: those that pearl calibrate has kept for this pair on "
        "this machine, if any, or none.",
    )
    draft_restarts: int = Field(
        default=3, ge=0, description="How often in a row, for one cause, a lost draft is restarted."
    )
    trust_remote_code: bool = Field(
        default=False, description="Run code that comes with a checkpoint."
    )
    trace: str | None = Field(
        default=None,
        description="File to write a timeline of both workers to; see pearl trace --help.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="warning", description="How much to log on stderr."
    )

    @field_validator("*", mode="before")
    @classmethod
    def _utf8(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, str):
            check_utf8(value, str(info.field_name))
        return value

    @field_validator("draft")
    @classmethod
    def _of_a_toy(cls, value: str, info: ValidationInfo) -> str:
        """If the target is a toy and no draft was chosen, make the target its own draft.

        The default draft, which is embedded in the package, has another vocabulary than a toy.
        """
        target = info.data.get("target", "")
        if value == _EMBEDDED_DRAFT and is_toy(target):
            return target
        return value

    @field_validator("target_device", "draft_device")
    @classmethod
    def _device(cls, value: str, info: ValidationInfo) -> str:
        device = Device.parse(value)
        if info.field_name == "draft_device" and len(device.gpus) > 1:
            raise ValueError(f"{value}: a draft is not spread; name one GPU")
        return value

    @field_validator("control")
    @classmethod
    def _channel(cls, value: str) -> str:
        if not is_control(value):
            raise ValueError("use ipc, or tcp://HOST:PORT, an address of the target's host")
        return value

    @field_validator("keys")
    @classmethod
    def _secured(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and not _on_one_host(info):
            raise ValueError(
                "other hosts can reach this control address, so it takes keys: make them with `pearl keys FILE`, "
                "copy FILE to the other host, and give --keys FILE on both"
            )
        return value and os.path.abspath(value)  # a client may attach from another directory

    @field_validator("tensors")
    @classmethod
    def _not_in_the_clear(cls, value: str, info: ValidationInfo) -> str:
        if value == "nccl" and not _on_one_host(info):
            raise ValueError(
                "it is not encrypted, and its two ends meet in a file of one host; between hosts take frames or auto"
            )
        return value

    @field_validator("datastore", "disco")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        """Make a path absolute, because a worker may run in another directory."""
        return value and os.path.abspath(os.path.expanduser(value))

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
        """The roles for which the engine has a model."""
        return ("target", "draft") if self.has_draft else ("target",)

    def check_options(self, options: RequestOptions) -> None:
        """Raise `ConfigError` if options contradict each other, or need what this engine lacks."""
        problem = options.guess_problem() or self._lack(options)
        if problem:
            raise ConfigError(problem)

    def _lack(self, options: RequestOptions) -> str | None:
        """Return a message about something that `options` need and this engine lacks.

        Return None if the engine lacks nothing.
        """
        method = options.method
        if method not in DRAFTLESS and method != "auto" and not self.has_draft:
            return f"method {method} needs a draft model and this engine has none; use method ar or ngram"
        needed = METHODS[method].needs
        if needed and not getattr(self, needed):
            advice = f"give --{needed}" if needed == "habits" else f"name one with --{needed}"
            return f"method {method} needs {needed}: {advice}"
        if self.slots > 1 and (options.gamma or 0) > MAX_WINDOW:
            return wide_window(options.gamma)
        if STOPS[options.draft_stop].is_trained and self.disco is None:
            return (
                f"draft_stop {options.draft_stop} needs a classifier of this pair: make one with pearl disco train, "
                "and name its file with --disco"
            )
        return None

    def located(self) -> dict[str, Any]:
        """Return the settings as JSON values, with absolute paths of models.

        Processes with other working directories can then read and compare the settings.
        """
        values = self.model_dump(mode="json")
        for name in ("target", "draft", "head"):
            spec = values[name]
            is_name = spec in (None, _EMBEDDED, _EMBEDDED_DRAFT) or is_toy(spec)
            if not is_name and os.path.exists(spec):
                values[name] = os.path.abspath(spec)
        return values

    def model(self, role: ModelRole) -> ModelConfig:
        """Return the settings of one model, including those that both models share."""
        values = self.model_dump()
        model_values: dict[str, Any] = {}
        for field in fields(ModelConfig):
            if field.name not in ("role", "spec"):
                shared = values.get(field.name)
                model_values[field.name] = values.get(f"{role}_{field.name}", shared)
        return ModelConfig(values[role], role, **model_values)

    @property
    def one_host(self) -> bool:
        """Whether both workers are on one host, and share the engine's directory."""
        return self.control == ON_ONE_HOST


@dataclass(frozen=True)
class ModelConfig:
    """The settings of one model of the pair.

    All fields but `role` and `spec` are copied from `EngineConfig`. The field "dtype" of the draft
    is copied from "draft_dtype"; a field that both models share is copied from the field of the
    same name.

    Attributes:
        spec: the model as users name it: a directory, a hub id, and so on (see
            `EngineConfig.target`).
        device: the device as users write it; the property `place` is the parsed device.
    """

    spec: str
    role: ModelRole = "target"
    device: str = "auto"
    dtype: DType = "auto"
    rows: Rows = "auto"
    pace: float | None = None
    forwards: str = "auto"
    exact: bool = False
    max_context: int | None = None
    slots: int = 1
    trust_remote_code: bool = False

    @property
    def place(self) -> Device:
        return Device.parse(self.device)

    @property
    def is_spread(self) -> bool:
        """Whether the model is spread over several GPUs, as accelerate does it."""
        return len(self.place.gpus) > 1

    @property
    def rounding(self) -> Literal["", "int8", "int4"]:
        """The dtype to which matrices are rounded when they are loaded; "" if they are not rounded."""
        return self.dtype if self.dtype in ("int8", "int4") else ""

    @property
    def weights(self) -> str:
        """The dtype in which weights are read, before any rounding."""
        return "bfloat16" if self.rounding else self.dtype


def _on_one_host(info: ValidationInfo) -> bool:
    """Return whether `control` is for one host.

    If `control` itself was refused, return True, so that no second error message follows.
    """
    return info.data.get("control", ON_ONE_HOST) == ON_ONE_HOST
