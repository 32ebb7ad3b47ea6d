"""Settings of worker processes and loops."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from pearl.config import EngineConfig, ModelConfig, ModelRole


@dataclass(frozen=True)
class TargetSettings:
    """Settings of a target's loop: the engine's settings, and what is known of the loaded target.

    `vocab_digest`: digest of the target's vocabulary; a draft must send the same.
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
        tensors: how dense draft rows travel; None: as configured.
        run: name of the run in traces; empty: `directory` is the name. A worker on another host than the target gets
            the target's directory as name.
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
