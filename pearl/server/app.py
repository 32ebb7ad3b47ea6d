"""The endpoints: check requests, queue their texts for the engine, and send the answers."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from difflib import get_close_matches
from functools import partial
from importlib.resources import files
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pearl.colours import style_sheet
from pearl.document import parse_json
from pearl.engine import Result
from pearl.engine.asynchronous import AsyncStream
from pearl.engine.request import Options
from pearl.errors import EngineClosed, PearlError
from pearl.server import openapi
from pearl.server.access import Access, Check, Checked
from pearl.server.errors import ApiError, no_model, of_engine
from pearl.server.http import DONE, Answer, event, usage
from pearl.server.request_log import DISCONNECTED, log_refused, log_request
from pearl.server.requests import Setup, TextRequest, check_fits, read_request
from pearl.server.responses import Responses
from pearl.server.service import Service
from pearl.server.timeline import Timeline
from pearl.text.stream import token_bytes
from pearl.version import __version__

MOST_BODY = 2 << 20  # bytes of one request
BODY_SECONDS = 30.0  # for a body to arrive
_LOOK_SECONDS = 1.0  # between two checks of an idle timeline whether the server ends


class App:
    """The ASGI application, `asgi`."""

    def __init__(self, service: Service, setup: Setup, access: Access) -> None:
        self._service, self._setup, self._model = service, setup, setup.model
        self._spell = partial(token_bytes, service.engine.tokenizer)
        self._responses = Responses(setup)
        self._timeline = Timeline(service.engine.client.recording)
        html = files("pearl.server").joinpath("page.html").read_text(encoding="utf-8")
        self._html = html.replace("/* colours */", style_sheet())
        self._created = int(time.time())
        self._described = openapi.document(setup.model, keyed=access.key is not None)
        self.asgi = self._routed(access)

    def _routed(self, access: Access) -> Starlette:
        def checked(*checks: Check) -> list[Middleware]:
            return [Middleware(Checked, check=check) for check in checks]

        versioned = [
            Route("/timeline", self._live),
            Route("/models", self._models),
            Route("/models/{name:path}", self._one_model),
            Route("/chat/completions", self._posted(partial(self._openai, True)), methods=["POST"]),
            Route("/completions", self._posted(partial(self._openai, False)), methods=["POST"]),
            Route("/responses", self._posted(self._responses.read), methods=["POST"]),
        ]
        own = checked(access.check_origin, access.check_key)
        # Outermost: it answers a browser's question whether a page may ask, which has no key.
        may: Any = {
            "allow_origins": [*access.origins],
            "allow_headers": ["*"],
            "allow_methods": ["GET", "POST"],
        }
        shared = [Middleware(CORSMiddleware, **may)] if access.origins else []
        routes = [
            Route("/", self._page),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/version", _json({"version": __version__})),
            Route("/openapi.json", _json(self._described)),
            Mount("/v1", routes=versioned, middleware=own),
        ]
        return Starlette(
            routes=[Mount("", routes=routes, middleware=checked(access.check_host))],
            middleware=shared,
            exception_handlers={
                ApiError: self._refuse,
                HTTPException: self._refuse,
                Exception: self._failed,
            },
        )

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(self._html, headers=_page_headers(self._html))

    async def _health(self, request: Request) -> Response:
        self._service.check()
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        return Response(self._service.figures.page(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _live(self, request: Request) -> Response:
        return _WhileConnected(self._send_timeline)

    async def _send_timeline(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What both workers do, as server-sent events, until the server ends."""
        stream = _EventStream(send)
        with self._timeline.viewed() as viewer, suppress(ApiError, EngineClosed):
            while True:
                self._service.check()
                with suppress(TimeoutError):
                    async with asyncio.timeout(
                        _LOOK_SECONDS
                    ):  # `wait_for` loses a cancellation where an event waits
                        seen = await viewer.get()
                    await stream.send(event(seen))
        await stream.send(DONE, more=False)

    @property
    def _card(self) -> dict[str, Any]:
        context = self._service.engine.context
        about = {
            "object": "model",
            "created": self._created,
            "owned_by": "pearl",
            "max_model_len": context,
        }
        return {"id": self._model, **about}

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._model:
            raise no_model(name, self._model)
        return JSONResponse(self._card)

    def _openai(self, is_chat: bool, body: Any) -> tuple[TextRequest, Answer]:
        asked = read_request(body, is_chat, self._setup)
        return asked, Answer(is_chat, self._model, self._spell, asked.body.stream_options)

    def _posted(
        self, read: Callable[[Any], tuple[TextRequest, Answer]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that answers with texts. `read`: the checked request of a body, and what writes its answer."""

        async def answer(request: Request) -> Response:
            arrived = time.monotonic()
            body = await read_body(request)
            # In a thread, for checking a schema may take long.
            asked, written = await asyncio.to_thread(read, body)
            return _WhileConnected(_Reply(self._service, asked, written, arrived))

        return answer

    async def _refuse(self, request: Request, error: Exception) -> Response:
        headers: dict[str, str] = {}
        if isinstance(error, HTTPException):  # no such path, or not this method
            headers = dict(error.headers or {})
            error = ApiError(
                error.status_code, self._what_is_there(request, error.status_code, headers)
            )
        assert isinstance(error, ApiError)
        self._service.figures.refused(error.status)
        log_refused(f"{request.method} {request.url.path}", error.status, error.message)
        return _ErrorResponse(error.body, error.status, error.headers | headers)

    def _what_is_there(self, request: Request, status: int, headers: Mapping[str, str]) -> str:
        """Why a request has no endpoint, and which one may be meant."""
        path = request.url.path[:200]
        if status == 405:
            methods = sorted(headers.get("Allow", "other methods").split(", "))
            return f"{request.method} {path}: this path takes {', '.join(methods)}"
        nearest = get_close_matches(path, self._described["paths"], n=1)
        meant = f"did you mean {nearest[0]}? " if nearest else ""
        return f"there is no {path} here: {meant}/openapi.json lists what there is"

    async def _failed(self, request: Request, error: Exception) -> Response:
        self._service.figures.refused(500)
        return _ErrorResponse(ApiError(500, "internal error; the server's log has more").body, 500)


def _json(document: Any) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def answer(request: Request) -> Response:
        return JSONResponse(document)

    return answer


def _page_headers(html: str) -> dict[str, str]:
    """They let a browser run only the page's own script, and reach only this server."""
    script = html.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
    return {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }


class _ErrorResponse(JSONResponse):
    """In ASCII, for it may quote half a surrogate pair that the client sent."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode("ascii")


async def read_body(request: Request) -> Any:
    """The parsed body. Raises `ApiError`."""
    if (
        request.headers.get("content-type", "").partition(";")[0].strip().lower()
        != "application/json"
    ):
        raise ApiError(415, "send the body with the header Content-Type: application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MOST_BODY:
                    raise ApiError(
                        413, f"the body may have at most {MOST_BODY:,} bytes", code="body_too_large"
                    )
        return parse_json(body.decode("utf-8"))
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise ApiError(
            400, "the client closed the connection before its request was complete"
        ) from None
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


class _WhileConnected(Response):
    """An answer that takes time; it is cancelled if the client disconnects."""

    def __init__(self, reply: ASGIApp) -> None:
        self._reply, self.background = reply, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def disconnected() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        working, leaving = map(
            asyncio.ensure_future, (self._reply(scope, receive, send), disconnected())
        )
        with suppress(
            asyncio.CancelledError
        ):  # the server ends, and this client has not read its answer
            try:
                await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    working.result()
            finally:
                leaving.cancel()
                working.cancel()
                await asyncio.wait({working})


class _Reply:
    """The texts of one request, as a stream or all at once."""

    def __init__(
        self, service: Service, asked: TextRequest, answer: Answer, arrived: float
    ) -> None:
        self._service, self._asked, self._arrived = service, asked, arrived
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        log_as = partial(
            log_request, f"{scope['method']} {scope['path']}", self._asked.body.model, self._arrived
        )
        try:
            prompts = [await self._encoded(prompt) for prompt in self._asked.prompts]
            self._answer.new_parts = partial(
                self._asked.parts, self._service.engine.tokenizer, prompts[0]
            )
            if self._asked.body.stream:
                log_as(*await self._send_stream(prompts, send))
                return
            results, counted = await self._generate(prompts, _read)
            whole = await asyncio.to_thread(self._answer.whole, results, counted)
            await Response(whole, media_type="application/json")(scope, receive, send)
            log_as(200, counted)
        except asyncio.CancelledError:
            log_as(DISCONNECTED)
            raise

    async def _encoded(self, prompt: Any) -> list[int]:
        with _errors_about(self._asked.prompt_field):
            tokens = await self._service.encode(prompt)
        check_fits(tokens, self._asked, self._service.engine.context)
        return tokens

    async def _generate(
        self, prompts: list[list[int]], write: Callable[[int, AsyncStream], Awaitable[None]]
    ) -> tuple[list[Result], dict[str, Any]]:
        """Pass each text to `write`, as many at a time as the engine has slots. Returns the usage, too."""
        room = asyncio.Semaphore(self._service.engine.config.slots)
        waits: dict[int, float] = {}  # index of a text -> seconds in the queue

        async def one(index: int, tokens: list[int], number: int) -> Result:
            async with room, self._text(tokens, number) as text:
                await write(index, text)
            waits[index] = text.watch.begun - text.watch.submitted
            return text.result

        texts = [(tokens, number) for tokens in prompts for number in range(self._asked.body.n)]
        tasks = [asyncio.create_task(one(index, *which)) for index, which in enumerate(texts)]
        try:
            results = await asyncio.gather(*tasks)
            return results, usage(results, self._asked.body.n, waits)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    @asynccontextmanager
    async def _text(self, tokens: list[int], number: int) -> AsyncIterator[AsyncStream]:
        with _errors_about(self._asked.prompt_field):
            params = self._asked.numbered(number, self._service.engine.context - len(tokens))
            options = Options()
            if self._asked.format is not None:
                options["show"] = self._asked.format.shown
            async with self._service.text(tokens, params, options, self._arrived) as text:
                yield text

    async def _send_stream(
        self, prompts: list[list[int]], send: Send
    ) -> tuple[int, dict[str, Any]]:
        """The headers go out with the first piece, so that an earlier error can have its own status code.

        Returns the status and the usage.
        """
        stream = _EventStream(send)
        try:
            _, counted = await self._generate(prompts, partial(self._send_text, stream))
        except ApiError as error:
            if not stream.has_begun:
                raise
            self._service.figures.refused(error.status)
            await stream.send(self._answer.error(error.body), more=False)
            return error.status, {}
        for chunk in self._answer.usage(counted):
            await stream.send(chunk)
        await stream.send(self._answer.done, more=False)
        return 200, counted

    async def _send_text(self, stream: _EventStream, index: int, text: AsyncStream) -> None:
        first = self._answer.first(index)
        async for piece in text:
            for chunk in (*first, *self._answer.piece(index, piece)):
                await stream.send(chunk)
            first = iter(())
        await stream.send(self._answer.last(index, text.result))


async def _read(index: int, text: AsyncStream) -> None:
    async for _ in text:
        pass


@contextmanager
def _errors_about(param: str) -> Iterator[None]:
    """Turns the engine's errors into errors for the client, about the field `param` unless they name another."""
    try:
        yield
    except PearlError as error:
        raise of_engine(error, param) from error


class _EventStream:
    """Server-sent events of several texts, one at a time; the headers go out with the first."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
        ]
        self._sending = asyncio.Lock()
        self.has_begun = False

    async def send(self, chunk: bytes, more: bool = True) -> None:
        async with self._sending:
            if not self.has_begun:
                self.has_begun = True
                await self._send(
                    {"type": "http.response.start", "status": 200, "headers": self._headers}
                )
            await self._send({"type": "http.response.body", "body": chunk, "more_body": more})
