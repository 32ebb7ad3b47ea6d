"""Settings of worker processes and loops."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from pearl.config import EngineConfig, ModelConfig, ModelRole


@dataclass(frozen=True)
class TargetSettings:
    """Settings of a target's loop: the engine's settings, and what is known of the loaded target.

    `vocab_digest` is a digest of the target's vocabulary; a draft must send the same digest.
    """

    config: EngineConfig
    vocab_size: int
    context: int
    vocab_digest: bytes


class WorkerSettings(BaseModel):
    """The settings that a launcher sends to a worker process, as one line of JSON.

    Attributes:
        address: where the target listens, or will listen.
        directory: the engine's directory. It holds sockets, keys, parts of traces, and the file
            through which the ranks of a process group meet.
        tensors: how dense distributions of the draft are sent; None: as `config` says.
        run: name of the run in traces; if it is empty, `directory` is the name. A worker on another
            host than the target is given the name of the target's directory.
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
