"""An engine as a benchmark uses it, and the devices of its workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pearl.config import DecodingConfig, EngineConfig, ModelRole, SamplingParams
from pearl.engine import Engine
from pearl.metrics import Statistics
from pearl.worker.placement import settled


@dataclass(frozen=True)
class Decoded:
    """One decoded text.

    Attributes:
        tokens: committed tokens, up to and including EOS.
        prompt: the tokens before them. row: that decoded it.
    """

    tokens: tuple[int, ...]
    statistics: Statistics
    prompt: tuple[int, ...] = ()
    row: str = ""


class System:
    """An engine that decodes one text after the other."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = Engine(config=config)

    def forget(self, decoding: DecodingConfig, prompt: Sequence[int]) -> None:
        """Make sure that no KV cache holds a prefix of `prompt`, by a short text that begins with another token."""
        other = [int(prompt[0] == 0)]
        self.engine.generate(other, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), decoding=decoding)

    def decode(self, decoding: DecodingConfig, prompt: Sequence[int], params: SamplingParams) -> Decoded:
        (result,) = self.engine.generate(list(prompt), params, decoding=decoding)
        return Decoded(tuple(result.tokens), result.statistics)

    def close(self) -> None:
        self.engine.close()


@dataclass(frozen=True)
class Devices:
    """Numbers of cores, or of GPUs. Both empty: all cores, unpinned."""

    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()

    def __or__(self, other: Devices) -> Devices:
        cores = tuple(sorted({*self.cores, *other.cores})) if self.cores and other.cores else ()
        return Devices(cores, tuple(sorted({*self.gpus, *other.gpus})))

    @property
    def name(self) -> str:
        """In the notation of `EngineConfig.target_device`."""
        kind, numbers = ("cuda", self.gpus) if self.gpus else ("cpu", self.cores)
        return f"{kind}:{','.join(map(str, numbers))}" if numbers else kind

    def in_words(self) -> str:
        kind, numbers = ("GPU", self.gpus) if self.gpus else ("core", self.cores)
        return f"{len(numbers)} {kind}{'' if len(numbers) == 1 else 's'}" if numbers else "all cores"


def devices_of(config: EngineConfig) -> tuple[Devices, Devices]:
    """(devices of the target, devices of the draft), as the workers resolve them."""
    target, draft = (
        _resolve_devices(config, role) if role in config.roles else Devices() for role in ("target", "draft")
    )
    return target, draft


def _resolve_devices(config: EngineConfig, role: ModelRole) -> Devices:
    device = settled(config, role)
    return Devices(tuple(sorted(device.cores or ())), tuple(sorted(device.gpus)))
