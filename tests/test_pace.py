"""Refusals are told at once until there are many; then as many a second as there may be, however many come."""

from __future__ import annotations

import asyncio
import heapq

import pytest

from pearl.server.pace import A_SECOND, BURST, LONGEST, Pace


class Time:
    """A clock that moves on to the next who sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self._waiting: list[tuple[float, int, asyncio.Event]] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        woken = asyncio.Event()
        heapq.heappush(self._waiting, (self.now + seconds, len(self.slept), woken))
        await woken.wait()

    async def run(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        while self._waiting:
            self.now, _, woken = heapq.heappop(self._waiting)
            woken.set()
            for _ in range(10):
                await asyncio.sleep(0)


def told(connections: int, seconds: float, time: Time) -> int:
    """How many refusals as many connections are told within some seconds, each asking again at once."""
    count = 0

    async def ask(pace: Pace) -> None:
        nonlocal count
        while time.now < seconds:
            await pace.keep()
            count += 1
            if count > 100_000:
                raise AssertionError("nobody is held back")

    async def main() -> None:
        pace = Pace(time.clock, time.sleep)
        asked = [asyncio.create_task(ask(pace)) for _ in range(connections)]
        await time.run()
        await asyncio.gather(*asked)

    asyncio.run(main())
    return count


def test_a_few_are_told_at_once() -> None:
    time = Time()

    async def main() -> None:
        pace = Pace(time.clock, time.sleep)
        for _ in range(BURST):
            await pace.keep()

    asyncio.run(main())
    assert time.slept == []


@pytest.mark.parametrize("connections", [1, 3, 40])
def test_many_are_told_as_many_as_there_may_be(connections: int) -> None:
    time = Time()
    count = told(connections, 20.0, time)
    assert max(time.slept) <= LONGEST
    assert count <= BURST + 20 * A_SECOND + 2 * connections
    assert count > 10 * A_SECOND or connections == 1


def test_after_a_while_they_are_told_at_once_again() -> None:
    time = Time()
    told(3, 5.0, time)
    time.slept.clear()
    time.now += 60.0

    async def main() -> None:
        pace = Pace(time.clock, time.sleep)
        time.now += 10.0
        for _ in range(BURST):
            await pace.keep()

    asyncio.run(main())
    assert time.slept == []
