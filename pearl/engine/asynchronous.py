"""An engine for asyncio. Streams are read with `async for`; cancelling the task cancels the text.

Each text in progress has a thread that waits for the text's pieces, so the event loop is never
blocked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Unpack

from pearl.config import RequestOptions
from pearl.config.engine import MAX_SLOTS
from pearl.engine.engine import Engine
from pearl.engine.request import Options, Prompt, as_prompts
from pearl.engine.stream import Piece, Result, Stream
from pearl.errors import EngineClosed, RequestError
from pearl.metrics import Stopwatch

_CLOSED = "this engine has been closed; make another"


class AsyncStream:
    """The pieces of one text, to be iterated over once.

    Leaving the iteration early, or cancelling its task, cancels the text. Pieces are queued here
    until they are read, so a slow reader delays nobody. The queue has at most as many tokens as fit
    the context.

    Attributes:
        watch: when the iteration began (`submitted`), when the request was sent (`begun`), and when
            tokens arrived.
        on_piece: called with each piece as it arrives, before the piece is read.
    """

    def __init__(
        self, engine: AsyncEngine, prompt: Prompt, params: RequestOptions | None, options: Options
    ) -> None:
        _ = engine.engine  # raises if it is closed
        self._engine = engine
        self._prompt = prompt
        self._params = params
        self._options = options
        self._is_read = False
        #: Pieces that were not read yet. After the last piece comes an error, which the iteration
        #: raises, or None, which ends the iteration.
        self._events: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        self._stream: Stream | None = None
        self._is_closed = False
        self.watch = Stopwatch()
        self.on_piece: Callable[[Piece], None] = lambda piece: None

    @property
    def result(self) -> Result:
        """The text so far, which is complete after the last piece.

        Raises `RequestError` if the iteration has not begun.
        """
        if self._stream is None:
            raise RequestError("this text has not begun: read its pieces with `async for` first")
        return self._stream.result

    def close(self) -> None:
        """Cancel the rest of the text, so that the iteration ends."""
        self._is_closed = True
        if self._stream is not None:
            self._stream.close()

    def fail(self, error: BaseException) -> None:
        """Make the iteration raise `error` after the pieces that have arrived."""
        self._events.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        if self._is_read:
            raise RequestError("this stream is being read already, or has been")
        self._is_read = True
        self.watch.submitted = time.monotonic()
        await self._engine.slots.acquire()
        self._engine.streams.add(self)
        try:
            self._engine.readers.submit(self._write, asyncio.get_running_loop())
        except RuntimeError:  # the engine was closed while this text waited
            self._end(EngineClosed(_CLOSED))
        try:
            while (event := await self._events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            self.close()

    def _write(self, loop: asyncio.AbstractEventLoop) -> None:
        """Submit the request, and pass its pieces to the event loop as they arrive.

        Runs in a thread of its own.
        """
        end = None
        try:
            engine = self._engine.engine
            if not self._is_closed:
                self._stream = engine.stream(self._prompt, self._params, **self._options)
                self.watch.begun = time.monotonic()
                if self._is_closed:
                    self._stream.close()
                for piece in self._stream:
                    loop.call_soon_threadsafe(self._pass_on, piece)
        except BaseException as error:
            end = error
        loop.call_soon_threadsafe(self._end, end)

    def _pass_on(self, piece: Piece) -> None:
        if piece.tokens:
            self.watch.committed(len(piece.tokens), time.monotonic())
        self.on_piece(piece)
        self._events.put_nowait(piece)

    def _end(self, error: BaseException | None) -> None:
        self._engine.streams.discard(self)
        self._engine.slots.release()
        self._events.put_nowait(error)


class AsyncEngine:
    """An `Engine` for asyncio. It takes the same arguments, and is an async context manager.

        async with AsyncEngine() as engine:
            async for piece in engine.stream("Hello", RequestOptions(max_tokens=64)):
                print(piece.text, end="", flush=True)

    Starting and closing do not block the event loop. The engine generates as many texts at a time
    as its setting `slots` says. Further texts wait in the order in which their iterations begin.

    Attributes:
        slots: a semaphore with one permit for each text that may be in progress.
        streams: the texts in progress.
        encoder: a thread that encodes prompts.
        readers: threads that wait for pieces.
    """

    def __init__(
        self, target: str | None = None, draft: str | None = None, **settings: Any
    ) -> None:
        self._arguments = (target, draft, settings)
        self._engine: Engine | None = None
        self._started: Engine | None = None  # the engine that this object has to close
        self.streams: set[AsyncStream] = set()
        self.encoder = ThreadPoolExecutor(1, "pearl-prompt")
        self.readers = ThreadPoolExecutor(MAX_SLOTS, "pearl-piece")

    @classmethod
    def of(cls, engine: Engine) -> AsyncEngine:
        """Return an `AsyncEngine` for a running engine, which it does not close at the end."""
        wrapper = cls()
        wrapper._open(engine)
        return wrapper

    def _open(self, engine: Engine) -> None:
        self._engine = engine
        self.slots = asyncio.Semaphore(engine.config.slots)

    @property
    def engine(self) -> Engine:
        """The wrapped engine, whose calls block. Raises `EngineClosed` outside of `async with`."""
        if self._engine is None:
            raise EngineClosed("this engine does not run: use it within `async with`")
        return self._engine

    async def __aenter__(self) -> AsyncEngine:
        target, draft, settings = self._arguments
        self._started = await asyncio.to_thread(Engine, target, draft, **settings)
        self._open(self._started)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        if self._started is not None:
            await asyncio.to_thread(self._started.close)

    def close(self) -> None:
        """Refuse new texts and fail the texts in progress. The wrapped engine stays open."""
        self._engine = None
        for stream in list(self.streams):
            stream.fail(EngineClosed(_CLOSED))
            stream.close()
        for threads in (self.encoder, self.readers):
            threads.shutdown(wait=False)

    async def encode(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt. Raises `RequestError` as `Engine.encode` does."""
        return await asyncio.get_running_loop().run_in_executor(
            self.encoder, self.engine.encode, prompt
        )

    def stream(
        self, prompt: Prompt, params: RequestOptions | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """Generate one text, piece by piece. The arguments are those of `Engine.stream`.

        The errors that `Engine.stream` raises are raised here when the first piece is read.
        """
        return AsyncStream(self, prompt, params, options)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: RequestOptions | None = None,
        **options: Unpack[Options],
    ) -> list[Result]:
        """Generate a text for each prompt. The arguments are those of `Engine.generate`."""
        tasks = []
        for prompt in as_prompts(prompts):
            stream = self.stream(prompt, params, **options)
            tasks.append(asyncio.create_task(_read(stream)))
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


async def _read(stream: AsyncStream) -> Result:
    async for _ in stream:
        pass
    return stream.result
