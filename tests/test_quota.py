"""Token buckets, shares and turns; test_keys has the listener that uses them, test_server_limits the HTTP server."""

from __future__ import annotations

import asyncio

import pytest

from pearl.quota import Bucket, FairSemaphore, Shares


def test_a_bucket_fills_up_and_pays_its_debt() -> None:
    bucket = Bucket(10, 2, now=0)
    assert bucket.take(12, now=0) == -2
    assert bucket.seconds_until(4, now=1) == 2
    assert bucket.level(now=1) == 0
    assert bucket.level(now=100) == 10
    assert bucket.take(50, now=100, least=-4) == -40
    assert bucket.level(now=102) == 0
    assert Bucket(10, 2, now=0, level=3).level(now=1) == 5


def test_a_share_is_that_of_the_clients_that_hold_any() -> None:
    shares = Shares()
    for amount in (4, 5):
        assert shares.fits("a", amount, 9)
        assert not shares.fits("a", amount + 10, 9)
        shares.take("a", amount)
    assert not shares.fits("a", 1, 9)
    for _ in range(4):
        assert shares.fits("b", 1, 9)
        shares.take("b", 1)
    assert not shares.fits("b", 1, 9), "half of nine is four"
    assert shares.fits("c", 3, 9)
    assert not shares.fits("c", 4, 9)
    assert shares.fits("c", 4, 9, share=4)
    shares.give_back("a", 9)
    assert shares.fits("b", 5, 9), "nobody else has any"
    with shares.held("a", 2):
        assert shares.total == 6
    shares.give_back("b", 4)
    assert shares.total == 0


async def order(*comers: str) -> str:
    """The order in which they get a place; `-x` is an x that leaves before its turn."""
    served: list[str] = []
    semaphore = FairSemaphore(1)

    async def come(client: str) -> None:
        await semaphore.acquire(client)
        served.append(client)

    await semaphore.acquire("first")
    assert semaphore.locked()
    tasks = []
    for comer in comers:
        tasks.append(asyncio.create_task(come(comer[-1])))
        await asyncio.sleep(0)
    for comer, task in zip(comers, tasks, strict=True):
        if comer.startswith("-"):
            task.cancel()
    for _ in comers:
        semaphore.release()
        await asyncio.sleep(0)
    await asyncio.wait(tasks)
    while semaphore.locked():
        semaphore.release()
    assert not semaphore._waiting
    return "".join(served)


@pytest.mark.parametrize(
    ("comers", "served"),
    [("a a a", "aaa"), ("a a a b c c", "abcaca"), ("a a -b c", "aca"), ("-a a b -b", "ab"), ("-a -a", "")],
)
def test_clients_take_turns(comers: str, served: str) -> None:
    assert asyncio.run(order(*comers.split())) == served


def test_a_client_that_leaves_as_its_turn_comes_passes_it_on() -> None:
    async def run() -> bool:
        semaphore = FairSemaphore(1)
        await semaphore.acquire("a")
        waiting = [asyncio.create_task(semaphore.acquire(client)) for client in "bc"]
        await asyncio.sleep(0)
        semaphore.release()
        waiting[0].cancel()  # before it has resumed
        await asyncio.wait(waiting)
        return waiting[0].cancelled() and not waiting[1].cancelled()

    assert asyncio.run(asyncio.wait_for(run(), 60))
