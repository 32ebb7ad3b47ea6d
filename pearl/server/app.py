"""The endpoints, which check requests, queue texts for the engine, and send the answers."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.resources import files
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from pearl.colours import style_sheet
from pearl.engine.request import Options, prompt_for
from pearl.errors import EngineClosed, PearlError
from pearl.server import openapi
from pearl.server.access import Access
from pearl.server.errors import ApiError, no_model, of_engine
from pearl.server.http import (
    DONE,
    ChatWriter,
    CompletionWriter,
    ReplyText,
    ReplyWriter,
    event,
    read_body,
    usage,
)
from pearl.server.openapi import HttpEndpoint
from pearl.server.request_log import DISCONNECTED, log_refused, log_request
from pearl.server.requests import Setup, TextBody, TextRequest, check_fits, read_request
from pearl.server.responses import Responses, ResponsesRequest
from pearl.server.schemas import ChatCompletionRequest, CompletionRequest
from pearl.server.service import Service
from pearl.server.timeline import Timeline
from pearl.text.stream import token_bytes
from pearl.version import __version__

SILENT_SECONDS = 15.0  # after which a comment shows a stream's client that the server is alive
_LOOK_SECONDS = 1.0  # between two checks whether the server ends, while a timeline is idle


class App:
    """The server's endpoints; `asgi` is the ASGI application that serves them."""

    def __init__(self, service: Service, setup: Setup, access: Access) -> None:
        self._service = service
        self._engine = service.engine
        self.setup = setup
        self._spell = partial(token_bytes, self._engine.tokenizer)
        self.responses = Responses(setup)
        self._timeline = Timeline(self._engine.client.recording)
        html = files("pearl.server").joinpath("page.html").read_text(encoding="utf-8")
        self._html = html.replace("/* colours */", style_sheet())
        self._created = int(time.time())
        endpoints = self._endpoints()
        self._document = openapi.document(endpoints, setup.model, keyed=access.key is not None)
        self.asgi = self._routed(endpoints, access)

    def _endpoints(self) -> list[HttpEndpoint]:
        """Return all endpoints. To add one, write a module with its schema and its answer, and add a row here."""
        chat = self._posted(partial(self._read, ChatCompletionRequest, ChatWriter))
        completions = self._posted(partial(self._read, CompletionRequest, CompletionWriter))
        responses = self._posted(self.responses.read)
        texts = "The texts, at once or as server-sent events."
        return [
            HttpEndpoint("/v1/timeline", self._live),
            HttpEndpoint("/v1/models", self._models, "The model that is served."),
            HttpEndpoint("/v1/models/{name:path}", self._named_model, "A model."),
            HttpEndpoint("/v1/chat/completions", chat, texts, ChatCompletionRequest),
            HttpEndpoint("/v1/completions", completions, texts, CompletionRequest),
            HttpEndpoint("/v1/responses", responses, texts, ResponsesRequest),
            HttpEndpoint("/", self._page),
            HttpEndpoint("/health", self._health, "The engine runs."),
            HttpEndpoint("/metrics", self._metrics),
            HttpEndpoint("/version", self._version, "The server's version."),
            HttpEndpoint("/openapi.json", self._openapi),
        ]

    def _routed(self, endpoints: list[HttpEndpoint], access: Access) -> Starlette:
        routes = []
        for endpoint in endpoints:
            methods = ["GET"] if endpoint.body is None else ["POST"]
            routes.append(Route(endpoint.path, endpoint.answer, methods=methods))
        router = Router(routes)

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            access.check(Request(scope))
            await router(scope, receive, send)

        # Outermost, because it answers the preflight requests of browsers, which have no key.
        outermost = []
        if access.origins:
            cors = Middleware(
                CORSMiddleware,
                allow_origins=[*access.origins],
                allow_headers=["*"],
                allow_methods=["GET", "POST"],
            )
            outermost.append(cors)
        return Starlette(
            routes=[Mount("", guarded)],  # within the handlers of exceptions
            middleware=outermost,
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
        return Response(self._service.metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(self._document)

    async def _live(self, request: Request) -> Response:
        return _WhileConnected(self._send_timeline)

    async def _send_timeline(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what both workers do, as server-sent events, until the engine or the server ends."""
        stream = _EventStream(send)
        with self._timeline.viewed() as viewer, suppress(ApiError, EngineClosed):
            while True:
                self._service.check()
                # Not `wait_for`, which loses a cancellation if an event is ready.
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        span = await viewer.get()
                    await stream.send(event(span))
        await stream.send(DONE, more=False)

    @property
    def _card(self) -> dict[str, Any]:
        return {
            "id": self.setup.model,
            "object": "model",
            "created": self._created,
            "owned_by": "pearl",
            "max_model_len": self._engine.context,
        }

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def _named_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.setup.model:
            raise no_model(name, self.setup.model)
        return JSONResponse(self._card)

    def _read(
        self, schema: type[TextBody], writer: type[CompletionWriter], body: Any
    ) -> tuple[TextRequest, ReplyWriter]:
        request = read_request(body, schema, self.setup)
        return request, writer(request.body, self._spell)

    def _posted(
        self, read: Callable[[Any], tuple[TextRequest, ReplyWriter]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Make the function that answers a POST request with generated texts.

        Args:
            read: checks a parsed body; returns the request and the writer of its reply.
        """

        async def answer(request: Request) -> Response:
            arrived = time.monotonic()
            body = await read_body(request)
            # In a thread, because checking a schema may take long.
            text_request, writer = await asyncio.to_thread(read, body)
            return _WhileConnected(_Reply(self._service, text_request, writer, arrived))

        return answer

    async def _refuse(self, request: Request, error: Exception) -> Response:
        headers = {}
        if isinstance(error, HTTPException):  # the path is unknown, or does not take this method
            headers = dict(error.headers or {})
            hint = self._what_is_there(request, error.status_code, headers)
            error = ApiError(error.status_code, hint)
        assert isinstance(error, ApiError)
        self._service.metrics.refused(error.status)
        log_refused(f"{request.method} {request.url.path}", error.status, error.message)
        # In ASCII, because the message may quote half a surrogate pair that the client sent.
        body = json.dumps(error.body)
        headers |= error.headers
        return Response(body, error.status, headers, media_type="application/json")

    def _what_is_there(self, request: Request, status: int, headers: Mapping[str, str]) -> str:
        """Return why no endpoint takes a request, and which endpoint the client may mean."""
        path = request.url.path[:200]
        if status == 405:
            methods = sorted(headers.get("Allow", "other methods").split(", "))
            return f"{request.method} {path}: this path takes {', '.join(methods)}"
        nearest = get_close_matches(path, self._document["paths"], n=1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        return f"there is no {path} here: {hint}/openapi.json lists what there is"

    async def _failed(self, request: Request, error: Exception) -> Response:
        return await self._refuse(
            request, ApiError(500, "internal error; the server's log has more")
        )


def _page_headers(html: str) -> dict[str, str]:
    """Return headers that allow a browser to run only the page's own script, and to connect only to this server."""
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


class _WhileConnected(Response):
    """A response that takes time to compute, and is cancelled if the client disconnects."""

    def __init__(self, reply: ASGIApp) -> None:
        self._reply = reply
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def disconnected() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        working = asyncio.ensure_future(self._reply(scope, receive, send))
        leaving = asyncio.ensure_future(disconnected())
        # This task is cancelled if the server ends before the client has read the answer.
        with suppress(asyncio.CancelledError):
            try:
                await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    working.result()
            finally:
                leaving.cancel()
                working.cancel()
                await asyncio.wait({working})


@dataclass
class _Reply:
    """Answers a request with the texts generated for it, as a stream or all at once.

    `arrived`: when the request arrived, a time.monotonic().
    """

    service: Service
    request: TextRequest
    writer: ReplyWriter
    arrived: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = f"{scope['method']} {scope['path']}"
        log_as = partial(log_request, endpoint, self.request.body.model, self.arrived)
        try:
            prompts = [await self._encoded(prompt) for prompt in self.request.prompts]
            if self.request.body.stream:
                status, counts = await self._send_stream(prompts, send)
                log_as(status, counts)
                return
            texts = await self._generate(prompts)
            counts = usage(texts, self.request.body.n)
            answer = await asyncio.to_thread(self.writer.whole, texts, counts)
            await Response(answer, media_type="application/json")(scope, receive, send)
            log_as(200, counts)
        except asyncio.CancelledError:
            log_as(DISCONNECTED)
            raise

    async def _encoded(self, prompt: Any) -> list[int]:
        with _errors_about(self.request.prompt_field):
            encoded = await self.service.encode(prompt)
            tokenizer = self.service.engine.tokenizer
            tokens = prompt_for(tokenizer, encoded, self.request.params, self.request.prefix)
        check_fits(tokens, self.request, self.service.engine.context)
        return tokens

    async def _generate(
        self, prompts: list[list[int]], events: _EventStream | None = None
    ) -> list[ReplyText]:
        """Generate all texts, as many at a time as the engine has slots; send each piece to `events`, if given."""
        slots = asyncio.Semaphore(self.service.engine.config.slots)
        texts: list[ReplyText] = []
        tasks = []

        async def write(text: ReplyText, tokens: list[int], sample: int) -> None:
            params = self.request.numbered(sample, self.service.engine.context - len(tokens))
            options = Options(prefix=self.request.prefix)
            options["show"] = self.request.shown(self.service.engine.tokenizer, tokens)
            async with slots, self.service.text(tokens, params, options, self.arrived) as stream:
                async for piece in stream:
                    delta = text.feed(piece)
                    if events is not None:
                        await events.send(self.writer.piece(text, piece, delta))
            text.result = stream.result
            text.wait_seconds = stream.watch.begun - stream.watch.submitted
            delta = text.finish()
            if events is not None:
                await events.send(self.writer.last(text, delta))

        for tokens in prompts:
            for sample in range(self.request.body.n):
                text = self.request.text(len(texts), self.service.engine.tokenizer, tokens)
                texts.append(text)
                tasks.append(asyncio.create_task(write(text, tokens, sample)))
        try:
            with _errors_about(self.request.prompt_field):
                await asyncio.gather(*tasks)
            return texts
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _send_stream(
        self, prompts: list[list[int]], send: Send
    ) -> tuple[int, dict[str, Any]]:
        """Send the texts, and return the status and the usage.

        The headers go out with the first piece, so that an earlier error can have its own status code.
        """
        events = _EventStream(send)
        waiting = asyncio.create_task(events.keep_alive())
        try:
            texts = await self._generate(prompts, events)
        except ApiError as error:
            if not events.has_begun:
                raise
            self.service.metrics.refused(error.status)
            await events.send(self.writer.error(error.body), more=False)
            return error.status, {}
        finally:
            waiting.cancel()
        counts = usage(texts, self.request.body.n)
        await events.send(self.writer.end(counts), more=False)
        return 200, counts


@contextmanager
def _errors_about(param: str) -> Iterator[None]:
    """Turn an error of the engine into an error for the client.

    The client's error names the field `param`, unless the engine's error names an option.
    """
    try:
        yield
    except PearlError as error:
        raise of_engine(error, param) from error


class _EventStream:
    """Sends the server-sent events of several texts, one event at a time.

    The headers go out with the first event.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
        ]
        self._sending = asyncio.Lock()
        self._is_silent = False
        self.has_begun = False

    async def send(self, chunk: bytes, more: bool = True) -> None:
        if more and not chunk:
            return
        async with self._sending:
            self._is_silent = False
            if not self.has_begun:
                head = {"type": "http.response.start", "status": 200, "headers": self._headers}
                await self._send(head)
                self.has_begun = True
            await self._send({"type": "http.response.body", "body": chunk, "more_body": more})

    async def keep_alive(self) -> None:
        """Send a comment, which clients skip, whenever nothing was sent for `SILENT_SECONDS`.

        Otherwise clients and proxies give up on a text that waits in the queue, or has a long prompt.
        """
        while True:
            self._is_silent = True
            await asyncio.sleep(SILENT_SECONDS)
            if self._is_silent:
                await self.send(b": waiting\n\n")
