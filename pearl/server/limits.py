"""The bodies of requests, within limits; and who sends them."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request

from pearl.document import parse_json
from pearl.server.errors import ApiError

MOST_BODY = 2 << 20  # bytes of one request
BODY_SECONDS = 30.0  # for a body to arrive


def client_of(request: Request) -> str:
    """The client's address: clients share one key, and nothing else in a request is proven."""
    return request.client.host if request.client is not None else ""


async def read_body(request: Request) -> Any:
    """The parsed body. Raises `ApiError`."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "send the body with the header Content-Type: application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MOST_BODY:
                    raise ApiError(413, f"the body may have at most {MOST_BODY:,} bytes", code="body_too_large")
        return parse_json(body.decode("utf-8"))
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the client closed the connection before its request was complete") from None
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
