"""Limits on the bodies that clients send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request

from pearl.document import parse_json
from pearl.quota import Shares
from pearl.server.errors import ApiError

MOST_BODY = 2 << 20  # bytes of one request
MOST_BODIES = 32 << 20  # bytes of all that are being read
SHORT_BODY = 16 << 10  # bytes; shorter bodies are read however many long ones arrive
BODY_SECONDS = 30.0  # for a body to arrive


def client_of(request: Request) -> str:
    """The client's address: clients share one key, and nothing else in a request is proven."""
    return request.client.host if request.client is not None else ""


class Bodies:
    """Reads bodies, within bounds for each and for all together."""

    def __init__(self) -> None:
        self._held = Shares()

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[Any]:
        """The parsed body. Raises `ApiError`."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "send the body with the header Content-Type: application/json")
        body, client = bytearray(), client_of(request)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                await self._receive(body, request, client)
            yield _parsed(body)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
        finally:
            self._held.give_back(client, len(body))

    async def _receive(self, body: bytearray, request: Request, client: str) -> None:
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and len(announced) < 20 and int(announced) > MOST_BODY:
            raise _too_large()
        try:
            async for chunk in request.stream():
                if len(body) + len(chunk) > MOST_BODY:
                    raise _too_large()
                is_long = len(body) + len(chunk) > SHORT_BODY
                if is_long and not self._held.fits(client, len(chunk), MOST_BODIES):
                    raise ApiError(429, "too many requests are being read; try again later", retry_after=1)
                self._held.take(client, len(chunk))
                body += chunk
        except ClientDisconnect:
            raise ApiError(400, "the client closed the connection before its request was complete") from None


def _too_large() -> ApiError:
    return ApiError(413, f"the body may have at most {MOST_BODY:,} bytes", code="body_too_large")


def _parsed(body: bytearray) -> Any:
    try:
        return parse_json(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
