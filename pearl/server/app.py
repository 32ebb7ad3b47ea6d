"""The endpoints: what comes is checked, its texts take their turns at the engine, and what they make is sent."""

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
from pearl.server.access import Access, Checked, HostChecked, KeyNeeded, check_origin, not_embedded
from pearl.server.answers import DONE, Answer, event, usage
from pearl.server.errors import ApiError, of_engine
from pearl.server.pace import Pace
from pearl.server.requests import Asked, check_fits, read_request
from pearl.server.shares import Shares
from pearl.server.timeline import MOST_VIEWERS, Event, Timeline
from pearl.server.turns import Turns
from pearl.text import token_bytes
from pearl.version import __version__

log = logging.getLogger(__name__)

MOST_BODY = 2 << 20  # bytes of one request
MOST_BODIES = 32 << 20  # bytes of all that are being read
SHORT_BODY = 16 << 10  # bytes; one so short is read however many longer ones come
_RESTS, _LONGEST_REST = 4, 1.0  # times as long as a longer one was looked into, and seconds, until the next is
BODY_SECONDS = 30.0  # within which a body must have come
_LOOK_SECONDS = 1.0  # after which a timeline that shows nothing looks whether the server ends
_STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class App:
    """What is behind the endpoints.

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
        refuse = self._refuse
        keyed = [Middleware(KeyNeeded, key=access.key, refuse=refuse)] if access.key is not None else []
        hosted = [Middleware(HostChecked, hosts=access.hosts, refuse=refuse)] if access.hosts is not None else []
        app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/version", self._version),
                Route("/openapi.json", self._openapi),
                Mount(
                    "/v1",
                    routes=[
                        Route("/timeline", self._live),
                        Route("/models", self._models),
                        Route("/models/{name:path}", self._one_model),
                        Route("/chat/completions", self._chat, methods=["POST"]),
                        Route("/completions", self._completions, methods=["POST"]),
                    ],
                    middleware=[Middleware(Checked, check=check_origin, refuse=refuse), *keyed],
                ),
            ],
            middleware=hosted,
            exception_handlers={ApiError: self._refuse, HTTPException: self._refuse, Exception: self._failed},
        )
        self.asgi = not_embedded(app)

    # ---- about the server ----

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(self._html, headers=_of_the_page(self._html))

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
            raise ApiError(429, f"{MOST_VIEWERS} look at the timeline already; try again later", retry_after=10)
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

    async def _chat(self, request: Request) -> Response:
        return await self._complete(request, chat=True)

    async def _completions(self, request: Request) -> Response:
        return await self._complete(request, chat=False)

    async def _complete(self, request: Request, chat: bool) -> Response:
        arrived = time.monotonic()
        async with self._bodies.read(request) as body:
            # A schema may take a while to be looked at, and the texts of others must not wait for it.
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


def _of_the_page(html: str) -> dict[str, str]:
    """Headers with which a browser runs the page's own script only, and reaches nothing but this server."""
    script = html.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
    return {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


def _client(request: Request) -> str:
    """Whose request it is: its address. All have one key, and what a request says of itself is not proven."""
    return request.client.host if request.client is not None else ""


class _ErrorResponse(JSONResponse):
    """It may quote what the client sent, half characters too: so in ASCII."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode("ascii")


class _Reply(Response):
    """The texts of one request, sent as a stream or all at once. A client that goes away cancels them."""

    def __init__(self, turns: Turns, asked: Asked, model: str, arrived: float, client: str) -> None:
        self._turns, self._asked, self._arrived, self._client = turns, asked, arrived, client
        self._waits: dict[int, float] = {}  # number of a text -> seconds until its turn
        spell = partial(token_bytes, turns.engine.tokenizer)
        self._answer = Answer(asked.chat, model, asked.include_usage, asked.provenance, spell)
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):  # the server ends, and this client has not taken what it was sent
            await while_connected(receive, self._reply(scope, receive, send))

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
        """Each text, by `write` with its index, as many at a time as there are slots: others wait anew for each."""
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
        """Headers go out with the first piece: what is wrong before that has a status code of its own."""
        body = _EventStream(send)
        try:
            results = await self._all(prompts, partial(self._send_text, body))
        except ApiError as error:
            if not body.begun:
                raise
            self._turns.figures.refused(error.status)
            await body.end(event(error.body))
            return
        for chunk in self._answer.usage(usage(results, self._asked.n, self._waits)):
            await body.send(chunk)
        await body.end(DONE)

    async def _send_text(self, body: _EventStream, index: int, text: AsyncStream) -> None:
        opened = False
        async for piece in text:
            if not opened:
                opened = True
                for chunk in self._answer.first(index):
                    await body.send(chunk)
            for chunk in self._answer.piece(index, piece):
                await body.send(chunk)
        await body.send(self._answer.last(index, text.result))


class _Live(Response):
    """What both workers do, as server-sent events, until the client goes away or the server ends."""

    def __init__(self, turns: Turns, timeline: Timeline, client: str) -> None:
        self._turns, self._timeline, self._client = turns, timeline, client
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):  # as of a text
            await while_connected(receive, self._show(send))

    async def _show(self, send: Send) -> None:
        body = _EventStream(send)
        async with self._timeline.viewed(self._client) as viewer:
            with suppress(ApiError):
                while True:
                    self._turns.check()
                    events: list[Event] = []
                    with suppress(TimeoutError):
                        events = await asyncio.wait_for(viewer.events(), _LOOK_SECONDS)
                    for told in events:
                        await body.send(event(told))
        await body.end(DONE)


class _EventStream:
    """Server-sent events, as they come, of several texts one at a time."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sending = asyncio.Lock()
        self.begun = False

    async def send(self, chunk: bytes) -> None:
        async with self._sending:
            await self._start()
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self, chunk: bytes) -> None:
        async with self._sending:
            await self._start()
            await self._send({"type": "http.response.body", "body": chunk, "more_body": False})

    async def _start(self) -> None:
        if not self.begun:
            self.begun = True
            headers = [(name.encode(), value.encode()) for name, value in _STREAM_HEADERS.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})


async def while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Does `work`, whose request has been read to its end; cancels it when the client goes away."""
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
    """Reads bodies, of which each is bounded, and so are all together."""

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
            raise ApiError(408, f"the body did not come within {BODY_SECONDS:g} s") from None
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
                raise ApiError(400, "the client went away before its request had come")
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
        """For a body of `size` bytes to be looked into: one long one after the other, with pauses, that only the next
        one waits for.
        """
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
    return ApiError(413, f"the body may have {MOST_BODY:,} bytes", code="body_too_large")


def _parsed(body: bytearray) -> Any:
    try:
        return parse_json(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON that this server reads: {error}") from None
