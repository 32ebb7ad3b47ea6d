"""A server in the tests' own process, its clients, and helpers that several test files share."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import httpx
import openai

from pearl.config import RequestOptions
from pearl.engine import Engine
from pearl.engine.stream import Stream
from pearl.metrics import Statistics
from pearl.protocol.messages import Committed, Finished, FinishReason, Provenance, Submit
from pearl.server.app import App
from pearl.server.listen import Door, Server, bind
from pearl.server.requests import Setup
from pearl.server.service import Service
from pearl.text.tools import format_of
from tests.conftest import BOUND, TOY, eventually
from tests.tiny import changed_model

MODEL = "toy-model"
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
SETUP = Setup(MODEL, RequestOptions())
SLOWLY: dict[str, Any] = {
    "target_pace": 0.15,
    "draft_pace": 0.05,
}  # so that `LONG` lasts on a busy machine, too
# Renders tools as the chat templates of Hermes and Qwen do.
TOOL_TEMPLATE = (
    "{% if tools %}<|start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "Write <tool_call>.<|end|>\n{% endif %}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{{ mood }}{% endif %}"
)
JSON = {"content-type": "application/json"}


class Served:
    """A server in a thread of its own, with its own event loop."""

    def __init__(
        self, engine: Engine, door: Door | None = None, method: Literal["auto", "pearl"] = "auto"
    ) -> None:
        door = door or bind("127.0.0.1:0")
        self.service = Service(engine, MODEL)
        self.url = door.url
        self.address: tuple[str, int] = door.bound.getsockname()[:2]
        tools = format_of(engine.tokenizer, door.tool_parser)
        options = RequestOptions(method=method)
        setup = Setup(MODEL, options, tools, engine.config, engine.tokenizer)
        self.app = App(self.service, setup, door.access)
        self.server = Server(self.app, self.service)
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([door.bound])))

    def __enter__(self) -> Served:
        self._thread.start()
        eventually(lambda: self.server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join(BOUND)
        self.service.close()
        assert not self._thread.is_alive()

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=BOUND, **options)

    def post(self, path: str = "completions", **fields: Any) -> httpx.Response:
        """Send a request for a short text, with these fields changed."""
        return self.send(json.dumps(body(path) | fields).encode(), path)

    def send(self, content: bytes | Iterator[bytes], path: str = "completions") -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{path}", content=content, headers=JSON, timeout=BOUND)

    def events(self, path: str = "completions", **fields: Any) -> list[Any]:
        """Return the events of a streamed answer."""
        response = self.post(path, stream=True, **fields)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [one.removeprefix("data: ") for one in response.text.split("\n\n") if one]
        assert events.pop() == "[DONE]"
        return [json.loads(one) for one in events]

    def figures(self, *names: str, label: str = "") -> list[float]:
        """Return the value of each series in /metrics, summed over its labels.

        `label`: if given, only lines with this label are summed.
        """
        page = self.get("/metrics").text.splitlines()
        found = [
            [line for line in page if line.startswith(name + "{") and label in line]
            for name in names
        ]
        assert label or all(found), f"not all series are there: {names}"
        return [sum(float(line.rsplit(" ", 1)[1]) for line in lines) for lines in found]

    def figure(self, name: str, label: str = "") -> float:
        return self.figures(name, label=label)[0]

    def until_running(self, running: int = 1, waiting: int = 0) -> None:
        eventually(
            lambda: (
                self.figures("vllm:num_requests_running", "vllm:num_requests_waiting")
                == [running, waiting]
            )
        )

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=BOUND)

    def is_well(self) -> bool:
        """Return whether the server can serve a text now."""
        with suppress(httpx.HTTPError):
            return self.post().status_code == 200
        return False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stop the target worker within the block, so that no text goes on."""
        pid = target_of(self.service.engine)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @contextmanager
    def writing(self, regex: str) -> Iterator[None]:
        """Constrain all texts to `regex` within the block, as `pearl serve --regex` does."""
        before = self.app.setup
        changed = replace(before, options=before.options.changed(regex=regex))
        self.app.setup = self.app.responses.setup = changed
        try:
            yield
        finally:
            self.app.setup = self.app.responses.setup = before

    @contextmanager
    def saying(self, tokens: Sequence[int], step: int = 1) -> Iterator[None]:
        """Give every text these tokens within the block, in place of the model's tokens.

        `step`: how many of them come at a time.
        """
        client = self.service.engine.client
        submit = client.submit

        def say(stream: Stream, request: Submit) -> Stream:
            start = len(request.prompt)
            for at in range(0, len(tokens), step):
                said = tuple(tokens[at : at + step])
                sources = (Provenance.DIRECT,) * len(said)
                stream.inbox.append(Committed(request.request, start + at, said, sources))
            end = Finished(request.request, FinishReason.EOS, Statistics().to_json())
            stream.inbox.append(end)
            return stream

        client.submit = say  # type: ignore[method-assign]
        try:
            yield
        finally:
            client.submit = submit  # type: ignore[method-assign]

    @contextmanager
    def connection(self) -> Iterator[socket.socket]:
        with socket.create_connection(self.address, timeout=BOUND) as client:
            yield client


def body(path: str = "completions") -> dict[str, Any]:
    prompt: Any = {"completions": "123", "responses": "123"}.get(path, [message("123")])
    names = {"completions": ("prompt", "max_tokens"), "responses": ("input", "max_output_tokens")}
    prompt_field, limit = names.get(path, ("messages", "max_tokens"))
    return {"model": MODEL, limit: 8, "seed": 5, "temperature": 1.0, prompt_field: prompt}


def message(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


def raw_post(fields: dict[str, Any]) -> bytes:
    content = json.dumps(fields).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(content) + content


def received(client: socket.socket) -> bytes:
    """Return the bytes that arrive until the server closes the connection."""
    got = b""
    with suppress(ConnectionResetError):
        while part := client.recv(65536):
            got += part
    return got


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    ours = [choice for choice in choices if choice["index"] == index]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for choice in ours
    )


@contextmanager
def chatting_engine(**settings: Any) -> Iterator[Engine]:
    """Run a toy pair whose tokenizer has a chat template, which joins the messages' texts."""
    with Engine(TOY, TOY, startup_timeout=120, **settings) as engine:
        tokenizer = engine.tokenizer
        tokenizer.chat_text = lambda messages, *_, **__: "".join(
            m["role"][0] + m["content"] for m in messages
        )
        tokenizer.apply_chat = lambda messages, *_: tokenizer.encode(tokenizer.chat_text(messages))
        yield engine


@contextmanager
def serving(**settings: Any) -> Iterator[Served]:
    with chatting_engine(**settings) as engine, Served(engine) as served:
        yield served


@contextmanager
def serving_tools() -> Iterator[Served]:
    """Serve a tiny random pair whose chat template renders tools. Its context holds them."""
    with tempfile.TemporaryDirectory() as directory:
        models = [Path(directory, role) for role in ("target", "draft")]
        for made, noise in zip(models, (0.0, 0.3), strict=True):
            changed_model(made, noise=noise, max_position_embeddings=4096)
            (made / "chat_template.jinja").write_text(TOOL_TEMPLATE)
        with (
            Engine(*map(str, models), startup_timeout=120) as engine,
            Served(engine) as served,
        ):
            yield served


def target_of(engine: Engine) -> int:
    return engine.target_worker.pid
