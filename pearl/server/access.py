"""Access control: the API key, the host and the origin are checked before the body is read."""

import hashlib
import hmac
import re
from dataclasses import dataclass

from starlette.requests import Request

from pearl.server.errors import ApiError

# Pages of other origins cannot embed the answers as a frame, an image or a script.
NOT_EMBEDDED = [
    ("cross-origin-resource-policy", "same-origin"),
    ("content-security-policy", "frame-ancestors 'none'"),
]


@dataclass(frozen=True)
class Access:
    """Decides which requests are answered.

    Attributes:
        key: the API key that paths under /v1 need; None if they need no key.
        hosts: the names, without a port, that the Host header may have; None allows any name. The
            check stops DNS rebinding: a web page that makes its own domain resolve to the user's
            loopback address.
        origins: origins of web pages that may use the server, besides the server's own page.
    """

    key: str | None = None
    hosts: frozenset[str] | None = None
    origins: frozenset[str] = frozenset()

    def check(self, request: Request) -> None:
        """Raise `ApiError` if the request must not be answered.

        The host is checked for every path, the origin and the key for paths under /v1 only.
        """
        self._check_host(request)
        # The path is not read from `request.url`, which a Host header with a slash would change.
        if request.scope["path"].startswith("/v1/"):
            self._check_origin(request)
            self._check_key(request)

    def _check_key(self, request: Request) -> None:
        """Raise 401 if the request lacks the API key."""
        if self.key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        expected_digest = hashlib.sha256(self.key.encode()).digest()  # digests have equal lengths
        digest = hashlib.sha256(key.strip().encode()).digest()
        if not hmac.compare_digest(expected_digest, digest) or scheme.lower() != "bearer":
            text = "send the API key with the header Authorization: Bearer KEY"
            raise ApiError(401, text, code="invalid_api_key")

    def _check_host(self, request: Request) -> None:
        """Raise 403 if the Host header is not in `hosts`."""
        host = re.sub(r":\d*$", "", request.headers.get("host", "")).lower()
        if self.hosts is not None and host not in self.hosts:
            names = ", ".join(sorted(self.hosts))
            raise ApiError(403, f"this server answers to {names} only, not to {host[:100]!r}")

    def _check_origin(self, request: Request) -> None:
        """Raise 403 for a request from a web page of another origin.

        The browser would hide the answer from the page, but the server would have computed it. The
        check reads headers that only browsers send, and that pages cannot change. If the browser
        sends Sec-Fetch-Site, this header decides. Otherwise, the page is the server's own if the
        Origin header names the same host as the Host header, which a proxy may have changed.
        """
        origin = request.headers.get("origin")
        if origin is None:
            is_own = True
        else:
            host = request.headers.get("host", "")
            is_own = origin.partition("://")[2].lower() == host.lower()
        site = request.headers.get("sec-fetch-site")
        if site is not None:
            is_own = site in ("same-origin", "none")
        if not is_own and origin not in self.origins:
            text = "web pages of other origins are not answered: name theirs with --cors"
            raise ApiError(403, text)
