"""The settings of the proposer.

The user writes some of them in `additional_config["pearl"]`. The rest is the place of this process
among vLLM's processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pearl.errors import ConfigError
from pearl.transport.keys import Keys, channel_keys

_PLACE = 'additional_config={"pearl": {...}} (--additional-config of vllm serve)'
_TORCHRUN = "external_launcher"  # vLLM's name for ranks that each run a scheduler


@dataclass(frozen=True)
class ProposerSettings:
    """The user's settings.

    Attributes:
        address: where the draft service listens.
        keys: file of keys; needed if the service is on another host.
        timeout: seconds of silence after which the service counts as lost.
        ngrams: whether n-grams of the text may be proposed. They take the place of the draft's
            tokens if more of the n-grams than of the draft's tokens are expected to be accepted.
        trace: the trace file that `pearl trace merge` will make of this engine's part and the
            service's part. Only data-parallel rank 0 records.
    """

    address: str
    keys: str | None = None
    timeout: float = 5.0
    trace: str | None = None
    ngrams: bool = True

    @staticmethod
    def of(vllm_config: Any) -> ProposerSettings:
        """Read the settings from vLLM's configuration.

        Raises `ConfigError`, which says what to write where, if they are missing or wrong.
        """
        additional = vllm_config.additional_config
        stated = additional.get("pearl") if isinstance(additional, Mapping) else None
        if not isinstance(stated, Mapping) or not isinstance(stated.get("address"), str):
            raise ConfigError(
                f"{_PLACE} must name the draft service's address, as `pearl draft serve` prints it: "
                '{"address": "ipc:///run/user/1000/pearl/draft"}'
            )
        names = [field.name for field in fields(ProposerSettings)]
        unknown = sorted(map(str, stated.keys() - set(names)))
        if unknown:
            raise ConfigError(f"{_PLACE} has {', '.join(unknown)}; it takes {', '.join(names)}")
        settings = ProposerSettings(**stated)
        settings.check()
        return settings

    def check(self) -> None:
        """Raise `ConfigError` if a value is of a wrong type or impossible."""
        is_number = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool)
        if not is_number or not 0 < self.timeout < 1e6:
            raise ConfigError(f"{_PLACE}: timeout is a number of seconds, not {self.timeout!r}")
        if not isinstance(self.ngrams, bool):
            raise ConfigError(f"{_PLACE}: ngrams is true or false, not {self.ngrams!r}")
        for name in ("keys", "trace"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{_PLACE}: {name} names a file, not {value!r}")
        if self.trace is not None and not Path(self.trace).absolute().parent.is_dir():
            raise ConfigError(f"{_PLACE}: trace {self.trace} is in no directory that exists")

    def read_keys(self) -> Keys | None:
        return channel_keys(self.keys)


@dataclass(frozen=True)
class Place:
    """Which of vLLM's processes this is.

    Attributes:
        name: the name of this process in the service's log.
        data_rank: the data-parallel rank.
        asks: whether this process requests drafts from the service. If several ranks compute the
            same requests, only the first rank requests drafts, because vLLM uses the drafts of that
            rank.
    """

    name: str
    data_rank: int
    asks: bool

    @staticmethod
    def of(vllm_config: Any) -> Place:
        """Read the place from vLLM's configuration.

        Raises `ConfigError` if each rank would use drafts of its own, because the drafts could
        differ from rank to rank.
        """
        parallel = vllm_config.parallel_config
        num_ranks = parallel.tensor_parallel_size
        num_ranks *= getattr(parallel, "prefill_context_parallel_size", 1)
        if num_ranks > 1 and parallel.distributed_executor_backend == _TORCHRUN:
            raise ConfigError(
                f"distributed_executor_backend {_TORCHRUN} with tensor parallelism: each rank would schedule drafts of "
                "its own. Take another backend, such as mp"
            )
        rank = parallel.rank % num_ranks
        data_rank = parallel.data_parallel_rank
        return Place(f"vllm, data-parallel rank {data_rank}", data_rank, asks=rank == 0)
