"""An engine for asyncio: texts are those of `Engine`, the event loop is never blocked, cancelling cancels the text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from pearl import AsyncEngine, SamplingParams
from pearl.engine.asynchronous import AsyncStream
from pearl.errors import EngineClosed, ModelError, PearlError, RequestError, TargetLost
from tests.conftest import TOY, greedy_text

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SLOWLY = 0.05  # seconds a forward, so that a busy machine looks before the end of `LONG`
BOUND = 240.0  # seconds: for a slow machine, never reached where all is well


@asynccontextmanager
async def started(pace: float = 0.002) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(TOY, TOY, target_pace=pace, draft_pace=pace / 4) as engine:
        yield engine


async def read(stream: AsyncStream) -> list[int]:
    return [token async for piece in stream for token in piece.tokens]


async def has_tokens(stream: AsyncStream, count: int) -> None:
    while stream._stream is None or len(stream.result.tokens) < count:
        await asyncio.sleep(0.01)


async def texts_of_several_tasks_are_each_their_own() -> None:
    async with started() as engine:
        prompts = [[1, 2, 3], [4, 5], [6]]
        texts = await asyncio.gather(*(read(engine.stream(prompt, GREEDY)) for prompt in prompts))
        assert texts == [greedy_text(prompt, 40) for prompt in prompts]
        results = await engine.generate(prompts, GREEDY, method="sd")
        assert [result.tokens for result in results] == texts
        assert all(result.finish_reason == "length" for result in results)
        seeded = SamplingParams(temperature=1, seed=5, max_tokens=30, ignore_eos=True)
        (one,) = await engine.generate([1, 2], seeded)
        (other,) = await asyncio.to_thread(engine.engine.generate, [[1, 2]], seeded)
        assert one.tokens == other.tokens


async def streams_block_nobody_are_closed_before_amid_and_after_and_end_with_their_target() -> None:
    async with started(SLOWLY) as engine:
        stream = engine.stream([1, 2, 3], LONG, method="ar")
        reading = asyncio.create_task(read(stream))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not reading.done()
        assert stream._stream is None or not stream.result.tokens, "blocked, the event loop would find a piece there"
        stream.close()
        await reading
        stream = engine.stream([1, 2, 3], LONG, method="ar")
        reading = asyncio.create_task(read(stream))
        await asyncio.wait({reading, asyncio.create_task(has_tokens(stream, 5))}, return_when="FIRST_COMPLETED")
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert (await engine.generate([4, 5], GREEDY))[0].tokens == greedy_text([4, 5], 40)
        assert stream.result.finish_reason == "cancelled"
        assert 5 <= len(stream.result.tokens) < 400
        stream = engine.stream([1, 2, 3], LONG)
        async for piece in stream:
            if piece.tokens:
                stream.close()
        assert stream.result.finish_reason == "cancelled"
        waiting = engine.stream([1, 2, 3], GREEDY)
        waiting.close()
        assert await read(waiting) == [], "closed before it began"
        assert await read(engine.stream([9], GREEDY)) == greedy_text([9], 40)
        stream = engine.stream([1, 2, 3], LONG, method="ar")
        reading = asyncio.create_task(read(stream))
        await has_tokens(stream, 1)
        engine.engine._launcher.target.kill()  # type: ignore[attr-defined]
        with pytest.raises(TargetLost):
            await reading


async def mistakes_are_reported_where_they_are_made() -> None:
    idle = AsyncEngine(TOY, TOY)
    with pytest.raises(EngineClosed, match="async with"):
        idle.stream([1])
    async with started() as engine:
        with pytest.raises(TypeError, match="temperature"):
            await read(engine.stream([1], temperature=0))  # type: ignore[call-arg]
        with pytest.raises(PearlError):
            await read(engine.stream([99], GREEDY))
        stream = engine.stream([1], GREEDY)
        with pytest.raises(RequestError, match="has not begun"):
            _ = stream.result
        await read(stream)
        with pytest.raises(RequestError, match="being read already"):
            await read(stream)
    with pytest.raises(EngineClosed):
        engine.stream([1])
    with pytest.raises(ModelError, match="vocab"):
        async with AsyncEngine("toy:vocab=nonsense", TOY):
            pass


@pytest.mark.parametrize(
    "scenario",
    [
        texts_of_several_tasks_are_each_their_own,
        streams_block_nobody_are_closed_before_amid_and_after_and_end_with_their_target,
        mistakes_are_reported_where_they_are_made,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_asynchronous(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), BOUND))
