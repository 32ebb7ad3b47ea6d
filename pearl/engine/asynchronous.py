"""An engine for asyncio: streams are read with `async for`, and cancelling the reading task cancels the text.

A thread for each text in progress waits for its pieces, so the event loop is never blocked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Unpack

from pearl.config import RequestOptions
from pearl.engine.engine import Engine
from pearl.engine.request import Options, Prompt, as_prompts
from pearl.engine.stream import Piece, Result, Stream
from pearl.errors import EngineClosed, RequestError
from pearl.metrics import Stopwatch

_CLOSED = "this engine has been closed; make another"


class AsyncStream:
    """The pieces of one text; iterate once. Leaving the iteration early, or cancelling its task, cancels the text.

    Pieces wait here until they are read, at most one context of tokens, so a slow reader delays nobody.

    Attributes:
        watch: when it was first read (`submitted`), when its request was sent (`begun`), and when its tokens arrived.
        on_piece: called with each piece as it arrives, however slowly they are read.
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
        #: None ends the text
        self._events: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        self._stream: Stream | None = None
        self._is_closed = False
        self.watch = Stopwatch()
        self.on_piece: Callable[[Piece], None] = lambda piece: None

    @property
    def result(self) -> Result:
        """The text so far; complete after the last piece. Raises `RequestError` before the first."""
        if self._stream is None:
            raise RequestError("this text has not begun: read its pieces with `async for` first")
        return self._stream.result

    def close(self) -> None:
        """Cancels the rest of the text; its reader finds the stream at its end."""
        self._is_closed = True
        if self._stream is not None:
            self._stream.close()

    def fail(self, error: BaseException) -> None:
        """Iteration raises `error` after the pieces that have arrived."""
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
        """Submits the request and passes on its pieces as they arrive; runs in a thread."""
        end = None
        try:
            engine = self._engine.engine
            tokens = engine.encode(self._prompt, raw=self._options.get("raw", True))
            if not self._is_closed:
                self._stream = engine.stream(tokens, self._params, **self._options)
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
    """`Engine` for asyncio, with the same arguments; an async context manager.

        async with AsyncEngine() as engine:
            async for piece in engine.stream("Hello", RequestOptions(max_tokens=64)):
                print(piece.text, end="", flush=True)

    Starting and closing do not block the event loop. As many texts are written side by side as the engine has `slots`;
    others wait in the order in which they are first read.

    Attributes:
        slots: a place for each text in progress.
        streams: these texts.
        encoder, readers: threads that encode prompts, and that wait for pieces.
    """

    def __init__(
        self, target: str | None = None, draft: str | None = None, **settings: Any
    ) -> None:
        self._arguments = (target, draft, settings)
        self._engine: Engine | None = None
        self.streams: set[AsyncStream] = set()
        self.encoder = ThreadPoolExecutor(1, "pearl-prompt")

    @classmethod
    def of(cls, engine: Engine) -> AsyncEngine:
        """Wrap an engine that runs already, and that stays open when this one is closed."""
        wrapper = cls()
        wrapper._open(engine)
        return wrapper

    def _open(self, engine: Engine) -> None:
        self._engine = engine
        self.slots = asyncio.Semaphore(engine.config.slots)
        self.readers = ThreadPoolExecutor(engine.config.slots, "pearl-piece")

    @property
    def engine(self) -> Engine:
        """The wrapped engine, whose calls block. Raises `EngineClosed` outside of the context."""
        if self._engine is None:
            raise EngineClosed("this engine does not run: use it within `async with`")
        return self._engine

    async def __aenter__(self) -> AsyncEngine:
        target, draft, settings = self._arguments
        self._open(await asyncio.to_thread(Engine, target, draft, **settings))
        return self

    async def __aexit__(self, *_: object) -> None:
        engine = self.engine
        self.close()
        await asyncio.to_thread(engine.close)

    def close(self) -> None:
        """No text begins any more, and those in progress fail; the engine itself stays open."""
        self._engine = None
        for stream in list(self.streams):
            stream.fail(EngineClosed(_CLOSED))
            stream.close()
        for threads in (self.encoder, self.readers):
            threads.shutdown(wait=False)

    async def encode(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt. Raises `RequestError`."""
        return await asyncio.get_running_loop().run_in_executor(
            self.encoder, self.engine.encode, prompt
        )

    def stream(
        self, prompt: Prompt, params: RequestOptions | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """Generates one text, piece by piece; arguments as for `Engine.stream`.

        Errors of `Engine.stream` are raised with the first piece.
        """
        return AsyncStream(self, prompt, params, options)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: RequestOptions | None = None,
        **options: Unpack[Options],
    ) -> list[Result]:
        """Generates a text for each prompt; arguments as for `Engine.generate`."""
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
