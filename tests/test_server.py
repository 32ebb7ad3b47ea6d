"""The HTTP server: OpenAI's client and plain HTTP against a toy pair; limits, errors and clients that misbehave."""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import httpx
import hypothesis
import openai
import pytest
from click.testing import CliRunner
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from pearl.cli import cli
from pearl.cli.serve import serve
from pearl.config import DecodingConfig, SamplingParams, Settings
from pearl.engine import Engine
from pearl.engine.request import Chat
from pearl.engine.stream import Result
from pearl.errors import ConfigError, TargetLost
from pearl.extras import installing
from pearl.metrics import Statistics
from pearl.server import app as app_module
from pearl.server import listen as listen_module
from pearl.server import pace
from pearl.server.answers import Answer
from pearl.server.app import App
from pearl.server.connection import BoundedProtocol
from pearl.server.errors import ApiError
from pearl.server.figures import Figures
from pearl.server.listen import Door, Server, bind, name_of
from pearl.server.requests import read_request
from pearl.server.shares import Shares
from pearl.server.timeline import MOST_VIEWERS, Timeline
from pearl.server.turns import Turns
from pearl.transport import descriptors
from tests.browser import CHROMIUM, Browser
from tests.conftest import TOY

BOUND = 180.0  # seconds that nothing here should ever take
MODEL = "toy-model"
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
SLOWLY: dict[str, Any] = {
    "target_pace": 0.15,
    "draft_pace": 0.05,
}  # `LONG` is not at its end before a busy machine looks


class Served:
    """A server in this process, on its own thread and event loop."""

    def __init__(self, engine: Engine, door: Door, method: Literal["auto", "pearl"] = "auto") -> None:
        self.turns = Turns(engine, DecodingConfig(method=method), door.queue, MODEL)
        self.url = door.url
        self.address: tuple[str, int] = door.bound.getsockname()[:2]
        self.app = App(self.turns, SamplingParams(), MODEL, door.access)
        self.server = Server(self.app, self.turns)
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([door.bound])))

    def __enter__(self) -> Served:
        self._thread.start()
        until(lambda: self.server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join(BOUND)
        self.turns.close()
        assert not self._thread.is_alive()

    def post(self, path: str = "completions", **fields: Any) -> httpx.Response:
        """A request for a short text, but for what `fields` say."""
        return httpx.post(f"{self.url}/v1/{path}", json=body(path) | fields, timeout=BOUND)

    def lines(self, path: str = "completions", **fields: Any) -> list[Any]:
        """The events of a streamed answer."""
        response = self.post(path, stream=True, **fields)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [one.removeprefix("data: ") for one in response.text.split("\n\n") if one]
        assert events.pop() == "[DONE]"
        return [json.loads(one) for one in events]

    def figure(self, name: str) -> float:
        """The sum of a series over its labels."""
        page = httpx.get(f"{self.url}/metrics", timeout=BOUND).text
        values = [line.rsplit(" ", 1)[1] for line in page.splitlines() if line.startswith(name + "{")]
        assert values, f"no series {name}"
        return sum(map(float, values))

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=BOUND)

    def is_well(self) -> bool:
        """Whether it serves a text now."""
        return self.post().status_code == 200


def body(path: str) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt": "123"} if path == "completions" else {"messages": [message("123")]}
    return {"model": MODEL, "max_tokens": 8, "seed": 5, "temperature": 1.0, **prompt}


def message(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 2}}}


def called(arguments: str) -> dict[str, Any]:
    """An assistant's message that is a call, as clients send it back."""
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
    }


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + BOUND
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def chatting_engine(**settings: Any) -> Iterator[Engine]:
    """A toy pair of whose tokenizer has a chat template: the texts, one after the other."""
    with Engine(TOY, TOY, startup_timeout=120, **settings) as engine:
        tokenizer = engine.tokenizer
        tokenizer.apply_chat = lambda messages: tokenizer.encode("".join(m["role"][0] + m["content"] for m in messages))
        yield engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with chatting_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def served(engine: Engine) -> Iterator[Served]:
    with Served(engine, bind("127.0.0.1:0", None, 8, None)) as served:
        yield served


@pytest.fixture(scope="module")
def slow() -> Iterator[Served]:
    """`LONG` takes many seconds; one request may wait."""
    with (
        chatting_engine(**SLOWLY) as engine,
        Served(engine, bind("127.0.0.1:0", None, 1, None)) as served,
    ):
        yield served


@pytest.fixture(scope="module")
def several() -> Iterator[Served]:
    """Three texts at a time, not too fast."""
    with (
        chatting_engine(slots=3, target_pace=0.01, draft_pace=0.003) as engine,
        Served(engine, bind("127.0.0.1:0", None, 64, None)) as served,
    ):
        yield served


# ---- texts ----


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_the_engines(served: Served, engine: Engine, temperature: float) -> None:
    """Streamed and not, of a chat and of a text, greedy and sampled."""
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=40)
    prompts: dict[str, Any] = {"completions": "123", "chat/completions": [message("123")]}
    for path, prompt in prompts.items():
        wanted = engine.generate([prompt], params)[0]
        answer = served.post(path, temperature=temperature, seed=7, max_tokens=40).json()
        (choice,) = answer["choices"]
        assert (choice["text"] if path == "completions" else choice["message"]["content"]) == wanted.text
        assert choice["finish_reason"] == ("length" if wanted.finish_reason == "length" else "stop")
        pieces = served.lines(path, temperature=temperature, seed=7, max_tokens=40)
        assert "".join(text_of(piece) for piece in pieces) == wanted.text
        assert [p["choices"][0]["finish_reason"] for p in pieces][-1] == choice["finish_reason"]


def text_of(chunk: Any) -> str:
    choice = chunk["choices"][0]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


def test_openais_client(served: Served, engine: Engine) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    wanted = engine.generate([[message("123")]], SamplingParams(temperature=1, seed=3, max_tokens=30))[0]
    asked: dict[str, Any] = {"model": MODEL, "messages": [message("123")], "seed": 3, "temperature": 1.0}
    whole = client.chat.completions.create(max_completion_tokens=30, **asked)
    assert whole.choices[0].message.content == wanted.text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(wanted.tokens)
    with client.chat.completions.create(
        max_tokens=30, stream=True, stream_options={"include_usage": True}, **asked
    ) as chunks:
        got = list(chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in got[:-1]) == wanted.text
    assert got[0].choices[0].delta.role == "assistant"
    assert got[-1].choices == []
    assert got[-1].usage is not None
    assert got[-1].usage.total_tokens == len(wanted.tokens) + len(wanted.prompt_tokens)
    completed = client.completions.create(model=MODEL, prompt="123", temperature=0, max_tokens=5)
    assert completed.choices[0].text == engine.generate(["123"], SamplingParams(temperature=0, max_tokens=5))[0].text


def test_openais_client_reads_log_probabilities(served: Served) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "seed": 5, "temperature": 1.0}
    messages = [{"role": "user", "content": "123"}]
    client = served.client()
    whole = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, **asked)
    (choice,) = whole.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    text = choice.message.content
    assert "".join(entry.token for entry in content) == text
    for entry in content:
        assert bytes(entry.bytes or []).decode() == entry.token
        assert len(entry.top_logprobs) == 2
        assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
    chunks = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, stream=True, **asked)
    streamed = [entry for chunk in chunks for c in chunk.choices if c.logprobs for entry in c.logprobs.content or []]
    assert streamed == content
    alone = client.chat.completions.create(messages=messages, logprobs=True, **asked)
    assert [e.logprob for e in alone.choices[0].logprobs.content or []] == [e.logprob for e in content]  # type: ignore[union-attr]
    assert all(not entry.top_logprobs for entry in alone.choices[0].logprobs.content or [])  # type: ignore[union-attr]
    assert client.chat.completions.create(messages=messages, **asked).choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match="logprobs true"):
        client.chat.completions.create(messages=messages, top_logprobs=2, **asked)

    old = client.completions.create(prompt="123", logprobs=2, **asked).choices[0]
    assert old.logprobs is not None
    assert "".join(old.logprobs.tokens or []) == old.text
    assert old.logprobs.text_offset == [len("".join((old.logprobs.tokens or [])[:i])) for i in range(12)]
    for token, own, top in zip(
        old.logprobs.tokens or [], old.logprobs.token_logprobs or [], old.logprobs.top_logprobs or [], strict=True
    ):
        assert top[token] == own
        assert 2 <= len(top) <= 3
    parts = [
        chunk.choices[0].logprobs
        for chunk in client.completions.create(prompt="123", logprobs=2, stream=True, **asked)
        if chunk.choices and chunk.choices[0].logprobs
    ]
    assert [offset for part in parts for offset in part.text_offset or []] == old.logprobs.text_offset
    none = client.completions.create(prompt="123", logprobs=0, **asked).choices[0].logprobs
    assert none is not None
    assert none.top_logprobs is None
    assert none.token_logprobs == old.logprobs.token_logprobs


def test_openais_client_raises_what_we_mean(served: Served) -> None:
    client = served.client()
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.completions.create(model="other", prompt="1")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="1", temperature=-1)
    assert refused.value.param == "temperature"


def test_several_texts_of_one_request(served: Served, engine: Engine) -> None:
    """n answers for each prompt are the samples of one seed; the prompt counts once."""
    texts = [
        engine.generate([prompt], SamplingParams(temperature=1, seed=5, max_tokens=8, sample=sample))[0].text
        for prompt in ("123", "4567")
        for sample in (0, 1)
    ]
    assert len(set(texts)) > 1
    answer = served.post(prompt=["123", [4, 5, 6, 7]], n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 7
    chunks = served.lines(prompt=["123", [4, 5, 6, 7]], n=2)
    streamed = ["".join(text_of(c) for c in chunks if c["choices"][0]["index"] == index) for index in range(4)]
    assert streamed == texts


def test_texts_are_written_side_by_side_and_each_is_its_own(several: Served, engine: Engine) -> None:
    """The texts of one request, streamed and not, and those of many clients: as an engine with one slot writes them."""
    params = SamplingParams(temperature=1, seed=5, max_tokens=40)
    samples = [params.model_copy(update={"sample": number}) for number in range(5)]
    wanted = [engine.generate(["123"], each)[0].text for each in samples]
    whole = [choice["text"] for choice in several.post(n=5, max_tokens=40).json()["choices"]]
    assert whole == wanted
    chunks = [chunk["choices"][0] for chunk in several.lines(n=5, max_tokens=40)]
    parts = ["".join(chunk["text"] for chunk in chunks if chunk["index"] == index) for index in range(5)]
    assert parts == whole
    order = [chunk["index"] for chunk in chunks]
    assert sum(a != b for a, b in pairwise(order)) > 5, "they come as they are made, not one after the other"
    prompts = [f"{i % 10}{i // 10}{i % 7}" for i in range(24)]
    with ThreadPoolExecutor(24) as pool:
        got = list(pool.map(lambda prompt: several.post(prompt=prompt, max_tokens=30).json(), prompts))
    alone = engine.generate(prompts, params.model_copy(update={"max_tokens": 30}))
    assert [one["choices"][0]["text"] for one in got] == [one.text for one in alone]
    assert several.figure("vllm:num_requests_running") == several.figure("vllm:num_requests_waiting") == 0


def test_a_text_does_not_wait_for_a_long_one_beside_it() -> None:
    """The others are taken up while it is being written, and it goes on."""
    with (
        chatting_engine(slots=3, **SLOWLY) as engine,
        Served(engine, bind("127.0.0.1:0", None, 64, None)) as served,
        httpx.stream(
            "POST",
            f"{served.url}/v1/completions",
            json=body("completions") | LONG | {"stream": True},
            timeout=BOUND,
        ) as long,
    ):
        pieces = long.iter_lines()  # kept: an iterator that is dropped closes the stream
        next(pieces)
        for _ in range(3):
            assert served.post(max_tokens=5).status_code == 200
        assert served.figure("vllm:num_requests_running") == 1
        made = served.figure("vllm:generation_tokens_total")
        until(lambda: served.figure("vllm:generation_tokens_total") > made)


def test_usage_has_the_acceptance(served: Served) -> None:
    usage = served.post(max_tokens=60, ignore_eos=True).json()["usage"]
    assert usage["completion_tokens"] == 60
    assert usage["total_tokens"] == 63
    ours = usage["pearl"]
    assert ours["seed"] == 5
    assert sum(ours["tokens_by_source"].values()) == 60
    assert ours["num_accepted_draft_tokens"] <= ours["num_draft_tokens"]


def test_chunks_say_where_tokens_came_from(served: Served) -> None:
    options = {"include_provenance": True, "include_usage": True}
    *chunks, last = served.lines("chat/completions", max_tokens=40, stream_options=options)
    told = [one for chunk in chunks for one in chunk["choices"][0].get("provenance", [])]
    assert len(told) == last["usage"]["completion_tokens"]
    counted = last["usage"]["pearl"]["tokens_by_source"]
    assert {source: sum(one["source"] == source for one in told) for source in counted} == counted
    assert all(chunk["usage"] is None for chunk in chunks)


def test_a_text_ends_before_a_stop_string(served: Served, engine: Engine) -> None:
    text = engine.generate(["123"], SamplingParams(temperature=1, seed=5, max_tokens=40, ignore_eos=True))[0].text
    stop = text[20:22]
    for given in (stop, ["~~", stop]):
        choice = served.post(max_tokens=40, ignore_eos=True, stop=given).json()["choices"][0]
        assert choice["text"] == text[: text.index(stop)]
        assert choice["finish_reason"] == "stop"


def test_text_parts_are_joined(served: Served) -> None:
    parts = [{"type": "text", "text": "12"}, {"type": "text", "text": "3"}]
    messages = [message("4", "system"), message(parts), message("5", "assistant"), message("6")]
    joined = [message("4", "system"), message("12\n3"), message("5", "assistant"), message("6")]
    answers = [served.post("chat/completions", messages=m).json()["choices"][0]["message"] for m in (messages, joined)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": "1 " * 900_000}),
        ("chat/completions", {"messages": [message("1" * 900)] * 2000}),
        ("chat/completions", {"messages": [message([{"type": "text", "text": "1" * 1_900_000}])]}),
        ("chat/completions", {"messages": [called(json.dumps({"x": "1" * 1_900_000}))]}),
    ],
)
def test_of_far_too_long_a_prompt_only_a_part_is_made_into_tokens(
    served: Served, engine: Engine, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    """All of it takes seconds, and texts wait in one queue to be made into tokens."""
    encode, seen = engine.tokenizer.encode, []

    def noted(text: str, special: bool = True) -> list[int]:
        seen.append(len(text))
        return encode(text, special)

    monkeypatch.setattr(engine.tokenizer, "encode", noted)
    refused = served.post(path, **fields)
    assert refused.status_code == 400
    assert "the context holds" in refused.json()["error"]["message"]
    assert max(seen) <= 1 << 16


def test_others_do_not_wait_for_a_request_that_takes_long_to_look_at(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schema, say: whoever is served meanwhile is served as ever."""
    ended = threading.Event()
    monkeypatch.setattr("pearl.server.app.read_request", lambda *_: ended.wait(BOUND))
    with ThreadPoolExecutor() as pool:
        looked_at = pool.submit(served.post)
        assert httpx.get(f"{served.url}/health", timeout=BOUND / 2).status_code == 200
        assert not looked_at.done()
        ended.set()
        looked_at.result()


def test_others_do_not_wait_for_an_answer_that_takes_long_to_write(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many texts with 20 log probabilities a token: no stream went on for 20 s."""
    ended, whole = threading.Event(), Answer.whole

    def slowly(answer: Answer, *given: Any) -> Any:
        assert ended.wait(BOUND)
        return whole(answer, *given)

    monkeypatch.setattr(Answer, "whole", slowly)
    with ThreadPoolExecutor() as pool:
        answered = pool.submit(served.post)
        until(lambda: served.figure("vllm:num_requests_running") == 0)
        assert httpx.get(f"{served.url}/health", timeout=BOUND / 2).status_code == 200
        assert not answered.done()
        ended.set()
        assert answered.result().status_code == 200


def test_two_clients_at_once_get_their_own_texts(served: Served, engine: Engine) -> None:
    prompts = ["123", "4567", "89", "abc"]
    wanted = [
        engine.generate([p], SamplingParams(temperature=1, seed=5, max_tokens=50, ignore_eos=True))[0].text
        for p in prompts
    ]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = pool.map(lambda p: served.lines(prompt=p, max_tokens=50, ignore_eos=True), prompts)
        assert ["".join(map(text_of, chunks)) for chunks in answers] == wanted


# ---- what is refused ----


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e-9}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 600}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"n": True}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * 1001}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"model": 3}, "model"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 1.0}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": False}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"3": 101}}, "logit_bias"),
        ({"logit_bias": {"3": True}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"3": 1, "03": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": [3]}, "logit_bias"),
        ({"response_format": "json"}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "mouse"}}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"temprature": 1}, "temprature"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [31, 32]}, "prompt"),
        ({"prompt": "1" * 512}, "prompt"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(served: Served, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        response = served.post(**{"stream": stream} | fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
        assert param in error["message"] or param == "prompt"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([3], "messages[0]"),
        ([message("1", "function")], "messages[0].role"),
        ([message("1", "user") | {"tool_call_id": "1"}], "messages[0].tool_call_id"),
        ([message("1", "user") | {"tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([message("1", "assistant") | {"tool_calls": ["f"]}], "messages[0].tool_calls[0]"),
        ([message("1", "assistant") | {"tool_calls": [CALL | {"type": "x"}]}], "messages[0].tool_calls[0]"),
        ([called("[1]")], "messages[0].tool_calls[0].function.arguments"),
        ([called("{")], "messages[0].tool_calls[0].function.arguments"),
        ([called('{"x": "\\ud800"}')], "messages[0].tool_calls[0]"),
        ([message("1"), message(None, "assistant")], "messages[1].content"),
        ([message([{"type": "image_url", "image_url": {"url": "x"}}])], "messages[0].content[0]"),
        ([message([{"type": "text"}])], "messages[0].content[0].text"),
        ([message("1") | {"name": "me"}], "messages[0].name"),
        ([message("1") | {"mood": "good"}], "messages[0].mood"),
        ([message("\ud800")], "messages[0].content"),
        ([message("1" * 600)], "messages"),
    ],
)
def test_messages_are_refused_by_name(served: Served, messages: Any, param: str) -> None:
    response = httpx.post(
        f"{served.url}/v1/chat/completions",
        content=json.dumps(body("chat/completions") | {"messages": messages}),
        headers={"content-type": "application/json"},
        timeout=BOUND,
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_schema_that_only_a_parser_finds_empty_is_the_clients_fault(served: Served) -> None:
    for schema in ({"$ref": "#"}, {"type": "string", "pattern": "^é\ue000$"}):
        response = served.post(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "GrammarError"), response.text


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["user", "text", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "include_usage", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = [*body("completions"), *body("chat/completions"), "n", "stop", "stream", "stream_options", "top_p", "top_k"]
FIELDS += ["min_p", "max_completion_tokens", "ignore_eos", "logprobs", "top_logprobs", "tools", "tool_choice", "user"]
FIELDS += ["response_format", "structured_outputs", "nonsense"]


@hypothesis.given(st.booleans(), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_any_body_is_taken_or_refused(chat: bool, fields: dict[str, Any]) -> None:
    """With an error that names a field of it and can be sent; nothing else is raised."""
    error = refusal(body("chat/completions" if chat else "completions") | fields, chat)
    if error is not None:
        assert error.status in (400, 404)
        assert error.param is not None
        assert json.dumps(error.body).encode("ascii")


def refusal(asked: dict[str, Any], chat: bool) -> ApiError | None:
    try:
        read_request(asked, chat, MODEL, SamplingParams())
    except ApiError as error:
        return error
    return None


def test_penalties_and_biases_are_those_of_the_engine(served: Served, engine: Engine) -> None:
    asked = {"presence_penalty": 1.5, "frequency_penalty": -0.5, "repetition_penalty": 1.3, "temperature": 1, "seed": 5}
    params = SamplingParams(**asked, max_tokens=40, logit_bias=((4, 3.0), (7, -100.0)), ignore_eos=True)  # type: ignore[arg-type]
    wanted = engine.generate(["123"], params)[0].text
    biases = {"4": 3, "7": -100.0}
    answer = served.post(prompt="123", max_tokens=40, ignore_eos=True, logit_bias=biases, **asked).json()
    assert answer["choices"][0]["text"] == wanted
    plain = served.post(prompt="123", max_tokens=40, ignore_eos=True, temperature=1, seed=5).json()
    assert plain["choices"][0]["text"] != wanted


def test_a_text_is_held_to_a_grammar(served: Served) -> None:
    """The toy's tokens are digits and letters, of which 3 ends a text; a JSON object takes a checkpoint."""
    held = {
        "prompt": "123",
        "max_tokens": 40,
        "temperature": 1,
        "seed": 5,
        "structured_outputs": {"regex": "(ab|c){4}"},
    }
    choice = served.post(**held).json()["choices"][0]
    assert re.fullmatch("(ab|c){4}3", choice["text"])
    assert choice["finish_reason"] == "stop"
    cut = served.post(**held | {"max_tokens": 2}).json()["choices"][0]
    assert cut["text"] == choice["text"][:2]
    assert cut["finish_reason"] == "length"


def test_values_that_ask_for_nothing_are_taken(served: Served) -> None:
    nothing: dict[str, Any] = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "logprobs": False,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "best_of": 1,
        "echo": False,
        "user": "somebody",
        "n": 1,
        "stop": None,
        "functions": None,
    }
    assert served.post(**nothing).json()["choices"] == served.post().json()["choices"]


def test_a_bias_of_a_token_that_the_model_lacks_names_its_field(served: Served) -> None:
    """The target refuses ids beyond its vocabulary; the error named the prompt's field instead."""
    for path in ("completions", "chat/completions"):
        response = served.post(path, logit_bias={"9999": 1})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "logit_bias")


def test_a_model_without_a_chat_template_says_so(
    served: Served, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.tokenizer, "apply_chat", lambda messages: None)
    response = served.post("chat/completions")
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


def test_tools_and_their_calls_reach_the_template() -> None:
    """A call's arguments as an object: templates write JSON of them."""
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    strict = {"type": "function", "function": tool["function"] | {"strict": True}}  # type: ignore[operator]
    answer = {"role": "tool", "tool_call_id": "1", "content": "5"}
    asked = body("chat/completions") | {"messages": [message("1", "user"), called('{"x": 2}'), answer]}
    wanted = [message("1", "user"), {"role": "assistant", "content": "", "tool_calls": [CALL]}, answer]
    (prompt,) = read_request(asked | {"tools": [strict]}, True, MODEL, SamplingParams()).prompts
    assert prompt == Chat(wanted, [tool])
    for without in ({"tools": []}, {"tools": [tool], "tool_choice": "none"}):
        (prompt,) = read_request(asked | without, True, MODEL, SamplingParams()).prompts
        assert prompt == wanted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "color": 1}}]}, "tools[0].function.color"),
        ({"tools": [{"type": "function", "function": {"name": "\ud800"}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ],
)
def test_tools_that_cannot_be_passed_on_are_refused(fields: dict[str, Any], param: str) -> None:
    error = refusal(body("chat/completions") | fields, True)
    assert error is not None
    assert (error.status, error.param) == (400, param)
    assert refusal(body("completions") | {"tools": [{}]}, False) is not None


def test_the_legacy_endpoint_writes_sixteen_tokens(served: Served) -> None:
    asked = {"model": MODEL, "prompt": "123", "ignore_eos": True}
    assert read_request(asked, False, MODEL, SamplingParams()).params.max_tokens == 16
    assert read_request(asked, False, MODEL, SamplingParams(max_tokens=30)).params.max_tokens == 30


def test_a_default_gives_way_to_the_context(served: Served) -> None:
    """A limit that the client has set does not: it is told which field asks for too much."""
    asked: dict[str, Any] = {"model": MODEL, "prompt": "1" * 505, "ignore_eos": True}
    response = httpx.post(f"{served.url}/v1/completions", json=asked, timeout=BOUND)
    assert response.json()["usage"]["completion_tokens"] == 7
    response = served.post("chat/completions", max_tokens=None, max_completion_tokens=510)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "max_completion_tokens")
    assert error["code"] == "context_length_exceeded"


def test_paths_and_methods(served: Served) -> None:
    for path, method, status in (
        ("/v1/nothing", "GET", 404),
        ("/v1/completions", "GET", 405),
        ("/v1/models/other", "GET", 404),
        ("/v1/models", "DELETE", 405),
    ):
        response = httpx.request(method, served.url + path, timeout=BOUND)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    response = served.post(model="other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_about_the_server(served: Served) -> None:
    assert httpx.get(f"{served.url}/health", timeout=BOUND).json() == {"status": "ok"}
    assert httpx.get(f"{served.url}/version", timeout=BOUND).json().keys() == {"version"}
    assert httpx.get(f"{served.url}/v1/models", timeout=BOUND).json()["data"][0]["max_model_len"] == 512


def test_figures(served: Served) -> None:
    names = [
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_queue_time_seconds_count",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "pearl:tokens_by_source_total",
    ]
    served.post()
    before = {name: served.figure(name) for name in names}
    usage = served.post(max_tokens=50, ignore_eos=True, n=2).json()["usage"]
    grown = {name: served.figure(name) - before[name] for name in names}
    assert list(grown.values()) == [
        6,
        100,
        2,
        2,
        98,
        2,
        2,
        usage["pearl"]["num_draft_tokens"],
        usage["pearl"]["num_accepted_draft_tokens"],
        100,
    ]
    assert served.figure("vllm:num_requests_running") == served.figure("vllm:num_requests_waiting") == 0
    assert served.figure("pearl:draft_restarts") == 0


def test_accepted_tokens_are_counted_by_their_place_in_a_run() -> None:
    figures = Figures("m", lambda: 0, lambda: 0, lambda: 3)
    for runs in ({"0": 2, "1": 1, "3": 2}, {"40": 1}):
        result = Result(seed=1, finish_reason="length", statistics=Statistics(run_histogram=runs))
        figures.ended(result, 1.0, 1.0)
    found = dict(
        re.findall(r'pearl:accepted_tokens_per_position_total.*position="(.*?)".*? (\S+)$', page(figures), re.M)
    )
    assert {place: float(count) for place, count in found.items()} == (
        {"0": 4, "1": 3, "2": 3} | {str(place): 1 for place in range(3, 32)} | {"32 and more": 8}
    )
    assert 'pearl:runs_total{model_name="m"} 6.0' in page(figures)
    assert 'pearl:draft_restarts{model_name="m"} 3.0' in page(figures)


def page(figures: Figures) -> str:
    return asyncio.run(figures.page()).decode()


def test_who_asks_for_figures_at_once_gets_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made anew for each, pages polled by fifty clients held up a text for a second."""
    made = 0

    def counted(registry: CollectorRegistry) -> bytes:
        nonlocal made
        made += 1
        return generate_latest(registry)

    async def ask(figures: Figures) -> list[bytes]:
        first = await asyncio.gather(*(figures.page() for _ in range(50)))
        figures.refused(429)
        second = asyncio.gather(*(figures.page() for _ in range(50)))
        await asyncio.sleep(0)
        figures.refused(429)  # while they wait: this is in it too
        return [*first, *await second]

    monkeypatch.setattr("pearl.server.figures.generate_latest", counted)
    pages = asyncio.run(ask(Figures("m", lambda: 0, lambda: 0, lambda: 0)))
    assert made == 2
    assert len(set(pages)) == 2
    assert b'pearl:http_refused_total{model_name="m",status="429"} 2.0' in pages[-1]


def test_the_page_asks_nobody_else(served: Served) -> None:
    """And the browser is told to run its script only."""
    response = httpx.get(served.url, timeout=BOUND)
    assert "http:" not in response.text
    assert "https:" not in response.text
    assert "innerHTML" not in response.text, "what a model says is text"
    script = response.text.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in response.headers["content-security-policy"]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_page_runs_in_a_browser(tmp_path: Path) -> None:
    """A text streams, the timeline moves, and no script fails; `PEARL_SCREENSHOT` keeps a picture of it."""
    with (
        chatting_engine(target_pace=0.03, draft_pace=0.008) as engine,
        Served(engine, bind("127.0.0.1:0", None, 8, None)) as served,
        Browser(served.url, tmp_path / "profile") as browser,
    ):
        assert browser.sees("$('model').textContent") == MODEL
        browser.run("$('look').click()")
        browser.sees("looking && $('looking').textContent === ''")
        assert browser.run("$('live').hidden") is False
        browser.run("$('plain').checked = true; $('text').value = '123'; $('most').value = 200; $('send').click()")
        first = browser.sees("document.querySelector('.assistant').textContent.length")
        assert browser.sees("document.querySelector('.assistant').textContent.length", lambda now: now > first)
        shares = browser.sees("$('shares').innerText", lambda said: "verify" in said and "draft: draft" in said)
        assert "target: " in shares
        drawn = "$('live').toDataURL()"
        before = browser.run(drawn)
        assert browser.sees(drawn, lambda now: now != before), "it moves"
        browser.sees("marks.length")
        if (kept := os.environ.get("PEARL_SCREENSHOT")) is not None:
            browser.sees("performance.now() > 6000")
            browser.screenshot(Path(kept))
        browser.sees("!running")
        assert browser.run("$('waiting').textContent") in ("0", "-")
        browser.run("$('look').click()")
        browser.sees("!looking && $('live').hidden")
        until(lambda: not list(engine.directory.glob("trace-*")))
        assert browser.said == []


def test_what_is_understood_is_described(served: Served) -> None:
    """The fields of both bodies, with bounds, and every status that comes; each name in it leads somewhere."""
    described = httpx.get(f"{served.url}/openapi.json", timeout=BOUND).json()
    schemas = described["components"]["schemas"]
    fields = {each: schemas[each]["properties"] for each in ("ChatCompletionRequest", "CompletionRequest")}
    assert {"messages", "tools", "top_logprobs", "max_completion_tokens"} <= fields["ChatCompletionRequest"].keys()
    assert {"prompt", "logprobs", "seed", "structured_outputs", "user"} <= fields["CompletionRequest"].keys()
    assert {"echo", "best_of"}.isdisjoint(fields["CompletionRequest"])
    assert (fields["CompletionRequest"]["n"]["minimum"], fields["CompletionRequest"]["n"]["maximum"]) == (1, 128)
    named = set(re.findall('"#/components/schemas/(.+?)"', json.dumps(described)))
    assert named == schemas.keys()
    for path, methods in described["paths"].items():
        for method in methods:
            status = httpx.request(method, served.url + path.replace("{name}", MODEL), timeout=BOUND).status_code
            assert str(status) in methods[method]["responses"], path
    assert "security" not in described


# ---- what both workers do ----


def looked_on(served: Served, meanwhile: Callable[[], object], enough: Callable[[list[Any]], bool]) -> list[Any]:
    """The events of the timeline from before `meanwhile` until there are enough."""
    seen: list[Any] = []
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.stream("GET", f"{served.url}/v1/timeline", timeout=BOUND) as response,
    ):
        assert response.status_code == 200
        for line in response.iter_lines():
            if line:
                seen.append(json.loads(line.removeprefix("data: ")))
            if line and "recording" in seen[-1]:
                pool.submit(meanwhile)
            if enough(seen):
                break
    return seen


def test_the_timeline_has_what_both_workers_do(engine: Engine) -> None:
    """Forwards, waits and each token by its source, in order; nothing of it is left when nobody looks on."""

    def tokens(seen: list[Any]) -> list[str]:
        return [source for event in seen for source in event.get("tokens", ())]

    asked = {"max_tokens": 40, "ignore_eos": True}

    def all_seen(seen: list[Any]) -> bool:  # the draft may write down later what it did
        return len(tokens(seen)) >= 40 and any(event.get("name") == "draft" for event in seen)

    with Served(engine, bind("127.0.0.1:0", None, 8, None), "pearl") as served:  # under auto the draft may rest
        seen = looked_on(served, lambda: served.post(**asked), all_seen)
        until(lambda: not list(engine.directory.glob("trace-*")))
        assert served.is_well()
        again = looked_on(served, lambda: served.post(**asked), lambda seen: bool(tokens(seen)))
    assert len(tokens(seen)) == 40
    assert set(tokens(seen)) <= {"accepted", "corrected", "guessed", "direct", "bonus"}
    of = {role: {event["name"] for event in seen if event.get("of") == role} for role in ("target", "draft")}
    assert of["target"] & {"pre-verify", "post-verify"}
    assert "draft" in of["draft"]
    assert all(event["from"] < event["to"] for event in seen if "of" in event)
    assert tokens(again)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_timeline_begins_though_texts_follow_each_other(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    """New texts wait for it. It waited for a pause, and said that the workers did not answer."""
    monkeypatch.setattr("pearl.engine.recording._RECORD_SECONDS", 0.5)
    with (
        chatting_engine(target_pace=0.05, draft_pace=0.01, slots=slots) as engine,
        Served(engine, bind("127.0.0.1:0", None, 8, None)) as served,
        ThreadPoolExecutor(2 * slots) as pool,
    ):
        is_steady = threading.Event()

        def load() -> set[int]:
            codes = set()
            while not is_steady.is_set():
                codes.add(served.post(max_tokens=30, ignore_eos=True).status_code)
            return codes

        loads = [pool.submit(load) for _ in range(2 * slots)]
        try:
            until(lambda: served.figure("vllm:num_requests_waiting") == slots)
            seen = looked_on(served, lambda: None, lambda seen: any("tokens" in event for event in seen))
        finally:
            is_steady.set()
        assert not any("problem" in event for event in seen)
        assert [each.result(BOUND) for each in loads] == [{200}] * 2 * slots
        until(lambda: not list(engine.directory.glob("trace-*")))


def test_so_many_look_on_and_no_more(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pearl.server.timeline.MOST_VIEWERS", 0)
    response = httpx.get(f"{served.url}/v1/timeline", timeout=BOUND)
    assert response.status_code == 429
    assert "retry-after" in response.headers


def test_who_has_all_looks_at_the_timeline_leaves_others_their_share(tmp_path: Path) -> None:
    async def look() -> None:
        timeline = Timeline(tmp_path)  # no engine runs there: who looks on is told so
        async with AsyncExitStack() as stack:
            for _ in range(MOST_VIEWERS):
                assert timeline.fits("greedy")
                await stack.enter_async_context(timeline.viewed("greedy"))
            assert not timeline.fits("greedy")
            assert timeline.fits("other")
            await stack.enter_async_context(timeline.viewed("other"))
            assert not timeline.fits("greedy")
        assert timeline.fits("greedy")
        await timeline.close()

    asyncio.run(look())


# ---- who may ask ----


def test_a_key_is_asked_for(engine: Engine) -> None:
    with Served(engine, bind("127.0.0.1:0", "secret", 8, None)) as served:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            for path in ("/v1/models", "/v1/timeline", "/v1/nothing"):
                response = httpx.get(served.url + path, headers=headers)
                assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (
            httpx.get(f"{served.url}/v1/models", headers={"authorization": "Bearer secret"}, timeout=BOUND).status_code
            == 200
        )
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="secret")
        assert client.completions.create(model=MODEL, prompt="12", max_tokens=2).choices
        assert httpx.get(f"{served.url}/health", timeout=BOUND).status_code == 200
        assert served.figure("pearl:http_refused_total") == 9


@pytest.mark.parametrize("key", [None, "secret"])
def test_who_is_not_let_in_is_not_refused_faster_than_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    """Wrong keys and wrong hosts passed by the pace of refusals: 2000 a second took a third of a text's speed."""
    monkeypatch.setattr(pace, "BURST", 2)
    monkeypatch.setattr(pace, "A_SECOND", 5.0)
    with Served(engine, bind("127.0.0.1:0", key, 8, None)) as served:
        wrong = {"Authorization": "Bearer wrong"} if key else {"Host": "elsewhere.example"}
        began = time.monotonic()
        with httpx.Client(timeout=BOUND) as client:
            codes = [client.get(f"{served.url}/v1/models", headers=wrong).status_code for _ in range(6)]
        assert set(codes) == {401 if key else 403}
        assert time.monotonic() - began > 0.7


def test_a_web_page_cannot_reach_the_loopback(served: Served) -> None:
    """Neither under a name of its own that leads here, nor with a form, which may not send JSON."""
    response = httpx.get(f"{served.url}/v1/models", headers={"host": "evil.example"}, timeout=BOUND)
    assert response.status_code == 403
    for host in ("localhost", "127.0.0.1:1", "[::1]:8000"):
        assert httpx.get(f"{served.url}/v1/models", headers={"host": host}, timeout=BOUND).status_code == 200
    form = httpx.post(
        f"{served.url}/v1/completions", content=b"{}", headers={"content-type": "text/plain"}, timeout=BOUND
    )
    assert form.status_code == 415


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site", "origin": "http://127.0.0.1"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://[x"}, 403),
        ({"origin": "http://127.0.0.1"}, 200),
        ({"sec-fetch-site": "same-origin", "origin": "https://behind.a.proxy"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({}, 200),
    ],
)
def test_a_page_of_another_origin_gets_no_text_and_no_timeline(
    served: Served, headers: dict[str, str], status: int
) -> None:
    """Frames on the timeline began it and took its viewers' places; only the host was looked at."""
    headers = headers | {"host": "127.0.0.1"}
    text = httpx.post(f"{served.url}/v1/completions", json=body("completions"), headers=headers, timeout=BOUND)
    with httpx.stream("GET", f"{served.url}/v1/timeline", headers=headers, timeout=BOUND) as timeline:
        assert (text.status_code, timeline.status_code) == (status, status)
    for response in (text, timeline, httpx.get(f"{served.url}/", headers=headers, timeout=BOUND)):
        assert response.headers["cross-origin-resource-policy"] == "same-origin"
        assert "frame-ancestors 'none'" in response.headers["content-security-policy"]


def test_addresses() -> None:
    with pytest.raises(ConfigError, match="takes an API key"):
        bind("0.0.0.0:0", None, 1, None)
    bind("0.0.0.0:0", "secret", 1, None).close()
    for wrong in ("8000", "127.0.0.1", "127.0.0.1:99999", "::1:80", "a b:1"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            bind(wrong, None, 1, None)
    for key in ("", "two words", "ümlaut"):
        with pytest.raises(ConfigError, match="API key"):
            bind("127.0.0.1:0", key, 1, None)
    door = bind("localhost:0", None, 1, None)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen"):
        bind(f"127.0.0.1:{taken.getsockname()[1]}", None, 1, None)
    other = bind(f"127.0.0.1:{door.bound.getsockname()[1]}", None, 1, None)
    door.bound.listen()
    with pytest.raises(ConfigError, match="cannot listen"):
        other.serve(cast(Engine, None), cast(Settings, None))
    other.close()
    door.close()


def test_a_models_name_does_not_say_where_it_lies(tmp_path: Any) -> None:
    (tmp_path / "llama").mkdir()
    assert name_of(str(tmp_path / "llama")) == "llama"
    assert name_of("someone/llama") == "someone/llama"


# ---- clients that leave, and a full queue ----


def idle(served: Served) -> bool:
    return served.figure("vllm:num_requests_running") + served.figure("vllm:num_requests_waiting") == 0


def aborted(served: Served) -> float:
    page = httpx.get(f"{served.url}/metrics", timeout=BOUND).text
    lines = [line for line in page.splitlines() if 'finished_reason="abort"' in line and "_total" in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_text(slow: Served, stream: bool) -> None:
    made, ended = slow.figure("vllm:generation_tokens_total"), aborted(slow)
    with socket.create_connection(slow.address) as client:
        client.sendall(raw_post(body("completions") | LONG | {"stream": stream}))
        if stream:
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        else:
            until(lambda: slow.figure("vllm:num_requests_running") == 1)
    until(lambda: idle(slow))
    assert aborted(slow) == ended + 1
    assert slow.figure("vllm:generation_tokens_total") - made < 400
    assert slow.is_well()


def test_openais_client_leaves_a_stream(slow: Served) -> None:
    ended = aborted(slow)
    with slow.client().completions.create(
        model=MODEL, prompt="123", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    ) as chunks:
        next(iter(chunks))
    until(lambda: idle(slow))
    assert aborted(slow) == ended + 1


def raw_post(fields: dict[str, Any], path: str = "completions") -> bytes:
    content = json.dumps(fields).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content


def test_a_full_queue_says_when_to_come_again(slow: Served) -> None:
    """And who waits may leave: the one at work is unharmed."""
    with ThreadPoolExecutor(1) as pool, socket.create_connection(slow.address) as waiting:
        with held(slow):
            first = pool.submit(slow.post, max_tokens=40, ignore_eos=True)
            until(lambda: slow.figure("vllm:num_requests_running") == 1)
            waiting.sendall(raw_post(body("completions")))
            until(lambda: slow.figure("vllm:num_requests_waiting") == 1)
            response = slow.post()
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "overloaded"
            waiting.close()
            until(lambda: slow.figure("vllm:num_requests_waiting") == 0)
        assert first.result(BOUND).json()["usage"]["completion_tokens"] == 40
    assert slow.figure("pearl:http_refused_total") >= 1


def test_who_fills_the_queue_leaves_others_their_share(slow: Served) -> None:
    """Sixty connections of one client had every request of another refused."""
    other = httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"), timeout=BOUND)
    with ThreadPoolExecutor() as pool, other:
        with held(slow):
            own = [pool.submit(slow.post)]
            until(lambda: slow.figure("vllm:num_requests_running") == 1)
            own.append(pool.submit(slow.post))
            until(lambda: slow.figure("vllm:num_requests_waiting") == 1)
            others = pool.submit(other.post, f"{slow.url}/v1/completions", json=body("completions"))
            until(lambda: slow.figure("vllm:num_requests_waiting") == 2)
            assert slow.post().status_code == 429
        assert [each.result(BOUND).status_code for each in (*own, others)] == [200] * 3


def test_clients_take_turns(several: Served) -> None:
    """Who asks for one text waits for one turn of each other, however many requests they have."""
    other = httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"), timeout=BOUND)
    with ThreadPoolExecutor(16) as pool, other:
        with held(several):
            own = [pool.submit(several.post) for _ in range(9)]
            until(lambda: several.figure("vllm:num_requests_waiting") == 6)
            others = pool.submit(other.post, f"{several.url}/v1/completions", json=body("completions"))
            until(lambda: several.figure("vllm:num_requests_waiting") == 7)
        waited = [each.result(BOUND).json()["usage"]["pearl"]["queue_seconds"][0] for each in (*own, others)]
    assert waited[-1] < max(waited), "it came last, and waited for less than the last of the others"


def test_a_share_is_of_the_clients_that_have_any() -> None:
    shares = Shares()
    for amount in (4, 5):
        assert shares.fits("a", amount, 9)
        assert not shares.fits("a", amount + 10, 9)
        shares.take("a", amount)
    assert not shares.fits("a", 1, 9)
    for _ in range(4):
        assert shares.fits("b", 1, 9)
        shares.take("b", 1)
    assert not shares.fits("b", 1, 9), "half of nine is four"
    assert shares.fits("c", 3, 9)
    assert not shares.fits("c", 4, 9)
    shares.give_back("a", 9)
    assert shares.fits("b", 5, 9), "nobody else has any"
    shares.give_back("b", 4)
    assert shares.total == 0


def test_pieces_come_as_they_are_made(slow: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all at the end: the first chunk is here though no other is made before it has been looked at."""
    figures = slow.turns.figures
    with ExitStack() as until_seen:
        first_came = figures.first

        def hold(seconds: float) -> None:
            until_seen.enter_context(held(slow))
            first_came(seconds)

        monkeypatch.setattr(figures, "first", hold)
        with slow.client().completions.create(
            model=MODEL, prompt="123", max_tokens=40, stream=True, extra_body={"ignore_eos": True}
        ) as chunks:
            first = next(iter(chunks))
            assert slow.figure("vllm:num_requests_running") == 1
            until_seen.close()
            text = first.choices[0].text + "".join(chunk.choices[0].text for chunk in chunks)
    assert len(text) == 40


@contextmanager
def held(served: Served) -> Iterator[None]:
    """No text is written on meanwhile, however long it takes."""
    pid = target_of(served.turns.engine)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


# ---- hostile HTTP ----


def test_bodies_that_are_no_request(served: Served) -> None:
    for content, status in (
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"3", 400),
        (b'{"model": "\xff"}', 400),
        (b"[" * 200_000, 400),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400),
        (b'{"seed": ' + b"9" * 10_000 + b"}", 400),
        (b'{"model": "toy-model", "prompt": "1", "temperature": NaN}', 400),
        (b'{"\\ud800": 1}', 400),
        (b" " * (app_module.MOST_BODY + 1), 413),
    ):
        response = httpx.post(
            f"{served.url}/v1/completions",
            content=content,
            headers={"content-type": "application/json"},
            timeout=BOUND,
        )
        assert response.status_code == status, content[:50]
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert served.is_well()


def test_a_body_without_an_announced_size_is_bounded_while_it_comes(served: Served) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(app_module.MOST_BODY // 65536 + 2):
            yield b" " * 65536

    headers = {"content-type": "application/json"}
    response = httpx.post(f"{served.url}/v1/completions", content=endless(), headers=headers, timeout=BOUND)
    assert response.status_code == 413
    assert served.is_well()


def test_all_bodies_together_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "MOST_BODIES", 10)
    response = served.post(user="x" * app_module.SHORT_BODY)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    monkeypatch.undo()
    assert served.is_well()


def test_long_bodies_leave_room_for_a_short_one(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen clients who were slow with 2 MiB each kept everybody else out for as long as they liked."""
    monkeypatch.setattr(app_module, "MOST_BODIES", 40_000)
    long = body("completions") | {"user": "x" * 36_000}
    with socket.create_connection(served.address, timeout=BOUND) as slow:
        slow.sendall(raw_post(long)[:-5])
        until(lambda: served.post(user="x" * 30_000).status_code == 429)
        assert served.is_well()


def test_only_the_next_long_body_waits_for_the_pause_after_one(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt alone is answered without it, and a short one has no turn at all."""
    monkeypatch.setattr(app_module, "_RESTS", 1e9)
    monkeypatch.setattr(app_module, "_LONGEST_REST", 2.0)
    padded = json.dumps(body("completions")) + " " * app_module.SHORT_BODY

    def post() -> int:
        headers = {"content-type": "application/json"}
        return httpx.post(f"{served.url}/v1/completions", content=padded, headers=headers, timeout=BOUND).status_code

    began = time.monotonic()
    assert post() == 200
    assert served.post(max_tokens=1).status_code == 200
    assert served.app._bodies._looking.locked() or time.monotonic() - began >= 2
    assert post() == 200
    assert time.monotonic() - began >= 2


def test_texts_go_on_while_long_bodies_are_parsed(served: Served) -> None:
    """Parsing takes the event loop: one body after the other, with nothing between them, and every text stood still."""
    nested = b"[" + (b"[" * 200 + b"]" * 200 + b",") * 5200 + b"1]"
    took: list[float] = []
    times: list[float] = []
    parse = app_module.parse_json

    def parsed(text: str) -> Any:
        times.append(time.monotonic())
        began = time.thread_time()
        try:
            return parse(text)
        finally:
            took.append(time.thread_time() - began)
            times.append(time.monotonic())

    def post(_: int) -> int:
        headers = {"content-type": "application/json"}
        return httpx.post(f"{served.url}/v1/completions", content=nested, headers=headers, timeout=BOUND).status_code

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(8) as pool:
        patch.setattr(app_module, "parse_json", parsed)
        assert set(pool.map(post, range(8))) == {400}
    rests = [after - end for end, after in zip(times[1::2], times[2::2], strict=False)]
    assert len(rests) == 7
    assert sum(rests) > 2 * sum(took)
    assert served.is_well()


def answer(served: Served, sent: bytes) -> bytes:
    """What comes back until the server closes the connection."""
    with socket.create_connection(served.address, timeout=BOUND) as client:
        client.sendall(sent)
        return received(client)


def received(client: socket.socket) -> bytes:
    came = b""
    with suppress(ConnectionResetError):
        while part := client.recv(65536):
            came += part
    return came


def test_headers_are_bounded(served: Served) -> None:
    many = b"".join(b"x-%d: %s\r\n" % (number, b"a" * 100) for number in range(1000))
    for head in (b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + many + b"\r\n", b"GET /" + b"a" * 100_000):
        came = answer(served, head)
        assert came == b"" or came.startswith(b"HTTP/1.1 400"), came[:100]
    assert answer(served, b"\x16\x03\x01 what is this\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert served.is_well()


@pytest.mark.parametrize("lines", [100, 7000])
def test_headers_are_few(served: Served, lines: int) -> None:
    """Each of 7,000 in 28 KiB is looked at for itself: 20 ms a request, in which no text is sent on."""
    many, good = b"a:\r\n" * lines, lines < 1000
    get = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + many + b"\r\n"
    assert answer(served, get).startswith(b"HTTP/1.1 200" if good else b"HTTP/1.1 400")
    head = raw_post({}).partition(b"content-length")[0] + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    content = json.dumps(body("completions")).encode()
    post = head + b"%x\r\n%s\r\n0\r\n" % (len(content), content) + many + b"\r\n"
    assert answer(served, post).startswith(b"HTTP/1.1 200") == good, "behind a body, too"
    assert served.is_well()


def test_a_slow_header_is_not_waited_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that comes byte by byte, nor a second one; others are served meanwhile."""
    monkeypatch.setattr(BoundedProtocol, "header_seconds", 0.5)
    for sent in (b"", b"GET / HTTP/1.1\r\n"):
        with socket.create_connection(served.address, timeout=BOUND) as client:
            client.sendall(sent)
            assert served.is_well()
            assert ended(client)
    with socket.create_connection(served.address, timeout=BOUND) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        assert cut_off(client, b"G", b"E")


def cut_off(client: socket.socket, *bytes_: bytes) -> bool:
    """Whether the server ends the connection while a header comes byte by byte."""
    end = time.monotonic() + BOUND
    try:
        while time.monotonic() < end:
            for byte in bytes_:
                client.sendall(byte)
                time.sleep(0.02)
    except OSError:
        return True
    return False


def ended(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(("size", "answers"), [(1, (b"", b"HTTP/1.1 400")), (400, (b"HTTP/1.1 200",))])
def test_a_body_in_very_many_very_small_chunks_is_refused(
    served: Served, size: int, answers: tuple[bytes, ...]
) -> None:
    """Five clients that sent a byte a chunk, as fast as they could, left the others not a token in a minute."""
    text = json.dumps(body("completions")).encode() + b" " * 200_000
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    head = raw_post({}).partition(b"content-length")[0] + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    with socket.create_connection(served.address, timeout=BOUND) as client:
        with suppress(OSError):  # refused while it speaks
            client.sendall(head + chunks + (b"0\r\n\r\n" if size > 1 else b""))
        assert received(client)[:12] in answers
    assert served.is_well()


def test_a_slow_body_is_not_waited_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "BODY_SECONDS", 0.3)
    came = answer(served, raw_post(body("completions"))[:-5])
    assert came.startswith(b"HTTP/1.1 408")
    assert served.is_well()


def test_connections_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "most_connections", 20)
    clients = [socket.create_connection(served.address, timeout=BOUND) for _ in range(60)]
    try:
        assert clients[-1].recv(4096).startswith(b"HTTP/1.1 503")
    finally:
        for client in clients:
            client.close()
    until(lambda: _answers(served))


def test_one_address_leaves_connections_to_others(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    until(lambda: len(served.server.server_state.connections) == 0)
    monkeypatch.setattr(BoundedProtocol, "most_connections", 16)
    with ExitStack() as opened:
        clients = [
            opened.enter_context(socket.create_connection(served.address, BOUND, (host, 0)))
            for host in ["127.0.0.1"] * 15 + ["127.0.0.2"]
        ]
        assert clients[14].recv(4096).startswith(b"HTTP/1.1 503")
        clients[15].sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert clients[15].recv(4096).startswith(b"HTTP/1.1 200")


def _answers(served: Served) -> bool:
    try:
        return served.is_well()
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("patience", [1.0, 10 * BOUND])
def test_a_client_that_does_not_read_holds_nobody_up(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    """Its text is written at the engine's pace, and the next one begins; at some time the client is cut off."""
    monkeypatch.setattr(BoundedProtocol, "take_seconds", patience)
    door = bind("127.0.0.1:0", None, 8, None)
    door.bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
    with Served(engine, door) as served, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(served.address)
        client.settimeout(BOUND)
        client.sendall(raw_post(body("completions") | LONG | {"stream": True}))
        until(lambda: served.figure("vllm:generation_tokens_total") > 0)
        assert served.is_well()
        until(lambda: idle(served))
        if patience > BOUND:
            assert served.server.server_state.tasks, "the answer is written, but not taken"
            came = b""
            while not came.endswith(b"0\r\n\r\n"):
                came += client.recv(65536)
            assert b"[DONE]" in came, "all of it was kept"
        else:
            until(lambda: not served.server.server_state.tasks)
            assert b"[DONE]" not in received(client)


def test_garbage_in_the_middle_of_an_answer(slow: Served) -> None:
    with socket.create_connection(slow.address, timeout=BOUND) as client:
        client.sendall(raw_post(body("completions") | LONG | {"stream": True}))
        client.recv(100)
        client.sendall(b"\x00garbage\r\n\r\n" * 100)
    until(lambda: idle(slow))
    assert slow.is_well()


# ---- the engine's end, and the command ----


def test_a_lost_engine_is_told() -> None:
    """To who waits for a text, to who comes later, and to probes."""
    with (
        chatting_engine(**SLOWLY) as engine,
        Served(engine, bind("127.0.0.1:0", None, 8, None)) as served,
        ThreadPoolExecutor(1) as pool,
    ):
        unfinished = pool.submit(lambda: served.post(**LONG))
        until(lambda: served.figure("vllm:num_requests_running") == 1)
        kill_target(engine)
        assert unfinished.result(BOUND).status_code == 503
        until(lambda: httpx.get(f"{served.url}/health", timeout=BOUND).status_code == 503)
        response = served.post()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_lost")


def test_a_loss_is_noticed_while_nobody_asks() -> None:
    with chatting_engine() as engine, Served(engine, bind("127.0.0.1:0", None, 8, None)) as served:
        assert httpx.get(f"{served.url}/health", timeout=BOUND).status_code == 200
        kill_target(engine)
        until(lambda: httpx.get(f"{served.url}/health", timeout=BOUND).status_code == 503)


def kill_target(engine: Engine) -> None:
    os.kill(target_of(engine), signal.SIGKILL)


def target_of(engine: Engine) -> int:
    launcher: Any = engine._launcher
    pid: int = launcher.target.pid
    return pid


def test_a_hung_target_is_noticed_by_who_waits_for_it() -> None:
    """Though another thread watches the engine meanwhile, to whom its silence means nothing."""
    with (
        chatting_engine(target_timeout=5.0, **SLOWLY) as engine,
        Served(engine, bind("127.0.0.1:0", None, 8, None)) as served,
        ThreadPoolExecutor(1) as pool,
    ):
        unfinished = pool.submit(lambda: served.post(**LONG))
        until(lambda: served.figure("vllm:generation_tokens_total") > 0)
        os.kill(target_of(engine), signal.SIGSTOP)
        assert unfinished.result(BOUND).status_code == 503


def test_a_server_that_ends_tells_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is being served has a moment more; then its stream ends with an error, and so do those who wait."""
    monkeypatch.setattr(listen_module, "STOP_SECONDS", 0.2)
    with chatting_engine(**SLOWLY) as engine, ThreadPoolExecutor(2) as pool:
        with Served(engine, bind("127.0.0.1:0", None, 8, None)) as served:
            first = pool.submit(lambda: served.post(stream=True, **LONG))
            until(lambda: served.figure("vllm:generation_tokens_total") > 0)
            second = pool.submit(served.post)
            until(lambda: served.figure("vllm:num_requests_waiting") == 1)
        last = first.result(BOUND).text.strip().split("\n\n")[-1]
        assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert second.result(BOUND).status_code == 503


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 0)])
def test_the_command_serves_until_a_signal(number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "pearl", "serve", "--http", "127.0.0.1:0", "--target", TOY, "--draft", TOY]
    settings = ["--http-model", "toy", "--max-tokens", "5", "--ignore-eos", "--target-pace", "0.3"]
    server = subprocess.Popen([*command, *settings], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    url = next(line.split()[-1] for line in server.stderr if line.startswith("OpenAI's API: "))
    asked = {"model": "toy", "prompt": "123"}
    assert httpx.post(f"{url}/completions", json=asked, timeout=BOUND).json()["usage"]["completion_tokens"] == 5
    asked_long = {**asked, "max_tokens": 500, "stream": True}
    with httpx.stream("POST", f"{url}/completions", json=asked_long, timeout=BOUND) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.send_signal(number)
        assert "shutting_down" in "".join(lines)
    assert server.wait(BOUND) == code
    assert "Traceback" not in server.stderr.read()
    server.stderr.close()
    unit = (Path(__file__).parents[1] / "launch" / "pearl.service").read_text()
    assert code == 0 or f"SuccessExitStatus={code}\n" in unit, "else systemctl stop leaves the unit failed"
    assert f"\n| {code} | |" in (Path(__file__).parents[1] / "pearl" / "protocol" / "README.md").read_text()


def test_a_lack_of_descriptors_is_one_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was thousands of tracebacks a second: asyncio tries as often as connections may wait."""
    resource_module, most = descriptors.resource, descriptors.resource.getrlimit(descriptors.resource.RLIMIT_NOFILE)[1]
    limits: list[object] = []
    monkeypatch.setattr(resource_module, "setrlimit", lambda what, limit: limits.append((what, limit)))

    async def lacks(server: Server) -> None:
        await server.startup([])
        for _ in range(1000):
            error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            context = {"message": "socket.accept() out of system resource", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    with closing(bind("127.0.0.1:0", None, 8, None)) as door, chatting_engine() as engine:
        served = Served(engine, door)
        served.server.config.load()
        monkeypatch.setattr(asyncio, "run", lambda coroutine: coroutine.close())
        door.serve(engine, Settings(engine.config, DecodingConfig(), SamplingParams()))
        monkeypatch.undo()
        served.server.lifespan = served.server.config.lifespan_class(served.server.config)
        asyncio.run(lacks(served.server))
        served.turns.close()
    assert limits == [(resource_module.RLIMIT_NOFILE, (most, most))]
    assert served.server.config.backlog <= 128
    (told,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "Too many open files. Raise the limit" in told.message
    assert told.exc_info is None


def test_the_command_ends_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A while after its target is lost, with the exit code that says so."""
    monkeypatch.setattr(listen_module, "LOST_SECONDS", 0.1)
    with chatting_engine() as engine, ThreadPoolExecutor(1) as pool:
        door = bind("127.0.0.1:0", None, 8, None)
        ended = pool.submit(door.serve, engine, Settings(engine.config, DecodingConfig(), SamplingParams()))
        until(lambda: httpx_answers(f"{door.url}/health"))
        kill_target(engine)
        assert isinstance(ended.exception(BOUND), TargetLost)


def httpx_answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=BOUND).status_code == 200
    except httpx.HTTPError:
        return False


def test_what_the_command_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, before a model loads."""
    monkeypatch.delenv("PEARL_API_KEY", raising=False)
    for arguments, said in (
        (["--http", "0.0.0.0:0"], "takes an API key"),
        (["--http", "nonsense"], "HOST:PORT"),
        (["--http-queue", "3"], "go with --http"),
        (["--http", "127.0.0.1:0", "--draft", "none", "--method", "pearl"], "needs a draft"),
    ):
        run = CliRunner().invoke(cli, ["serve", *arguments])
        assert isinstance(run.exception, ConfigError)
        assert said in str(run.exception)
    for name in [name for name in sys.modules if name.startswith("pearl.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    run = CliRunner().invoke(cli, ["serve", "--http", "127.0.0.1:0"])
    assert isinstance(run.exception, ConfigError)
    assert installing("server") in str(run.exception)


def test_api_errors_are_openais() -> None:
    error = ApiError(429, "later", retry_after=3)
    assert error.headers == {"retry-after": "3"}
    assert error.body == {"error": {"message": "later", "type": "rate_limit_error", "param": None, "code": None}}


# ---- as a service ----

LAUNCH = Path(__file__).parents[1] / "launch"


@pytest.mark.parametrize("name", ["serve.sh", "pearl.service", "Dockerfile"])
def test_what_starts_it_uses_flags_that_there_are(name: str) -> None:
    text = (LAUNCH / name).read_text()
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+(?=[ \"'=,\n])", text))
    ours = {flag for parameter in serve.params for flag in parameter.opts}
    others = {"--timeout", "--retries", "--index-url"}  # pip's
    others |= {"--dry-run", "--build-arg", "--rm", "--gpus", "--now", "--no-cache-dir", "--create-home", "--interval"}
    assert "--http" in used
    assert used <= ours | others | {"--start-period"}, used - ours


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = (LAUNCH / "pearl.service").read_text().replace("/opt/pearl/.venv/bin/pearl", sys.executable)
    (tmp_path / "pearl.service").write_text(unit)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "pearl.service")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, "pearl.service" in run.stderr) == (0, False), run.stderr
