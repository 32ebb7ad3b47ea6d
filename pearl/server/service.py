"""The engine as the server uses it: which requests are admitted, and what is measured of their texts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from pearl.config import SamplingParams
from pearl.engine import Engine
from pearl.engine.asynchronous import AsyncEngine, AsyncStream
from pearl.engine.request import Options
from pearl.errors import EngineClosed
from pearl.server.errors import ApiError, engine_lost, of_engine
from pearl.server.figures import Figures


class Service:
    """Admits requests, queues their texts for the engine, and counts them.

    Args:
        most_waiting: requests that may wait besides those that are served.
    """

    def __init__(self, engine: Engine, most_waiting: int, model: str) -> None:
        self.engine = engine
        self._most = most_waiting + engine.config.slots
        self._admitted = 0
        self._texts: set[AsyncStream] = set()  # that are written, wait, or are still being read
        self.figures = Figures(
            model,
            running=lambda: sum(text.watch.begun > 0 for text in self._async.streams),
            waiting=lambda: sum(text.watch.begun == 0 for text in self._texts),
            restarts=lambda: engine.draft.restarts if engine.draft else 0,
        )
        self._async = AsyncEngine.of(engine)
        self.encode = self._async.encode
        self.is_stopping = False

    @property
    def lost(self) -> str:
        """Why the engine is lost; empty while it runs."""
        return self.engine.client.lost

    def stop(self) -> None:
        """Fails the texts that are being written or wait: the server is shutting down."""
        self.is_stopping = True
        for text in self._texts:
            text.fail(_shutting_down())

    def close(self) -> None:
        """Begins no more texts; threads end after their current work."""
        self._async.close()

    def check(self) -> None:
        """Raises `ApiError` once the engine is lost or the server ends."""
        if self.lost:
            raise engine_lost(self.lost)
        if self.is_stopping:
            raise of_engine(_shutting_down())

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """While a request is served or waits. Raises `ApiError` if there are too many."""
        self.check()
        if self._admitted >= self._most:
            raise ApiError(
                429, f"{self._admitted} requests are being served or wait; try again later", code="overloaded"
            )
        self._admitted += 1
        try:
            yield
        finally:
            self._admitted -= 1

    @asynccontextmanager
    async def text(
        self, tokens: list[int], params: SamplingParams, options: Options, arrived: float
    ) -> AsyncIterator[AsyncStream]:
        """A text, which is queued once it is read; leaving it early cancels it. `arrived` is a time.monotonic()."""
        self.check()
        text = self._async.stream(tokens, params, **options)
        text.on_piece = self.figures.piece
        self._texts.add(text)
        try:
            yield text
        finally:
            self._texts.discard(text)
            text.close()
            if text.watch.begun:
                self.figures.ended(text.result, text.watch, arrived)


def _shutting_down() -> EngineClosed:
    return EngineClosed("the server is shutting down")
