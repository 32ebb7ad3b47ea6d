"""The engine as the server uses it: which requests are admitted, and what is measured of their texts."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from pearl.config import SamplingParams
from pearl.engine import Engine, Piece
from pearl.engine.asynchronous import AsyncEngine, AsyncStream
from pearl.engine.request import Options
from pearl.errors import EngineClosed
from pearl.quota import Shares
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
        self._admitted = Shares()
        self.waiting = 0
        self.running: set[AsyncStream] = set()
        self.figures = Figures(
            model,
            running=lambda: len(self.running),
            waiting=lambda: self.waiting,
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
        for stream in self.running:
            stream.fail(_shutting_down())

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
    def admitted(self, client: str) -> Iterator[None]:
        """While a request is served or waits. Raises `ApiError` if there are too many."""
        self.check()
        if not self._admitted.fits(client, 1, self._most):
            raise ApiError(
                429,
                f"{self._admitted.total} requests are being served or wait; try again later",
                code="overloaded",
                retry_after=self.figures.retry_after,
            )
        with self._admitted.held(client):
            yield

    @asynccontextmanager
    async def text(
        self, tokens: list[int], params: SamplingParams, options: Options, arrived: float, client: str
    ) -> AsyncIterator[AsyncStream]:
        """A text, which is queued once it is read; leaving it early cancels it. `arrived` is a time.monotonic()."""
        self.check()
        text = _Text(self, self._async, tokens, params, options, client, arrived)
        self.waiting += 1
        try:
            yield text
        finally:
            text.close()
            text.leave_queue()


class _Text(AsyncStream):
    """A text that is measured as it is written, however slowly its client reads it."""

    def __init__(
        self,
        service: Service,
        engine: AsyncEngine,
        tokens: list[int],
        params: SamplingParams,
        options: Options,
        client: str,
        arrived: float,
    ) -> None:
        super().__init__(engine, tokens, params, options, client)
        self._service, self._figures = service, service.figures
        self._prompt_tokens, self._arrived, self._queued = len(tokens), arrived, time.monotonic()
        self._began: float | None = None
        self._last: float | None = None  # when the last tokens arrived
        self._is_queued = True

    def leave_queue(self) -> None:
        self._service.waiting -= self._is_queued
        self._is_queued = False

    def on_begin(self) -> None:
        self._began = now = time.monotonic()
        self.leave_queue()
        self._service.running.add(self)
        if self._service.is_stopping:
            self.fail(_shutting_down())
        self._figures.begun(self._prompt_tokens, now - self._queued)

    def on_piece(self, piece: Piece) -> None:
        if piece.tokens:
            now = time.monotonic()
            if self._last is None:
                self._figures.first(now - self._arrived)
            self._figures.step(piece, None if self._last is None else now - self._last)
            self._last = now

    def on_end(self) -> None:
        self._service.running.discard(self)
        if self._began is not None:
            now = time.monotonic()
            self._figures.ended(self.result, now - self._arrived, now - self._began)


def _shutting_down() -> EngineClosed:
    return EngineClosed("the server is shutting down")
