"""An engine for asyncio: streams are read with `async for`, and cancelling the task that reads cancels the text.

One thread reads for all streams of an engine and hands their pieces to the event loop, which is never blocked.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Unpack

from pearl.config import SamplingParams
from pearl.engine import Engine
from pearl.engine.client import Options, check_options
from pearl.engine.request import Prompt, as_prompts
from pearl.engine.stream import Piece, Result, Stream
from pearl.engine.turnstile import Turnstile
from pearl.errors import EngineClosed, PearlError, RequestError, StartError, TargetLost, TransportError

log = logging.getLogger(__name__)

_Tell = Callable[[Piece | BaseException | None], None]  # a piece, or what ends the text; None: its end


class Watch(Protocol):
    """Told of a text on the event loop's thread, as things happen, however late its pieces are taken."""

    def begun(self) -> None:
        """Its turn has come: the engine has been asked for it."""
        ...

    def came(self, piece: Piece) -> None: ...

    def ended(self) -> None:
        """Nothing more will come, whether or not it ever began."""
        ...


class AsyncStream:
    """The pieces of one text; iterate once. Leaving the iteration early, or cancelling its task, cancels the text.

    What has come waits here until it is taken, at most one context of tokens: a slow reader holds up neither the engine
    nor those who wait for it.

    Attributes:
        waited: seconds until its turn came and the engine was asked for it; 0 before that.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        prompt: Prompt,
        params: SamplingParams | None,
        options: Options,
        watch: Watch | None,
        client: str,
    ) -> None:
        self._engine, self._watch, self._client = engine, watch, client
        self._asked: tuple[Prompt, SamplingParams | None, Options] | None = (prompt, params, options)
        self._told: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._closed = self._ended = False
        self._read = self.waited = 0.0

    @property
    def result(self) -> Result:
        """Grows with the pieces that have come; complete after the last. Raises `RequestError` before the first."""
        if self._stream is None:
            raise RequestError("this text has not begun: read its pieces with `async for` first")
        return self._stream.result

    def close(self) -> None:
        """Leaves the text as it is; the target is told to stop. A reader finds the stream at its end."""
        with self._lock:
            self._closed = True
            if self._stream is not None:
                self._stream.close()

    def fail(self, error: BaseException) -> None:
        """Iteration raises `error` after what has come; on the event loop's thread."""
        self._told.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        if self._asked is None:
            raise RequestError("this stream is being read already, or has been")
        asked, self._asked = self._asked, None
        self._read = time.monotonic()
        await self._engine.turns.acquire(self._client)
        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._engine.encoder, self._begin, loop, *asked)
        try:
            while (piece := await self._told.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            self.close()

    def _begin(
        self, loop: asyncio.AbstractEventLoop, prompt: Prompt, params: SamplingParams | None, options: Options
    ) -> None:
        """On a thread: a long prompt takes long to encode."""

        def tell(what: Piece | BaseException | None) -> None:
            with suppress(RuntimeError):  # the loop has been closed: nobody listens
                loop.call_soon_threadsafe(self._came, what)

        try:
            engine = self._engine.engine
            # Both before the lock, for which the loop may wait.
            tokens = engine.encode(prompt, raw=options.get("raw", True))
            engine.wait_to_be_heard()
            with self._lock:
                if self._closed:
                    tell(None)
                    return
                stream = self._stream = engine.stream(tokens, params, **options)
            self.waited = time.monotonic() - self._read
            if self._watch is not None:
                loop.call_soon_threadsafe(self._watch.begun)
            self._engine.reader.add(stream, tell)
        except BaseException as error:
            tell(error)

    def _came(self, what: Piece | BaseException | None) -> None:
        if self._ended:
            return
        if isinstance(what, Piece):
            if self._watch is not None:
                self._watch.came(what)
        else:
            self._ended = True
            self._engine.turns.release()
            if self._watch is not None:
                self._watch.ended()
        self._told.put_nowait(what)


class AsyncEngine:
    """`Engine` for asyncio, with the same arguments; an async context manager.

        async with AsyncEngine() as engine:
            async for piece in engine.stream("Hello", SamplingParams(max_tokens=64)):
                print(piece.text, end="", flush=True)

    Starting and closing do not block the event loop.  As many texts are written side by side as the engine has `slots`;
    others wait, in the order in which they are first read; where texts are said to be of several clients, these take
    turns.

    Attributes:
        turns: one for each text that may be written at a time.
        encoder: where requests are made ready.
    """

    def __init__(self, target: str | None = None, draft: str | None = None, **settings: Any) -> None:
        self._given = (target, draft, settings)
        self._engine: Engine | None = None
        self._reader: Reader | None = None
        self.turns = Turnstile(0)
        self.encoder = ThreadPoolExecutor(1, "pearl-prompt")

    @classmethod
    def of(cls, engine: Engine) -> AsyncEngine:
        """One of an engine that runs, and that stays open when this one is closed."""
        found = cls()
        found._open(engine)
        return found

    def _open(self, engine: Engine) -> None:
        self._engine, self._reader = engine, Reader(engine)
        self.turns = Turnstile(engine.config.slots)

    @property
    def engine(self) -> Engine:
        """The engine behind it, whose calls block. Raises `EngineClosed` outside of the context."""
        if self._engine is None:
            raise EngineClosed("this engine does not run: use it within `async with`")
        return self._engine

    @property
    def reader(self) -> Reader:
        """The thread that reads. Raises `EngineClosed` outside of the context."""
        if self._reader is None:
            raise EngineClosed("this engine does not run: use it within `async with`")
        return self._reader

    async def __aenter__(self) -> AsyncEngine:
        target, draft, settings = self._given
        self._open(await asyncio.to_thread(Engine, target, draft, **settings))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        engine = self.engine
        self.close()
        await asyncio.to_thread(engine.close)  # which ends what is being read, too

    def close(self) -> None:
        """No text is begun any more, and none is read on; the engine itself stays open."""
        if self._reader is not None:
            self._reader.close()
        self._engine = self._reader = None
        self.encoder.shutdown(wait=False, cancel_futures=True)

    async def encode(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt. Raises `RequestError`."""
        return await asyncio.get_running_loop().run_in_executor(self.encoder, self.engine.encode, prompt)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        watch: Watch | None = None,
        client: str = "",
        **options: Unpack[Options],
    ) -> AsyncStream:
        """Generates one text, piece by piece; arguments as for `Engine.stream`, and `client` is whose text it is.

        Raises `ConfigError` for options that are wrong; what `Engine.stream` raises else comes with the first piece.
        """
        check_options(options, params)
        _ = self.engine
        return AsyncStream(self, prompt, params, options, watch, client)

    async def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> list[Result]:
        """Generates a text for each prompt; arguments as for `Engine.generate`."""
        tasks = [asyncio.create_task(_whole(self.stream(each, params, **options))) for each in as_prompts(prompts)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


async def _whole(stream: AsyncStream) -> Result:
    async for _ in stream:
        pass
    return stream.result


class Reader:
    """The thread that reads an engine's streams, and notices that the engine is lost while there are none.

    Attributes:
        lost: why the engine is of no more use; empty while it runs.
    """

    def __init__(self, engine: Engine) -> None:
        self.lost = ""
        self._engine = engine
        self._lock = threading.Lock()
        self._streams: dict[Stream, _Tell] = {}
        self._fate: BaseException | None = None  # what those are told who come too late
        threading.Thread(target=self._run, name="pearl-text", daemon=True).start()

    def add(self, stream: Stream, tell: _Tell) -> None:
        """Reads `stream` to its end; `tell` is called on the reader's thread."""
        with self._lock:
            fate = self._fate
            if fate is None:
                self._streams[stream] = tell
        if fate is not None:
            tell(fate)
        else:
            self._engine.wake()

    def close(self) -> None:
        """Ends reading, and the thread; texts that are not at their end end as those of a closed engine."""
        self._end(EngineClosed("this engine has been closed; make another"))

    def _end(self, why: BaseException) -> None:
        with self._lock:
            self._fate = self._fate or why
            streams, self._streams = self._streams, {}
        for stream, tell in streams.items():
            stream.close()
            tell(why)
        self._engine.wake()

    def _run(self) -> None:
        while self._fate is None:
            try:
                self._engine.wait_for(self._has_news)
            except (EngineClosed, TargetLost, StartError, TransportError) as error:
                self.lost = "" if isinstance(error, EngineClosed) else str(error)
                self._end(error)
            except PearlError as error:  # of no text: that somebody's message was refused, say
                log.warning("%s", error)
            with self._lock:
                ready = [(stream, tell) for stream, tell in self._streams.items() if stream.inbox or not stream.open]
            for stream, tell in ready:
                self._pass_on(stream, tell)

    def _has_news(self) -> bool:
        with self._lock:
            return self._fate is not None or any(each.inbox or not each.open for each in self._streams)

    def _pass_on(self, stream: Stream, tell: _Tell) -> None:
        try:
            while stream.inbox or not stream.open:
                tell(next(stream))
            return
        except StopIteration:
            tell(None)
        except BaseException as error:
            tell(error)
        with self._lock:
            self._streams.pop(stream, None)
