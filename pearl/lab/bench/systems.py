"""What decodes in a benchmark: an engine of ours, or `transformers`' `generate` in a process beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pearl.client.request import resolve_sampling
from pearl.config import DecodingConfig, EngineConfig, ModelRole, SamplingParams
from pearl.engine import Engine
from pearl.errors import StartError
from pearl.metrics import Statistics
from pearl.models.tokenizer import GenerationDefaults
from pearl.worker.build import settled


@dataclass(frozen=True)
class Decoded:
    """One text. Only what was committed counts, up to and with an EOS.

    Attributes:
        first_seconds: from the start of the prefill to the first commit.
        late_tokens, late_seconds: after the first commit, up to the last. Of ours by the target worker's clock.
        statistics: ours alone.
    """

    tokens: tuple[int, ...]
    first_seconds: float
    late_tokens: int
    late_seconds: float
    statistics: Statistics | None = None

    @property
    def seconds(self) -> float:
        return self.first_seconds + self.late_seconds


class System(Protocol):
    """`decoding` is for ours; `generate` has one way only."""

    def forget(self, decoding: DecodingConfig, prompt: Sequence[int]) -> None:
        """Leaves nothing of an earlier text in the KV caches that `prompt` could begin with."""
        ...

    def decode(self, decoding: DecodingConfig, prompt: Sequence[int], params: SamplingParams) -> Decoded: ...

    def close(self) -> None: ...


class OurSystem:
    def __init__(self, config: EngineConfig) -> None:
        self.engine = Engine(config=config)

    def forget(self, decoding: DecodingConfig, prompt: Sequence[int]) -> None:
        """By a short text that begins otherwise: both models then keep that one."""
        other = [int(prompt[0] == 0)]
        self.engine.generate(other, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), decoding=decoding)

    def decode(self, decoding: DecodingConfig, prompt: Sequence[int], params: SamplingParams) -> Decoded:
        (result,) = self.engine.generate(list(prompt), params, decoding=decoding)
        s = result.statistics
        late = max(0.0, s.seconds - s.seconds_to_first_token)
        late_tokens = round((s.tokens_per_second or 0.0) * late)
        return Decoded(tuple(result.tokens), s.seconds_to_first_token, late_tokens, late, s)

    def close(self) -> None:
        self.engine.close()


class Generate:
    """Raises `StartError` where the process cannot load its models, or has ended."""

    def __init__(self, config: EngineConfig, devices: Devices, defaults: GenerationDefaults, assisted: bool) -> None:
        self._defaults = defaults
        environment = dict(os.environ)
        if devices.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices.gpus))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pearl.lab.bench.generate"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        settings = {
            "target": config.target,
            "assistant": config.draft if assisted else None,
            "target_dtype": _stored(config.target_dtype),
            "assistant_dtype": _stored(config.draft_dtype),
            "device": "cuda:0" if devices.gpus else "cpu",
            "spread": len(devices.gpus) > 1,
            "cores": devices.cores,
        }
        self._ask(settings)

    def forget(self, decoding: DecodingConfig, prompt: Sequence[int]) -> None:
        """It never remembers."""

    def decode(self, decoding: DecodingConfig, prompt: Sequence[int], params: SamplingParams) -> Decoded:
        asked = {
            "prompt": list(prompt),
            "max_tokens": params.max_tokens,
            "seed": params.seed,
            "sampling": _as_generate_has_it(params, self._defaults),
        }
        answer = self._ask(asked)
        return Decoded(tuple(answer.pop("tokens")), **answer)

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        except (OSError, ValueError):
            self.close()
            raise StartError("transformers' process has ended; its own words stand above") from None
        if "error" in answer:
            self.close()
            raise StartError(f"transformers' process: {answer['error']}")
        return answer

    def close(self) -> None:
        """It ends with its standard input."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.communicate()


def _as_generate_has_it(params: SamplingParams, defaults: GenerationDefaults) -> dict[str, Any]:
    sampling = resolve_sampling(params, defaults)
    if sampling.temperature == 0:
        return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None}
    filters = {"top_k": sampling.top_k or None, "top_p": sampling.top_p, "min_p": sampling.min_p or None}
    return {"do_sample": True, "temperature": sampling.temperature, **filters}


@dataclass(frozen=True)
class Devices:
    """Cores or GPUs. Both empty: all cores, unpinned."""

    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()

    def __or__(self, other: Devices) -> Devices:
        cores = tuple(sorted({*self.cores, *other.cores})) if self.cores and other.cores else ()
        return Devices(cores, tuple(sorted({*self.gpus, *other.gpus})))

    @property
    def name(self) -> str:
        """As `EngineConfig.target_device` has it."""
        kind, numbers = ("cuda", self.gpus) if self.gpus else ("cpu", self.cores)
        return f"{kind}:{','.join(map(str, numbers))}" if numbers else kind

    def in_words(self) -> str:
        kind, numbers = ("GPU", self.gpus) if self.gpus else ("core", self.cores)
        return f"{len(numbers)} {kind}{'' if len(numbers) == 1 else 's'}" if numbers else "all cores"


def devices_of(config: EngineConfig) -> tuple[Devices, Devices]:
    """Of the target and of the draft, all their ranks, as the workers settle them."""
    target, draft = (_settled(config, role) if role in config.roles else Devices() for role in ("target", "draft"))
    return target, draft


def _settled(config: EngineConfig, role: ModelRole) -> Devices:
    devices = [settled(config, role, rank) for rank in range(config.model(role).tp)]
    cores = [core for device in devices for core in device.cores or ()]
    return Devices(tuple(sorted({*cores})), tuple(sorted({gpu for device in devices for gpu in device.gpus})))


def _stored(dtype: str) -> str:
    """What `generate` can load: rounded weights are our own."""
    return "bfloat16" if dtype in ("int8", "int4") else dtype
