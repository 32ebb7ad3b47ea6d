"""Measurements and training: simulator, theory, benchmarks, experiments, distillation. Only `pearl.cli` imports it."""

from typing import Protocol


class Watcher(Protocol):
    """Receives progress reports. `total` and `count`: units of the work, such as samples or steps."""

    def begin(self, what: str, total: int) -> None: ...

    def advance(self, count: int, note: str = "") -> None: ...

    def say(self, message: str) -> None: ...
