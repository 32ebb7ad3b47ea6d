"""The server's address and lifetime.

The address is bound before a model is loaded. The server runs until a signal ends it or the engine
is lost.
"""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from pearl.config import RequestOptions
from pearl.engine import Engine
from pearl.errors import ConfigError, TargetLost
from pearl.server.access import NOT_EMBEDDED, Access
from pearl.server.app import App
from pearl.server.request_log import show_requests
from pearl.server.requests import Setup
from pearl.server.service import Service
from pearl.text.reasoning import warn_of_unknown_tags
from pearl.text.tools import format_of
from pearl.transport.address import raise_limit

LOST_SECONDS = 5.0  # how long requests are answered with 503 after the engine is lost
STOP_SECONDS = 2.0  # how long running requests may go on after the signal
_CUT_SECONDS = 5  # how long open connections may last after the signal
_IDLE_SECONDS = 15  # how long a connection may idle before its first request and between two
_LOOK_SECONDS = 0.2
_HEADER = 32 << 10  # maximum bytes of a request line and its headers
_CONNECTIONS = 512  # maximum number of open connections; beyond it, every request gets 503
_BACKLOG = 128  # connections waiting to be accepted; asyncio accepts all of them in a row


@dataclass(frozen=True)
class Door:
    """A bound address, and the settings of the server that will answer there.

    Attributes:
        bound: a socket that does not listen yet, so connections are refused until the models are
            loaded.
        host: the host, as a URL has it.
        access: decides which requests are answered.
        model: the name under which clients request the model; None for the name under which it was
            loaded.
        tool_parser: the format in which the model writes tool calls, a name in `pearl.text.tools`.
        reasoning_tags: the tags around the model's reasoning, as `pearl.text.reasoning.check_tags`
            takes them.
        logs_requests: whether each request is logged.
    """

    bound: socket.socket
    host: str
    access: Access
    model: str | None = None
    tool_parser: str = "auto"
    reasoning_tags: str = "auto"
    logs_requests: bool = True

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.bound.getsockname()[1]}"

    def model_name(self, engine: Engine) -> str:
        """Return the model's name for clients."""
        return self.model or name_of(engine.config.target)

    def close(self) -> None:
        self.bound.close()

    def serve(self, engine: Engine, options: RequestOptions) -> None:
        """Serve until SIGINT or SIGTERM.

        Raises `ConfigError` if the address is in use. If the engine is lost, the server answers
        with 503 for `LOST_SECONDS`; then this method raises `TargetLost`.

        Args:
            options: the default options of requests.
        """
        raise_limit()
        try:
            self.bound.listen()
        except OSError as error:  # another process listens there now
            raise ConfigError(f"{self.url}: cannot listen there: {error.strerror}") from None
        asyncio.run(self._serve(engine, options))

    async def _serve(self, engine: Engine, options: RequestOptions) -> None:
        model = self.model_name(engine)
        service = Service(engine, model)
        show_requests(self.logs_requests)
        tools = format_of(engine.tokenizer, self.tool_parser)
        engine.tokenizer.reasoning_tags = self.reasoning_tags
        warn_of_unknown_tags(engine.tokenizer)
        setup = Setup(model, options, tools, engine.config, engine.tokenizer)
        app = App(service, setup, self.access)
        server = Server(app, service)
        watching = asyncio.create_task(_end_when_lost(service, server))
        try:
            await server.serve([self.bound])
        finally:
            watching.cancel()
            service.close()
        if service.lost:
            raise TargetLost(service.lost)


class HttpConnection(H11Protocol):
    """uvicorn's connection. This class adds two cases in which the connection is closed.

    In the first case, no first request comes in time. In the second case, malformed bytes come
    while the server answers.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # no error can be sent
            self.transport.abort()


class Server(uvicorn.Server):
    """uvicorn's server. At shutdown it also fails the texts that do not end within `STOP_SECONDS`."""

    def __init__(self, app: App, service: Service) -> None:
        super().__init__(
            uvicorn.Config(
                app.asgi,
                http=HttpConnection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",  # its warnings are about malformed requests
                access_log=False,
                backlog=_BACKLOG,
                proxy_headers=False,
                server_header=False,
                headers=NOT_EMBEDDED,
                timeout_keep_alive=_IDLE_SECONDS,
                timeout_graceful_shutdown=_CUT_SECONDS,
                limit_concurrency=_CONNECTIONS,
                h11_max_incomplete_event_size=_HEADER,
            )
        )
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(STOP_SECONDS, self._service.close)
        await super().shutdown(sockets)


async def _end_when_lost(service: Service, server: uvicorn.Server) -> None:
    while not service.lost:
        await asyncio.sleep(_LOOK_SECONDS)
    await asyncio.sleep(LOST_SECONDS)
    server.should_exit = True


def name_of(target: str) -> str:
    """Return the model's name for clients.

    If `target` is the path of a file or directory, the name is its last part; otherwise it is
    `target`.
    """
    path = Path(target)
    return path.name if path.exists() else target


def bind(address: str, key: str | None = None, origins: Sequence[str] = (), **options: Any) -> Door:
    """Bind HOST:PORT; port 0 stands for any free port.

    Raises `ConfigError` if the address cannot be bound, or if other machines can reach the address
    and there is no key.

    Args:
        key: the API key; None if requests need no key. Without a key, the Host header of a request
            must be one of the server's own names.
        origins: see `Access`.
        options: further fields of `Door`.
    """
    host, port = _split(address)
    if key is not None and not re.fullmatch(r"[!-~]+", key):
        raise ConfigError("the API key must be printable ASCII without spaces, and not empty")
    for origin in origins:
        if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#]+", origin):
            raise ConfigError(
                f"--cors {origin}: give an origin, such as https://example.com or http://localhost:3000"
            )
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--http {address}: the host is not known ({error})") from None
    # IPv4 first.
    family, kind, protocol, _, place = min(
        addresses, key=lambda address: address[0] != socket.AF_INET
    )
    ip_address = ipaddress.ip_address(str(place[0]).partition("%")[0])
    if key is None and not ip_address.is_loopback:
        raise ConfigError(
            f"--http {address}: other machines can reach this address, so it takes an API key: set $PEARL_API_KEY or "
            "give --api-key KEY, or listen on 127.0.0.1"
        )
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place)
    except OSError as error:
        bound.close()
        raise ConfigError(f"--http {address}: cannot listen there: {error.strerror}") from None
    if ":" in host:
        host = f"[{host}]"
    hosts = None
    if key is None:
        hosts = frozenset({"localhost", "127.0.0.1", "[::1]", host.lower()})
    return Door(bound, host, Access(key, hosts, frozenset(origins)), **options)


def _split(address: str) -> tuple[str, int]:
    matched = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^\s:/\[\]]+)):(\d{1,5})", address)
    if matched is None or int(matched[3]) > 65535:
        raise ConfigError(f"--http {address}: give HOST:PORT, such as 127.0.0.1:8000 or [::1]:8000")
    host = matched[1] or matched[2]
    return host, int(matched[3])
