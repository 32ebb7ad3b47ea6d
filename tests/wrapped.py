"""A runner that wraps another runner, for tests that change or watch what the other one does."""

from collections.abc import Sequence
from typing import Any

import torch

from pearl.models.runner import Feed, ModelRunner


class WrappedRunner(ModelRunner):
    """Forwards every call to another runner; subclasses override what they change."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.vocab_size, self.context = runner.vocab_size, runner.context
        self.device, self.capabilities, self.weights = (
            runner.device,
            runner.capabilities,
            runner.weights,
        )

    def length(self, slot: int = 0) -> int:
        return self._runner.length(slot)

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        return self._runner.forward(feeds)

    def rollback(self, length: int, slot: int = 0) -> None:
        self._runner.rollback(length, slot)

    def keep(self, path: Sequence[int], slot: int = 0) -> None:
        self._runner.keep(path, slot)

    def fork(self, slot: int, into: int, length: int | None = None, shared: int = 0) -> None:
        self._runner.fork(slot, into, length, shared)

    def use_threads(self, count: int) -> Sequence[int]:
        return self._runner.use_threads(count)

    def synchronize(self) -> None:
        self._runner.synchronize()

    def is_done(self) -> bool:
        return self._runner.is_done()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that the wrapped runner has beyond `ModelRunner`."""
        return getattr(self._runner, name)
