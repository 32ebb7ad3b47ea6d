"""What a launcher tells a worker, as one line of JSON: which part of which model it is, and where the others are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from pearl.config import EngineConfig, ModelConfig, ModelRole


@dataclass(frozen=True)
class TargetSettings:
    """What a target's loop takes.

    Attributes:
        vocab_digest: of the target's tokens; a draft must bring the same.
        draft_timeout: seconds of silence after which the draft is lost.
        slots: how many requests run side by side.
        has_classifier: whether the draft has what stop policy disco needs.
    """

    vocab_size: int
    context: int
    vocab_digest: bytes
    draft_timeout: float
    expects_draft: bool
    slots: int = 1
    has_classifier: bool = False


class WorkerSettings(BaseModel):
    """Of one worker process.

    Attributes:
        rank: of those that share the model; 0 leads.
        start: how many workers of this role and rank there were before it.
        address: where the target listens, or is to listen; a rank that only follows needs none.
        directory: the engine's, of sockets, keys, the stores where ranks meet, and parts of traces.
        tensors: how dense draft rows travel, where that is not as configured.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: ModelRole
    rank: int = 0
    start: int = 0
    config: EngineConfig
    address: str = ""
    directory: Path
    tensors: Literal["frames"] | None = None

    @property
    def model(self) -> ModelConfig:
        return self.config.model(self.role)

    @property
    def name(self) -> str:
        """What users read: target, or target rank 1."""
        return f"{self.role} rank {self.rank}" if self.rank else self.role

    def to_json(self) -> bytes:
        """One line, without its end."""
        return self.model_dump_json().encode()

    @classmethod
    def from_json(cls, line: bytes) -> WorkerSettings:
        """Raises `ConfigError` for a setting that does not hold in this process: a core that it may not use, say."""
        return cls.model_validate_json(line)
