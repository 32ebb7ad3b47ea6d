"""Who may use the HTTP server: keys, hosts, origins and addresses; and the log of who did."""

import re
import socket
from typing import Any, cast

import httpx
import pytest

from pearl.config import RequestOptions
from pearl.engine import Engine
from pearl.errors import ConfigError
from pearl.server.listen import bind, name_of
from pearl.server.request_log import show_requests
from tests.conftest import eventually
from tests.served import BOUND, MODEL, Served, body, raw_post


def test_a_key_is_required(served: Served) -> None:
    with Served(served.service.engine, bind("127.0.0.1:0", "secret")) as keyed:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            for path in ("/v1/models", "/v1/timeline", "/v1/nothing"):
                response = keyed.get(path, headers=headers)
                assert (response.status_code, response.json()["error"]["code"]) == (
                    401,
                    "invalid_api_key",
                )
        assert (
            keyed.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        )
        assert (
            keyed.client("secret")
            .completions.create(model=MODEL, prompt="12", max_tokens=2)
            .choices
        )
        assert keyed.get("/health").status_code == 200
        assert keyed.figure("pearl:http_refused_total") == 9


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),  # a name of its own that leads here
        *(({"host": host}, 200) for host in ("localhost", "127.0.0.1:1", "[::1]:8000")),
        ({"content-type": "text/plain"}, 415),  # as a form, which may not send JSON
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
def test_a_page_of_another_host_or_origin_gets_no_text_and_no_timeline(
    served: Served, headers: dict[str, str], status: int
) -> None:
    """Frames on the timeline began it and took its viewers' places; only the host was looked at."""
    headers = {"host": "127.0.0.1"} | headers
    text = httpx.post(f"{served.url}/v1/completions", json=body(), headers=headers, timeout=BOUND)
    with httpx.stream(
        "GET", f"{served.url}/v1/timeline", headers=headers, timeout=BOUND
    ) as timeline:
        assert (text.status_code, timeline.status_code) == (
            status,
            200 if status == 415 else status,
        )
    for response in (text, timeline, served.get("/", headers=headers)):
        assert response.headers["cross-origin-resource-policy"] == "same-origin"
        assert "frame-ancestors 'none'" in response.headers["content-security-policy"]


def test_pages_of_named_origins_may_ask(served: Served) -> None:
    """The browser asks first, without the key; others get no permission."""
    page, url = "http://localhost:3000", "/v1/completions"
    with Served(served.service.engine, bind("127.0.0.1:0", "secret", origins=(page,))) as shared:
        for origin, is_named in ((page, True), ("http://evil.example", False)):
            headers = {"origin": origin, "sec-fetch-site": "cross-site"}
            asks = {
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization",
            }
            before = httpx.options(shared.url + url, headers=headers | asks, timeout=BOUND)
            assert (before.status_code == 200) == is_named
            headers["authorization"] = "Bearer secret"
            text = httpx.post(shared.url + url, json=body(), headers=headers, timeout=BOUND)
            assert text.status_code == (200 if is_named else 403)
            for answer in (before, text):
                assert answer.headers.get("access-control-allow-origin") == (
                    page if is_named else None
                )
    with pytest.raises(ConfigError, match="--cors"):
        bind("127.0.0.1:0", origins=("*",))


def test_a_request_is_a_line_in_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    show_requests(True)
    served.post(max_tokens=12, ignore_eos=True)
    served.events("chat/completions", max_tokens=12, ignore_eos=True)
    served.post(temperature=-1)
    with served.held():
        with served.connection() as client:
            client.sendall(raw_post(body()))
            served.until_running(1)
        eventually(lambda: caplog.text.count("POST") == 4)
    lines = [record.getMessage() for record in caplog.records if record.name == "pearl.requests"]
    wanted = rf"model={MODEL} seconds=\S+ prompt=\d+ completion=12 tokens/s=\S+ ttft=\S+( acceptance=\S+)?"
    for line, path in zip(lines, ("completions", "chat/completions"), strict=False):
        assert re.fullmatch(f"POST /v1/{path} 200 {wanted}", line)
    assert lines[2].startswith("POST /v1/completions 400 temperature: ")
    assert lines[3].startswith(f"POST /v1/completions 499 model={MODEL}")
    show_requests(False)
    served.post()
    assert caplog.text.count("POST") == 4


def test_addresses() -> None:
    with pytest.raises(ConfigError, match="takes an API key"):
        bind("0.0.0.0:0")
    bind("0.0.0.0:0", "secret").close()
    for wrong in ("8000", "127.0.0.1", "127.0.0.1:99999", "::1:80", "a b:1"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            bind(wrong)
    for key in ("", "two words", "ümlaut"):
        with pytest.raises(ConfigError, match="API key"):
            bind("127.0.0.1:0", key)
    door = bind("localhost:0")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match="cannot listen"),
    ):
        bind(f"127.0.0.1:{taken.getsockname()[1]}")
    other = bind(f"127.0.0.1:{door.bound.getsockname()[1]}")
    door.bound.listen()
    with pytest.raises(ConfigError, match="cannot listen"):
        other.serve(cast(Engine, None), RequestOptions())
    other.close()
    door.close()


def test_a_models_name_does_not_reveal_its_directory(tmp_path: Any) -> None:
    (tmp_path / "llama").mkdir()
    assert name_of(str(tmp_path / "llama")) == "llama"
    assert name_of("someone/llama") == "someone/llama"
