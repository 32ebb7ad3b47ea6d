"""Settings of worker processes and loops."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
        is_head: whether the draft is a head, which reads hidden states of the target.
        shares_gpu: whether target and draft take turns on one GPU.
    """

    vocab_size: int
    context: int
    vocab_digest: bytes
    draft_timeout: float
    expects_draft: bool
    slots: int = 1
    has_classifier: bool = False
    is_head: bool = False
    shares_gpu: bool = False


class WorkerSettings(BaseModel):
    """What a launcher sends a worker process, as one line of JSON.

    Attributes:
        address: where the target listens or is to listen.
        directory: the engine's: sockets, keys, parts of traces.
        run: names the run in traces, if `directory` is not the target's: the target's directory on its own host.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: ModelRole
    config: EngineConfig
    address: str = ""
    directory: Path
    run: str = ""

    @property
    def model(self) -> ModelConfig:
        return self.config.model(self.role)
