"""Who may ask: keys, hosts and origins, checked before anything else of a request is looked at."""

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
    """Who may ask.

    Attributes:
        key: what every request to /v1 must bring; None: none is needed.
        hosts: what the Host header may name, without a port; None: anything. Web pages that a user visits can reach the
            user's own loopback under a name of theirs, but not under these.
    """

    key: str | None = None
    hosts: frozenset[str] | None = None


Refuse = Callable[[Request, Exception], Awaitable[Response]]


class Checked:
    """Middleware: what it does not let pass is refused as all else is, no faster either."""

    def __init__(self, app: ASGIApp, check: Callable[[Request], None], refuse: Refuse) -> None:
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
    """Raises `ApiError` where a browser asks for a page of another origin: it may not read the answer, and would cost.

    No page can change these headers; programs send none. A proxy may change the host, so the first decides.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    is_own = origin is None or origin.partition("://")[2].lower() == request.headers.get("host", "").lower()
    if not (is_own if site is None else site in ("same-origin", "none")):
        raise ApiError(403, "web pages of other origins are not answered: use this server's own, or a program")


def not_embedded(app: ASGIApp) -> ASGIApp:
    """No page of another origin gets what the app answers into a frame, an image or a script of its own."""

    async def headed(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("cross-origin-resource-policy", "same-origin")
                headers.setdefault("content-security-policy", "frame-ancestors 'none'")
            await send(message)

        await app(scope, receive, send_headed)

    return headed


class KeyNeeded(Checked):
    def __init__(self, app: ASGIApp, key: str, refuse: Refuse) -> None:
        super().__init__(app, self._check_key, refuse)
        self._digest = hashlib.sha256(key.encode()).digest()

    def _check_key(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(given.strip().encode()).digest()  # of one length, so that nothing tells the key's
        if not hmac.compare_digest(digest, self._digest) or scheme.lower() != "bearer":
            raise ApiError(401, "send the API key with the header Authorization: Bearer KEY", code="invalid_api_key")


class HostChecked(Checked):
    def __init__(self, app: ASGIApp, hosts: frozenset[str], refuse: Refuse) -> None:
        super().__init__(app, self._check_host, refuse)
        self._hosts = hosts

    def _check_host(self, request: Request) -> None:
        host = re.sub(r":\d*$", "", request.headers.get("host", "")).lower()
        if host not in self._hosts:
            raise ApiError(403, f"this server answers to {', '.join(sorted(self._hosts))} only, not to {host[:100]!r}")
