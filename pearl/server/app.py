"""The endpoints: requests are checked, their texts queue for the engine, and the answers are sent."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.resources import files
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Message, Receive, Scope, Send

from pearl.config import SamplingParams
from pearl.document import parse_json
from pearl.engine.asynchronous import AsyncStream
from pearl.engine.stream import Result
from pearl.engine.turnstile import Turnstile
from pearl.errors import PearlError
from pearl.server import openapi
from pearl.server.access import Access, Check, Checked, check_origin, host_check, key_check, not_embedded
from pearl.server.answers import DONE, Answer, event, usage
from pearl.server.errors import ApiError, of_engine
from pearl.server.pace import Pace
from pearl.server.requests import Asked, check_fits, read_request
from pearl.server.shares import Shares
from pearl.server.timeline import MOST_VIEWERS, Event, Timeline
from pearl.server.turns import Turns
from pearl.text.stream import token_bytes
from pearl.version import __version__

log = logging.getLogger(__name__)

MOST_BODY = 2 << 20  # bytes of one request
MOST_BODIES = 32 << 20  # bytes of all that are being read
SHORT_BODY = 16 << 10  # bytes; shorter ones are read at once, however many long ones come
_RESTS, _LONGEST_REST = 4, 1.0  # pause between two long bodies: as a multiple of the parse time, and most seconds
BODY_SECONDS = 30.0  # for a body to arrive
_LOOK_SECONDS = 1.0  # after which an idle timeline checks whether the server ends
_STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class App:
    """The ASGI application, `asgi`.

    Args:
        sampling: for what requests do not set.
        model: the name under which clients ask for the model.
    """

    def __init__(self, turns: Turns, sampling: SamplingParams, model: str, access: Access) -> None:
        self._turns, self._sampling, self._model = turns, sampling, model
        self._bodies, self._pace = _Bodies(), Pace()
        self._timeline = Timeline(turns.engine.directory)
        self._html = files("pearl.server").joinpath("page.html").read_text(encoding="utf-8")
        self._created = int(time.time())
        self._described = openapi.document(model, keyed=access.key is not None)
        self.asgi = not_embedded(self._routed(access))

    def _routed(self, access: Access) -> Starlette:
        def checked(*checks: Check) -> list[Middleware]:
            return [Middleware(Checked, check=check, refuse=self._refuse) for check in checks]

        versioned = [
            Route("/timeline", self._live),
            Route("/models", self._models),
            Route("/models/{name:path}", self._one_model),
            Route("/chat/completions", partial(self._complete, chat=True), methods=["POST"]),
            Route("/completions", partial(self._complete, chat=False), methods=["POST"]),
        ]
        keyed = [key_check(access.key)] if access.key is not None else []
        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/version", self._version),
                Route("/openapi.json", self._openapi),
                Mount("/v1", routes=versioned, middleware=checked(check_origin, *keyed)),
            ],
            middleware=checked(host_check(access.hosts)) if access.hosts is not None else [],
            exception_handlers={ApiError: self._refuse, HTTPException: self._refuse, Exception: self._failed},
        )

    # ---- about the server ----

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(self._html, headers=_page_headers(self._html))

    async def _health(self, request: Request) -> Response:
        self._turns.check()
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        return Response(await self._turns.figures.page(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(self._described)

    async def _live(self, request: Request) -> Response:
        if not self._timeline.fits(client := _client(request)):
            raise ApiError(429, f"the timeline has {MOST_VIEWERS} viewers already; try again later", retry_after=10)
        return _Live(self._turns, self._timeline, client)

    @property
    def _card(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "pearl",
            "max_model_len": self._turns.engine.context,
        }

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._model:
            raise ApiError(404, f"there is no model {name[:100]!r} here", param="model", code="model_not_found")
        return JSONResponse(self._card)

    # ---- texts ----

    async def _complete(self, request: Request, chat: bool) -> Response:
        arrived = time.monotonic()
        async with self._bodies.read(request) as body:
            # In a thread, for checking a schema may take long.
            asked = await asyncio.to_thread(read_request, body, chat, self._model, self._sampling)
        return _Reply(self._turns, asked, self._model, arrived, _client(request))

    # ---- errors ----

    async def _refuse(self, request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):  # no such path, or not this method
            headers = dict(error.headers or {})
            error = ApiError(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}")
        else:
            headers = {}
        assert isinstance(error, ApiError)
        self._turns.figures.refused(error.status)
        await self._pace.keep()
        return _ErrorResponse(error.body, error.status, error.headers | headers)

    async def _failed(self, request: Request, error: Exception) -> Response:
        self._turns.figures.refused(500)
        return _ErrorResponse(ApiError(500, "internal error; the server's log has more").body, 500)


def _page_headers(html: str) -> dict[str, str]:
    """They let a browser run the page's own script only, and reach this server only."""
    script = html.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
    return {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


def _client(request: Request) -> str:
    """The client's address: all have the same key, and nothing else that a request says is proven."""
    return request.client.host if request.client is not None else ""


class _ErrorResponse(JSONResponse):
    """In ASCII, for it may quote half a surrogate pair that the client sent."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode("ascii")


class _WhileConnected(Response):
    """An answer that takes time; a client that goes away cancels it."""

    background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):  # the server ends, and this client has not taken what it was sent
            await while_connected(receive, self._reply(scope, receive, send))

    async def _reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class _Reply(_WhileConnected):
    """The texts of one request, as a stream or all at once."""

    def __init__(self, turns: Turns, asked: Asked, model: str, arrived: float, client: str) -> None:
        self._turns, self._asked, self._arrived, self._client = turns, asked, arrived, client
        self._waits: dict[int, float] = {}  # number of a text -> seconds in the queue
        spell = partial(token_bytes, turns.engine.tokenizer)
        self._answer = Answer(asked.chat, model, asked.include_usage, asked.provenance, spell)

    async def _reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._turns.admitted(self._client):
            prompts = [await self._encoded(prompt) for prompt in self._asked.prompts]
            if self._asked.stream:
                await self._send_stream(prompts, send)
                return
            results = await self._all(prompts, self._read_text)
            said = usage(results, self._asked.n, self._waits)
            whole = await asyncio.to_thread(self._answer.whole, results, said)
            await Response(whole, media_type="application/json")(scope, receive, send)

    async def _encoded(self, prompt: Any) -> list[int]:
        try:
            tokens = await self._turns.encode(prompt)
        except PearlError as error:
            raise of_engine(error, self._asked.prompt_field) from error
        check_fits(tokens, self._asked, self._turns.engine.context)
        return tokens

    async def _all(
        self, prompts: Sequence[list[int]], write: Callable[[int, AsyncStream], Awaitable[None]]
    ) -> list[Result]:
        """Pass each text to `write`, as many at a time as the engine has slots; each waits for its own turn."""
        room = asyncio.Semaphore(self._turns.engine.config.slots)

        async def one(index: int, tokens: list[int], number: int) -> Result:
            async with room, self._text(tokens, number) as text:
                await write(index, text)
            self._waits[index] = text.waited
            return text.result

        each = [(tokens, number) for tokens in prompts for number in range(self._asked.n)]
        tasks = [asyncio.create_task(one(index, *which)) for index, which in enumerate(each)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _read_text(self, index: int, text: AsyncStream) -> None:
        async for _ in text:
            pass

    @asynccontextmanager
    async def _text(self, tokens: list[int], number: int) -> AsyncIterator[AsyncStream]:
        try:
            params = self._asked.numbered(number, self._turns.engine.context - len(tokens))
            async with self._turns.text(tokens, params, self._arrived, self._client) as text:
                yield text
        except PearlError as error:
            raise of_engine(error, self._asked.prompt_field) from error

    async def _send_stream(self, prompts: Sequence[list[int]], send: Send) -> None:
        """The headers go out with the first piece, so that an earlier error can have its own status code."""
        body = _EventStream(send)
        try:
            results = await self._all(prompts, partial(self._send_text, body))
        except ApiError as error:
            if not body.begun:
                raise
            self._turns.figures.refused(error.status)
            await body.send(event(error.body), more=False)
            return
        for chunk in self._answer.usage(usage(results, self._asked.n, self._waits)):
            await body.send(chunk)
        await body.send(DONE, more=False)

    async def _send_text(self, body: _EventStream, index: int, text: AsyncStream) -> None:
        opened = False
        async for piece in text:
            for chunk in (*(() if opened else self._answer.first(index)), *self._answer.piece(index, piece)):
                await body.send(chunk)
            opened = True
        await body.send(self._answer.last(index, text.result))


class _Live(_WhileConnected):
    """What both workers do, as server-sent events, until the server ends."""

    def __init__(self, turns: Turns, timeline: Timeline, client: str) -> None:
        self._turns, self._timeline, self._client = turns, timeline, client

    async def _reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _EventStream(send)
        async with self._timeline.viewed(self._client) as viewer:
            with suppress(ApiError):
                while True:
                    self._turns.check()
                    events: list[Event] = []
                    with suppress(TimeoutError):
                        events = await asyncio.wait_for(viewer.events(), _LOOK_SECONDS)
                    for each in events:
                        await body.send(event(each))
        await body.send(DONE, more=False)


class _EventStream:
    """Server-sent events of several texts, one at a time; the headers go out with the first."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sending = asyncio.Lock()
        self.begun = False

    async def send(self, chunk: bytes, more: bool = True) -> None:
        async with self._sending:
            if not self.begun:
                self.begun = True
                headers = [(name.encode(), value.encode()) for name, value in _STREAM_HEADERS.items()]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": chunk, "more_body": more})


async def while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Does `work` for a request that has been read; cancels it when the client goes away."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.wait({working})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Bodies:
    """Reads bodies within the bounds for each and for all together."""

    def __init__(self) -> None:
        self._held = Shares()
        self._looking = Turnstile(1)

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[Any]:
        """The parsed body. Raises `ApiError`."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "send the body with the header Content-Type: application/json")
        body, client = bytearray(), _client(request)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                await self._fill(body, request)
            async with self._turn(len(body), client):
                yield _parsed(body)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
        finally:
            self._held.give_back(client, len(body))

    async def _fill(self, body: bytearray, request: Request) -> None:
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and len(announced) < 20 and int(announced) > MOST_BODY:
            raise _too_large()
        client, more = _client(request), True
        while more:
            message: Message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the client closed the connection before its request was complete")
            chunk, more = message.get("body", b""), message.get("more_body", False)
            if len(body) + len(chunk) > MOST_BODY:
                raise _too_large()
            is_long = len(body) + len(chunk) > SHORT_BODY
            if is_long and not self._held.fits(client, len(chunk), MOST_BODIES):
                raise ApiError(429, "too many requests are being read; try again later", retry_after=1)
            self._held.take(client, len(chunk))
            body += chunk

    @asynccontextmanager
    async def _turn(self, size: int, client: str) -> AsyncIterator[None]:
        """While a body of `size` bytes is parsed: long ones one after the other, with pauses between them."""
        if size <= SHORT_BODY:
            yield
            return
        await self._looking.acquire(client)
        began = time.monotonic()
        try:
            yield
        finally:
            rest = min(_LONGEST_REST, _RESTS * (time.monotonic() - began))
            asyncio.get_running_loop().call_later(rest, self._looking.release)


def _too_large() -> ApiError:
    return ApiError(413, f"the body may have at most {MOST_BODY:,} bytes", code="body_too_large")


def _parsed(body: bytearray) -> Any:
    try:
        return parse_json(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
