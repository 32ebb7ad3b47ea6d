"""An engine for asyncio: texts are those of `Engine`, the event loop is never blocked, cancelling cancels the text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pearl import AsyncEngine, SamplingParams
from pearl.engine.asynchronous import AsyncStream
from pearl.engine.turnstile import Turnstile
from pearl.errors import ConfigError, EngineClosed, ModelError, PearlError, RequestError, TargetLost
from tests.conftest import TOY, greedy_text

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SLOWLY = 0.05  # seconds a forward: so that a busy machine, too, comes before the end of `LONG`
BOUND = 240.0  # seconds: for a slow machine, never reached where all is well


@asynccontextmanager
async def started(pace: float = 0.002) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(TOY, TOY, target_pace=pace, draft_pace=pace / 4) as engine:
        yield engine


async def read(stream: AsyncStream) -> list[int]:
    return [token async for piece in stream for token in piece.tokens]


async def several() -> None:
    async with started() as engine:
        prompts = [[1, 2, 3], [4, 5], [6]]
        texts = await asyncio.gather(*(read(engine.stream(prompt, GREEDY)) for prompt in prompts))
        assert texts == [greedy_text(prompt, 40) for prompt in prompts]
        results = await engine.generate(prompts, GREEDY, method="sd")
        assert [result.tokens for result in results] == texts
        assert all(result.finish_reason == "length" for result in results)
        seeded = SamplingParams(temperature=1, seed=5, max_tokens=30, ignore_eos=True)
        ((one,), (other,)) = (
            await engine.generate([1, 2], seeded),
            await asyncio.to_thread(engine.engine.generate, [[1, 2]], seeded),
        )
        assert one.tokens == other.tokens


def test_texts_of_several_tasks_are_each_their_own() -> None:
    asyncio.run(asyncio.wait_for(several(), BOUND))


async def unblocked() -> int:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    async with started(pace=0.3) as engine:
        ticking = asyncio.create_task(tick())
        before = ticks
        assert len(await read(engine.stream([1, 2, 3], SHORT, method="ar"))) == 10
        ticking.cancel()
        return ticks - before


def test_the_event_loop_goes_on_meanwhile() -> None:
    """Ten pieces in three seconds: a loop that is blocked until the next piece ticks once or twice a piece."""
    assert asyncio.run(asyncio.wait_for(unblocked(), BOUND)) > 40


async def cancelled() -> None:
    async with started(SLOWLY) as engine:
        stream = engine.stream([1, 2, 3], LONG, method="ar")
        reading = asyncio.create_task(read(stream))
        while not reading.done() and (stream._stream is None or len(stream.result.tokens) < 5):
            await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert (await engine.generate([4, 5], GREEDY))[0].tokens == greedy_text([4, 5], 40)
        assert stream.result.finish_reason == "cancelled"
        assert 5 <= len(stream.result.tokens) < 400


def test_cancelling_a_reader_cancels_its_text() -> None:
    asyncio.run(asyncio.wait_for(cancelled(), BOUND))


async def left_early() -> None:
    async with started(SLOWLY) as engine:
        stream = engine.stream([1, 2, 3], LONG)
        async for piece in stream:
            if piece.tokens:
                stream.close()
        assert stream.result.finish_reason == "cancelled"
        waiting = engine.stream([1, 2, 3], GREEDY)
        waiting.close()
        assert await read(waiting) == [], "closed before it began"
        assert await read(engine.stream([9], GREEDY)) == greedy_text([9], 40)


def test_a_stream_is_closed_before_amid_and_after() -> None:
    asyncio.run(asyncio.wait_for(left_early(), BOUND))


async def turns(*comers: str) -> str:
    """The order in which they come through, where `-x` is an x that leaves before its turn."""
    order: list[str] = []
    turnstile = Turnstile(1)

    async def come(client: str) -> None:
        await turnstile.acquire(client)
        order.append(client)

    await turnstile.acquire("first")
    assert turnstile.locked()
    tasks = []
    for comer in comers:
        tasks.append(asyncio.create_task(come(comer[-1])))
        await asyncio.sleep(0)
    for comer, task in zip(comers, tasks, strict=True):
        if comer.startswith("-"):
            task.cancel()
    for _ in comers:
        turnstile.release()
        await asyncio.sleep(0)
    await asyncio.wait(tasks)
    while turnstile.locked():
        turnstile.release()
    assert not turnstile._queues
    return "".join(order)


@pytest.mark.parametrize(
    ("comers", "order"),
    [("a a a", "aaa"), ("a a a b c c", "abcaca"), ("a a -b c", "aca"), ("-a a b -b", "ab"), ("-a -a", "")],
)
def test_clients_take_turns(comers: str, order: str) -> None:
    assert asyncio.run(turns(*comers.split())) == order


async def turned_and_cancelled() -> bool:
    turnstile = Turnstile(1)
    await turnstile.acquire("a")
    waiting = [asyncio.create_task(turnstile.acquire(client)) for client in "bc"]
    await asyncio.sleep(0)
    turnstile.release()
    waiting[0].cancel()  # before it has heard
    await asyncio.wait(waiting, return_when=asyncio.ALL_COMPLETED)
    return waiting[0].cancelled() and not waiting[1].cancelled()


def test_who_leaves_as_its_turn_comes_passes_it_on() -> None:
    assert asyncio.run(asyncio.wait_for(turned_and_cancelled(), BOUND))


async def refused() -> None:
    idle = AsyncEngine(TOY, TOY)
    with pytest.raises(EngineClosed, match="async with"):
        idle.stream([1])
    async with started() as engine:
        with pytest.raises(ConfigError, match="temperature"):
            engine.stream([1], temperature=0)  # type: ignore[call-arg]
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


def test_mistakes_are_told_where_they_are_made() -> None:
    asyncio.run(asyncio.wait_for(refused(), BOUND))


async def lost() -> None:
    async with started(SLOWLY) as engine:
        target = engine.engine._launcher.target
        assert target is not None
        stream = engine.stream([1, 2, 3], LONG, method="ar")
        reading = asyncio.create_task(read(stream))
        while stream._stream is None or not stream.result.tokens:
            await asyncio.sleep(0.01)
        target.kill()
        with pytest.raises(TargetLost):
            await reading


def test_a_lost_target_is_told_to_the_reader() -> None:
    asyncio.run(asyncio.wait_for(lost(), BOUND))
