"""The engine as the server uses it: texts are queued, and counted in the server's metrics."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pearl.config import RequestOptions
from pearl.engine import Engine
from pearl.engine.asynchronous import AsyncEngine, AsyncStream
from pearl.engine.request import Options
from pearl.errors import EngineClosed, TargetLost
from pearl.server.errors import of_engine
from pearl.server.metrics import ServerMetrics


class Service:
    """Queues texts for the engine, and counts them in `metrics`."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.engine = engine
        self._texts: set[AsyncStream] = set()  # waiting, being written, or still being read
        self.metrics = ServerMetrics(
            model,
            running=lambda: sum(text.watch.begun > 0 for text in self._async.streams),
            waiting=lambda: sum(text.watch.begun == 0 for text in self._texts),
            restarts=lambda: engine.draft.restarts if engine.draft else 0,
        )
        self._async = AsyncEngine.of(engine)
        self.encode = self._async.encode

    @property
    def lost(self) -> str:
        """Why the engine is lost; empty while it runs."""
        return self.engine.client.lost

    def close(self) -> None:
        """Fail all texts that have not ended, and let none begin, because the server ends."""
        for text in self._texts:
            text.fail(EngineClosed())
        self._async.close()

    def check(self) -> None:
        """Raise `ApiError` if the engine is lost or the server is ending."""
        if self.lost:
            raise of_engine(TargetLost(self.lost))
        try:
            _ = self._async.engine
        except EngineClosed as error:
            raise of_engine(error) from None

    @asynccontextmanager
    async def text(
        self, tokens: list[int], params: RequestOptions, options: Options, arrived: float
    ) -> AsyncIterator[AsyncStream]:
        """Return a context manager whose `async with` block gets the stream of a text.

        The text is queued when the stream is first read. If the block is left before the text has
        ended, the text is cancelled.

        Args:
            arrived: when the text's request arrived, a time.monotonic().
        """
        self.check()
        text = self._async.stream(tokens, params, **options)
        text.on_piece = self.metrics.piece
        self._texts.add(text)
        try:
            yield text
        finally:
            self._texts.discard(text)
            text.close()
            if text.watch.begun:
                self.metrics.ended(text.result, text.watch, arrived)
