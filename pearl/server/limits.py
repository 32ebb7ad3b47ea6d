"""Limits on what clients may send: the rate of refusals, and the bodies of requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request

from pearl.document import parse_json
from pearl.quota import Bucket, FairSemaphore, Shares
from pearl.server.errors import ApiError

BURST = 50  # refusals without delay
A_SECOND = 50.0  # refusals after that
LONGEST = 5.0  # seconds of delay at most

MOST_BODY = 2 << 20  # bytes of one request
MOST_BODIES = 32 << 20  # bytes of all that are being read
SHORT_BODY = 16 << 10  # bytes; shorter bodies are read at once, however many long ones arrive
BODY_SECONDS = 30.0  # for a body to arrive
_RESTS, _LONGEST_REST = 4, 1.0  # pause between two long bodies: as a multiple of the parse time, and most seconds


class Refusals:
    """Delays refusals beyond a rate, so that a flood of bad requests does not slow down texts.

    A connection has one request at a time, so its client waits.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._bucket = Bucket(BURST, A_SECOND, clock())

    async def wait(self) -> bool:
        """Returns once one more refusal may be sent: whether it was delayed."""
        left = self._bucket.take(1, self._clock(), least=-LONGEST * A_SECOND)
        if left < 0:
            await self._sleep(min(LONGEST, -left / A_SECOND))
        return left < 0


def client_of(request: Request) -> str:
    """The client's address: clients share one key, and nothing else in a request is proven."""
    return request.client.host if request.client is not None else ""


class Bodies:
    """Reads bodies, within bounds for each and for all together."""

    def __init__(self) -> None:
        self._held = Shares()
        self.parsing = FairSemaphore(1)

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[Any]:
        """The parsed body. Raises `ApiError`."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "send the body with the header Content-Type: application/json")
        body, client = bytearray(), client_of(request)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                await self._receive(body, request, client)
            async with self._turn(len(body), client):
                yield _parsed(body)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
        finally:
            self._held.give_back(client, len(body))

    async def _receive(self, body: bytearray, request: Request, client: str) -> None:
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and len(announced) < 20 and int(announced) > MOST_BODY:
            raise _too_large()
        has_more = True
        while has_more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the client closed the connection before its request was complete")
            chunk, has_more = message.get("body", b""), message.get("more_body", False)
            if len(body) + len(chunk) > MOST_BODY:
                raise _too_large()
            is_long = len(body) + len(chunk) > SHORT_BODY
            if is_long and not self._held.fits(client, len(chunk), MOST_BODIES):
                raise ApiError(429, "too many requests are being read; try again later", retry_after=1)
            self._held.take(client, len(chunk))
            body += chunk

    @asynccontextmanager
    async def _turn(self, size: int, client: str) -> AsyncIterator[None]:
        """Parse long bodies one after the other, with pauses between them: parsing blocks the event loop."""
        if size <= SHORT_BODY:
            yield
            return
        await self.parsing.acquire(client)
        began = time.monotonic()
        try:
            yield
        finally:
            rest = min(_LONGEST_REST, _RESTS * (time.monotonic() - began))
            asyncio.get_running_loop().call_later(rest, self.parsing.release)


def _too_large() -> ApiError:
    return ApiError(413, f"the body may have at most {MOST_BODY:,} bytes", code="body_too_large")


def _parsed(body: bytearray) -> Any:
    try:
        return parse_json(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
