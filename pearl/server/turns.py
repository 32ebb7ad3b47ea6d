"""The engine as one event loop uses it: as many texts at a time as it has slots; clients take turns."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from pearl.config import DecodingConfig, SamplingParams
from pearl.engine import Engine
from pearl.engine.asynchronous import AsyncEngine, AsyncStream
from pearl.engine.request import Prompt
from pearl.engine.stream import Piece
from pearl.errors import EngineClosed
from pearl.server.errors import ApiError, engine_lost, of_engine
from pearl.server.figures import Figures
from pearl.server.shares import Shares


class Turns:
    """Queues texts for the engine, and counts them.

    Args:
        most_waiting: requests that may wait beside those that are served.
    """

    def __init__(self, engine: Engine, decoding: DecodingConfig, most_waiting: int, model: str) -> None:
        self.engine, self._decoding, self._most = engine, decoding, most_waiting
        self._admitted = Shares()
        self.waiting = 0
        self.running: set[AsyncStream] = set()
        self.figures = Figures(model, lambda: len(self.running), lambda: self.waiting, lambda: engine.draft_restarts)
        self._async = AsyncEngine.of(engine)
        self._reader = self._async.reader  # known after `close`, too
        self.stopping = False

    @property
    def lost(self) -> str:
        """Why the engine is lost; empty while it runs."""
        return self._reader.lost

    def stop(self) -> None:
        """Fails the texts that are being written or wait: the server is shutting down."""
        self.stopping = True
        for stream in self.running:
            stream.fail(_shutting_down())

    def close(self) -> None:
        """Begins no more texts; threads end after their current work."""
        self._async.close()

    def check(self) -> None:
        """Raises `ApiError` once the engine is lost or the server ends."""
        if self.lost:
            raise engine_lost(self.lost)
        if self.stopping:
            raise of_engine(_shutting_down())

    @contextmanager
    def admitted(self, client: str) -> Iterator[None]:
        """While a request is served or waits. Raises `ApiError` if too many are."""
        self.check()
        if not self._admitted.fits(client, 1, self._most + self.engine.config.slots):
            raise ApiError(
                429,
                f"{self._admitted.total} requests are being served or wait; try again later",
                code="overloaded",
                retry_after=self.figures.retry_after,
            )
        with self._admitted.one(client):
            yield

    async def encode(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt. Raises `RequestError`."""
        return await self._async.encode(prompt)

    @asynccontextmanager
    async def text(
        self, tokens: list[int], params: SamplingParams, arrived: float, client: str
    ) -> AsyncIterator[AsyncStream]:
        """A text, which is queued once it is read; leaving it early cancels it. `arrived` is a time.monotonic()."""
        self.check()
        watch = _Watch(self, len(tokens), arrived)
        watch.stream = stream = self._async.stream(tokens, params, watch=watch, client=client, decoding=self._decoding)
        self.waiting += 1
        try:
            yield stream
        finally:
            stream.close()
            watch.turned()


class _Watch:
    """Measures one text as it is written, however late its client reads it."""

    stream: AsyncStream

    def __init__(self, turns: Turns, prompt_tokens: int, arrived: float) -> None:
        self._turns, self._figures = turns, turns.figures
        self._prompt_tokens, self._arrived = prompt_tokens, arrived
        self._asked = time.monotonic()
        self._begun: float | None = None
        self._last: float | None = None  # when the last tokens came
        self._waits = True

    def turned(self) -> None:
        """It has left the queue."""
        if self._waits:
            self._waits = False
            self._turns.waiting -= 1

    def begun(self) -> None:
        self._begun = now = time.monotonic()
        self.turned()
        self._turns.running.add(self.stream)
        if self._turns.stopping:
            self.stream.fail(_shutting_down())
        self._figures.begun(self._prompt_tokens, now - self._asked)

    def came(self, piece: Piece) -> None:
        if not piece.tokens:
            return
        now = time.monotonic()
        if self._last is None:
            self._figures.first(now - self._arrived)
        self._figures.step(piece, None if self._last is None else now - self._last)
        self._last = now

    def ended(self) -> None:
        self._turns.running.discard(self.stream)
        if self._begun is not None:
            now = time.monotonic()
            self._figures.ended(self.stream.result, now - self._arrived, now - self._begun)


def _shutting_down() -> EngineClosed:
    return EngineClosed("the server is shutting down")
