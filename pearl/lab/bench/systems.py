"""The systems of a benchmark: our engine, and `transformers`' `generate` in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from pearl.config import DecodingConfig, EngineConfig, ModelRole, SamplingParams
from pearl.engine import Engine
from pearl.engine.request import resolve_sampling
from pearl.errors import ConfigError, PearlError, StartError
from pearl.lab.bench.generate import generate, load
from pearl.metrics import Statistics
from pearl.protocol.options import Shaping
from pearl.text.tokenizer import GenerationDefaults
from pearl.worker.placement import settled


@dataclass(frozen=True)
class Decoded:
    """One decoded text.

    Attributes:
        tokens: committed tokens, up to and including EOS.
        statistics: of `generate` its times alone.
        prompt: the tokens before them. row: that decoded it.
    """

    tokens: tuple[int, ...]
    statistics: Statistics
    prompt: tuple[int, ...] = ()
    row: str = ""


class OurSystem:
    """Our engine."""

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


LOOKUP_TOKENS = 10  # candidates a step of `generate`'s prompt lookup: what its documentation shows


class Generate:
    """`generate` in a process. Raises `StartError` if the process cannot load its models, or has ended.

    Args:
        assisted: whether the draft is its assistant.
        lookup: whether it looks for candidates in the text so far (`prompt_lookup_num_tokens`).
    """

    def __init__(
        self,
        config: EngineConfig,
        devices: Devices,
        defaults: GenerationDefaults,
        assisted: bool = False,
        lookup: bool = False,
    ) -> None:
        self._defaults = defaults
        self._options = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if lookup else {}
        self._process = ProcessPoolExecutor(1, get_context("spawn"))
        settings = {
            "target": config.target,
            "assistant": config.draft if assisted else None,
            "target_dtype": _loadable_dtype(config.target_dtype),
            "assistant_dtype": _loadable_dtype(config.draft_dtype),
        }
        self._ask(load, settings, devices.cores, devices.gpus)

    def forget(self, decoding: DecodingConfig, prompt: Sequence[int]) -> None:
        """`generate` keeps no cache between texts."""

    def decode(self, decoding: DecodingConfig, prompt: Sequence[int], params: SamplingParams) -> Decoded:
        sampling = _generate_options(params, self._defaults) | self._options
        return Decoded(**self._ask(generate, list(prompt), params.max_tokens, params.seed, sampling))

    def _ask(self, do: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._process.submit(do, *arguments).result()
        except BrokenProcessPool:
            raise StartError("transformers' process has ended; its error message stands above") from None
        except PearlError as error:
            self.close()
            raise StartError(f"transformers' process: {error}") from None

    def close(self) -> None:
        """End the process."""
        self._process.shutdown()


System = OurSystem | Generate


def _generate_options(params: SamplingParams, defaults: GenerationDefaults) -> dict[str, Any]:
    """The sampling settings as keyword arguments of `generate`."""
    sampling = resolve_sampling(params, defaults, 0)
    shaping = sampling.shaping or Shaping(0)
    if shaping != Shaping(0, shaping.repetition_penalty):
        raise ConfigError("transformers has a repetition_penalty, none of the other penalties, and other biases")
    penalty = {"repetition_penalty": shaping.repetition_penalty}
    if sampling.temperature == 0:
        return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None, **penalty}
    filters = {"top_k": sampling.top_k or None, "top_p": sampling.top_p, "min_p": sampling.min_p or None}
    return {"do_sample": True, "temperature": sampling.temperature, **filters, **penalty}


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


def _loadable_dtype(dtype: str) -> str:
    """A dtype that `generate` can load: int8 and int4 are formats of ours."""
    return "bfloat16" if dtype in ("int8", "int4") else dtype
