"""Access control: keys, hosts and origins, checked before anything else of a request."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pearl.server.errors import ApiError


@dataclass(frozen=True)
class Access:
    """What the server asks of requests.

    Attributes:
        key: the API key of /v1; None: none is needed.
        hosts: names that the Host header may have, without a port; None: any. It keeps out web pages that reach the
            user's loopback under a name of their own (DNS rebinding).
    """

    key: str | None = None
    hosts: frozenset[str] | None = None


Check = Callable[[Request], None]
Refuse = Callable[[Request, Exception], Awaitable[Response]]


class Checked:
    """Middleware: what `check` raises is answered by `refuse`, at its limited rate."""

    def __init__(self, app: ASGIApp, check: Check, refuse: Refuse) -> None:
        self._app, self._check, self._refuse = app, check, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(Request(scope))
            except ApiError as error:
                refusal = await self._refuse(Request(scope), error)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def check_origin(request: Request) -> None:
    """Raises `ApiError` for a web page of another origin: it cannot read the answer, which would cost all the same.

    No page can change these headers; programs send none. A proxy may change the host, so Sec-Fetch-Site decides.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    is_own = origin is None or origin.partition("://")[2].lower() == request.headers.get("host", "").lower()
    if not (is_own if site is None else site in ("same-origin", "none")):
        raise ApiError(403, "web pages of other origins are not answered: use this server's own, or a program")


def not_embedded(app: ASGIApp) -> ASGIApp:
    """Pages of other origins cannot embed the answers as a frame, an image or a script."""

    async def headed(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("cross-origin-resource-policy", "same-origin")
                headers.setdefault("content-security-policy", "frame-ancestors 'none'")
            await send(message)

        await app(scope, receive, send_headed)

    return headed


def key_check(key: str) -> Check:
    """Raises `ApiError` without the API key."""
    digest = hashlib.sha256(key.encode()).digest()

    def check(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        got = hashlib.sha256(given.strip().encode()).digest()  # of one length, so that timing does not tell the key's
        if not hmac.compare_digest(got, digest) or scheme.lower() != "bearer":
            raise ApiError(401, "send the API key with the header Authorization: Bearer KEY", code="invalid_api_key")

    return check


def host_check(hosts: frozenset[str]) -> Check:
    """Raises `ApiError` for a Host header that names none of `hosts`."""

    def check(request: Request) -> None:
        host = re.sub(r":\d*$", "", request.headers.get("host", "")).lower()
        if host not in hosts:
            raise ApiError(403, f"this server answers to {', '.join(sorted(hosts))} only, not to {host[:100]!r}")

    return check
