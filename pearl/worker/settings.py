"""Settings of worker processes and loops."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from pearl.config import EngineConfig, ModelConfig, ModelRole


@dataclass(frozen=True)
class TargetSettings:
    """What a target's loop takes: the engine's settings, and what is known of the loaded target.

    `vocab_digest`: of its tokens; a draft must bring the same.
    """

    config: EngineConfig
    vocab_size: int
    context: int
    vocab_digest: bytes


class WorkerSettings(BaseModel):
    """What a launcher sends a worker process, as one line of JSON.

    Attributes:
        address: where the target listens or is to listen.
        directory: the engine's: sockets, keys, the file through which a process group meets, parts of traces.
        tensors: how dense draft rows travel, if not as configured.
        run: names the run in traces, if `directory` is not the target's: the target's directory on its own host.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: ModelRole
    config: EngineConfig
    address: str = ""
    directory: Path
    tensors: Literal["frames"] | None = None
    run: str = ""

    @property
    def model(self) -> ModelConfig:
        return self.config.model(self.role)
