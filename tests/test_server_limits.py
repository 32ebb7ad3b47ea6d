"""Clients of the HTTP server that leave, crowd or misbehave: others are served, and memory and time stay bounded."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from pearl.server import http
from pearl.server.listen import bind
from tests.conftest import eventually
from tests.served import BOUND, LONG, MODEL, SLOWLY, Served, body, raw_post, received, serving


@pytest.fixture(scope="module")
def slow() -> Iterator[Served]:
    """`LONG` takes many seconds."""
    with serving(**SLOWLY) as served:
        yield served


# ---- clients that leave ----


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_text(slow: Served, stream: bool) -> None:
    made, aborted = (
        slow.figure("vllm:generation_tokens_total"),
        slow.figure("vllm:request_success_total", "abort"),
    )
    if stream:
        asked: dict[str, Any] = {"model": MODEL, "prompt": "123", "max_tokens": 400}
        with slow.client().completions.create(
            stream=True, extra_body={"ignore_eos": True}, **asked
        ) as chunks:
            next(iter(chunks))
    else:
        with slow.connection() as client:
            client.sendall(raw_post(body() | LONG))
            slow.until_running()
    slow.until_running(0)
    assert slow.figure("vllm:request_success_total", "abort") == aborted + 1
    assert slow.figure("vllm:generation_tokens_total") - made < 400
    assert slow.is_well()


def test_one_that_waits_may_leave(slow: Served) -> None:
    with ThreadPoolExecutor() as pool:
        with slow.held():
            first = pool.submit(slow.post, max_tokens=10, ignore_eos=True)
            slow.until_running()
            with slow.connection() as waiting:
                waiting.sendall(raw_post(body()))
                slow.until_running(waiting=1)
            slow.until_running(waiting=0)
            second = pool.submit(slow.post)
            slow.until_running(waiting=1)
        assert first.result(BOUND).json()["usage"]["completion_tokens"] == 10
        assert second.result(BOUND).status_code == 200


# ---- bodies ----


def test_a_slow_body_is_not_waited_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_SECONDS", 0.3)
    assert answer(served, raw_post(body())[:-5]).startswith(b"HTTP/1.1 408")
    assert served.is_well()


# ---- connections ----


def answer(served: Served, sent: bytes) -> bytes:
    """What comes back until the server closes the connection."""
    with served.connection() as client:
        with suppress(OSError):  # refused while it sends
            client.sendall(sent)
        return received(client)


def test_headers_are_bounded(served: Served) -> None:
    many = b"".join(b"x-%d: %s\r\n" % (number, b"a" * 100) for number in range(10_000))
    for head in (
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + many + b"\r\n",
        b"GET /" + b"a" * 1_000_000,
    ):
        got = answer(served, head)
        assert got == b"" or got.startswith(b"HTTP/1.1 400"), got[:100]
    assert answer(served, b"\x16\x03\x01 what is this\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert served.is_well()


GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


def test_connections_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def are_open(count: int) -> None:
        eventually(lambda: len(served.server.server_state.connections) == count)

    are_open(0)
    monkeypatch.setattr(served.server.config, "limit_concurrency", 16)
    with ExitStack() as opened:
        for others, opening, wanted in ((14, 14, b"HTTP/1.1 200"), (15, 1, b"HTTP/1.1 503")):
            for _ in range(opening):
                opened.enter_context(served.connection())
            are_open(others)
            assert answer(served, GET).startswith(wanted)
    eventually(served.is_well)


def test_a_connection_that_sends_nothing_is_closed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.server.config, "timeout_keep_alive", 0.3)
    assert answer(served, b"") == b""


def test_garbage_behind_an_early_answer(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """uvicorn would answer it a second time, and fail."""
    head = b"POST /v1/nothing HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    with served.connection() as client:
        client.sendall(head)
        assert client.recv(4096).startswith(b"HTTP/1.1 404")
        client.sendall(b"zz\r\n")
        with suppress(OSError):
            received(client)
    assert served.is_well()
    assert "Fatal error" not in caplog.text


def test_a_client_that_does_not_read_delays_nobody(served: Served) -> None:
    """Its text is written at the engine's pace, and the next one begins."""
    door = bind("127.0.0.1:0")
    door.bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
    with Served(served.service.engine, door) as other, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(other.address)
        client.settimeout(BOUND)
        client.sendall(raw_post(body() | LONG | {"stream": True}))
        eventually(lambda: other.figure("vllm:generation_tokens_total") > 0)
        assert other.is_well()
        other.until_running(0)
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            got += client.recv(65536)
        assert b"[DONE]" in got, "all of it was kept"


def test_garbage_in_the_middle_of_an_answer(slow: Served) -> None:
    with slow.connection() as client:
        client.sendall(raw_post(body() | LONG | {"stream": True}))
        client.recv(100)
        client.sendall(b"\x00garbage\r\n\r\n" * 100)
    slow.until_running(0)
    assert slow.is_well()
