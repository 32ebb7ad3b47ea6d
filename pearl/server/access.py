"""Access control: keys, hosts and origins, checked before anything else of a request."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from pearl.server.errors import ApiError

# Pages of other origins cannot embed the answers as a frame, an image or a script.
NOT_EMBEDDED = [
    ("cross-origin-resource-policy", "same-origin"),
    ("content-security-policy", "frame-ancestors 'none'"),
]
Check = Callable[[Request], None]  # raises `ApiError`


@dataclass(frozen=True)
class Access:
    """Which requests are answered.

    Attributes:
        key: the API key of /v1; None: none is needed.
        hosts: names that the Host header may have, without a port; None: any. They keep out web pages that reach the
            user's loopback under a name of their own (DNS rebinding).
        origins: of web pages that may ask, besides the server's own.
    """

    key: str | None = None
    hosts: frozenset[str] | None = None
    origins: frozenset[str] = frozenset()

    def check_key(self, request: Request) -> None:
        """Without the API key: 401."""
        if self.key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        digests = [
            hashlib.sha256(each.encode()).digest() for each in (self.key, given.strip())
        ]  # of equal length
        if not hmac.compare_digest(*digests) or scheme.lower() != "bearer":
            raise ApiError(
                401,
                "send the API key with the header Authorization: Bearer KEY",
                code="invalid_api_key",
            )

    def check_host(self, request: Request) -> None:
        """With another Host header than `hosts`: 403."""
        host = re.sub(r":\d*$", "", request.headers.get("host", "")).lower()
        if self.hosts is not None and host not in self.hosts:
            raise ApiError(
                403,
                f"this server answers to {', '.join(sorted(self.hosts))} only, not to {host[:100]!r}",
            )

    def check_origin(self, request: Request) -> None:
        """From a web page of another origin: 403. It could not read the answer, which would cost as much to compute.

        Pages cannot change these headers; programs send none. A proxy may change the host, so Sec-Fetch-Site takes
        precedence.
        """
        site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
        is_own = (
            origin is None
            or origin.partition("://")[2].lower() == request.headers.get("host", "").lower()
        )
        if origin not in self.origins and not (
            is_own if site is None else site in ("same-origin", "none")
        ):
            raise ApiError(
                403, "web pages of other origins are not answered: name theirs with --cors"
            )


class Checked:
    """Middleware of routes. Raises what `check` raises."""

    def __init__(self, app: ASGIApp, check: Check) -> None:
        self._app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._check(Request(scope))
        await self._app(scope, receive, send)
