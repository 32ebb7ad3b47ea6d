"""What the HTTP server accepts and refuses by name: fields, messages, tools, bodies, keys, hosts and origins."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import httpx
import hypothesis
import pytest
from hypothesis import strategies as st

from pearl.config import SamplingParams, Settings
from pearl.engine import Engine
from pearl.engine.request import Chat
from pearl.errors import ConfigError
from pearl.server import limits
from pearl.server.errors import ApiError
from pearl.server.listen import bind, name_of
from pearl.server.requests import Setup, read_request
from tests.served import BOUND, MODEL, SETUP, Served, body, message, serving

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 2}}}


def called(arguments: str) -> dict[str, Any]:
    """An assistant's message that is a call, as clients send it back."""
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as served:
        yield served


STRICT = replace(SETUP, is_strict=True)


def refusal(asked: dict[str, Any], is_chat: bool = False, given: Setup = STRICT) -> ApiError | None:
    try:
        read_request(asked, is_chat, given)
    except ApiError as error:
        return error
    return None


# ---- fields ----

SCHEMA = {"type": "json_schema"}
REFUSED: dict[str, list[Any]] = {  # field -> its bad values
    "temperature": ["hot", True, -1, 1e-9],
    "top_p": [0],
    "top_k": [1.5, -2],
    "min_p": [2],
    "seed": [-(2**63) - 1, 2**64, True],
    "max_tokens": [0],
    "n": [0, 1000, True],
    "stop": ["", 3, ["x"] * 65, "x" * 1001],
    "stream": ["yes"],
    "stream_options": [{"include_usage": True}],
    "ignore_eos": [1],
    "model": [3],
    "logprobs": [21, -1, True, 1.0],
    "top_logprobs": [1],
    "presence_penalty": [2.1],
    "frequency_penalty": [False],
    "repetition_penalty": [0],
    "logit_bias": [{"3": 101}, {"3": True}, {"x": 1}, {"3": 1, "03": 1}, {"9" * 5000: 1}, [3]],
    "response_format": [SCHEMA | {"json_schema": {"schema": {"type": "mouse"}}}],
    "structured_outputs": [{"regex": "("}, {"regex": 5}, {"regex": "a", "json": {}}],
    "echo": ["yes"],
    "stop_token_ids": [[-1], ["x"], [1] * 65],
    "speculation": [{"method": "magic"}, {"off": True, "method": "sd"}],
    "guided_json": [{}],
    "truncate_prompt_tokens": [5],
    "suffix": ["x"],
    "best_of": [2],
    "temprature": [1],
    "prompt": ["", [], {}, [1, "x"], [-1]],
    "messages": [[]],
}
NESTED = [  # bad fields, and what is named
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"response_format": "json"}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"response_format": SCHEMA}, "response_format.json_schema"),
    ({"response_format": SCHEMA | {"json_schema": {"name": "x"}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"tools": [{}]}, "tools"),
    ({"speculation": {"window": 0}}, "speculation.window"),
]
IN_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [{}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "f", "color": 1}}]}, "tools[0].function.color"),
    ({"tools": [{"type": "function", "function": {"name": "\ud800"}}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": 3}, "tool_choice"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"chat_template_kwargs": {"x": "\ud800"}}, "chat_template_kwargs"),
]
MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    ("hello", "messages"),
    ([3], "messages[0]"),
    ([message("1", "function")], "messages[0].role"),
    ([message("1") | {"tool_call_id": "1"}], "messages[0].tool_call_id"),
    ([message("1") | {"tool_calls": [CALL]}], "messages[0].tool_calls"),
    ([message("1", "assistant") | {"tool_calls": ["f"]}], "messages[0].tool_calls[0]"),
    ([message("1", "assistant") | {"tool_calls": [CALL | {"type": "x"}]}], "messages[0].tool_calls[0]"),
    ([called("[1]")], "messages[0].tool_calls[0].function.arguments"),
    ([called("{")], "messages[0].tool_calls[0].function.arguments"),
    ([called('{"x": "\\ud800"}')], "messages[0].tool_calls[0]"),
    ([message("1"), message(None, "assistant")], "messages[1].content"),
    ([message([{"type": "image_url", "image_url": {"url": "x"}}])], "messages[0].content[0]"),
    ([message([{"type": "text"}])], "messages[0].content[0].text"),
    ([message("1") | {"function_call": {}}], "messages[0].function_call"),
    ([message("1") | {"mood": "good"}], "messages[0].mood"),
    ([message("\ud800")], "messages[0].content"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_fields_are_refused_by_name(stream: bool) -> None:
    singles = [({field: value}, field) for field, values in REFUSED.items() for value in values]
    for fields, param in singles + NESTED:
        error = refusal(body() | ({} if "stream_options" in fields else {"stream": stream}) | fields)
        assert error is not None, fields
        assert (error.status, error.param, error.body["error"]["type"]) == (400, param, "invalid_request_error")
        assert param in error.message or param == "prompt"
    for fields, param in IN_CHATS + [({"messages": messages}, param) for messages, param in MESSAGES]:
        error = refusal(body("chat/completions") | fields, True)
        assert error is not None, fields
        assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"temperature": "hot"}, "temperature"),
        ("completions", {"max_tokens": 600}, "max_tokens"),
        ("completions", {"prompt": [31, 32]}, "prompt"),
        ("completions", {"prompt": "1" * 512}, "prompt"),
        ("completions", {"logit_bias": {"9999": 1}}, "logit_bias"),
        ("chat/completions", {"logit_bias": {"9999": 1}}, "logit_bias"),
        ("chat/completions", {"messages": [message("1" * 600)]}, "messages"),
        ("chat/completions", {"messages": [message("\ud800")]}, "messages[0].content"),
        ("chat/completions", {"max_tokens": None, "max_completion_tokens": 510}, "max_completion_tokens"),
    ],
)
def test_what_the_engine_refuses_names_the_field_too(
    served: Served, path: str, fields: dict[str, Any], param: str
) -> None:
    """Of a bias beyond the vocabulary the error named the prompt's field."""
    for stream in (False, True):
        response = served.post(path, stream=stream, **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_schema_that_only_a_parser_finds_empty_is_the_clients_fault(served: Served) -> None:
    """The front's, or the model's, whose vocabulary cannot write what fits."""
    for schema, code in (({"$ref": "#"}, None), ({"type": "string", "pattern": "^é\ue000$"}, "GrammarError")):
        response = served.post(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
        assert (response.status_code, response.json()["error"]["code"]) == (400, code), response.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["user", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "include_usage", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = [*body(), *body("chat/completions"), *REFUSED, "top_logprobs", "tools", "tool_choice", "user", "nonsense"]
FIELDS += ["continue_final_message", "chat_template_kwargs", "reasoning_effort", "metadata"]


@hypothesis.given(st.booleans(), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_any_body_is_accepted_or_refused(is_chat: bool, fields: dict[str, Any]) -> None:
    """With an error that names a field of it and can be sent; nothing else is raised."""
    error = refusal(body("chat/completions" if is_chat else "completions") | fields, is_chat)
    if error is not None:
        assert error.status in (400, 404)
        assert error.param is not None
        assert json.dumps(error.body).encode("ascii")


def test_values_without_an_effect_are_accepted(served: Served) -> None:
    nothing: dict[str, Any] = {
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0),
        **dict.fromkeys(("stop", "functions"), None),
        **dict.fromkeys(("logprobs", "echo"), False),
        "top_k": -1,
        "metadata": {"x": "y"},
        "logit_bias": {},
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "best_of": 1,
        "user": "somebody",
        "n": 1,
    }
    assert served.post(**nothing).json()["choices"] == served.post().json()["choices"]


def test_a_model_without_a_chat_template(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.service.engine.tokenizer, "apply_chat", lambda messages: None)
    response = served.post("chat/completions")
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


def test_tools_and_their_calls_reach_the_template() -> None:
    """A call's arguments as an object: templates write JSON of them. Parts of a content are joined to one text."""
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    tool, strict = ({"type": "function", "function": function | more} for more in ({}, {"strict": True}))
    answer = {"role": "tool", "tool_call_id": "1", "content": "5"}
    parts = [{"type": "text", "text": part} for part in "12"]
    asked = body("chat/completions") | {"messages": [message(parts), called('{"x": 2}'), answer]}
    wanted = [message("1\n2"), {"role": "assistant", "content": "", "tool_calls": [CALL]}, answer]
    for tools, prompt in (
        ({"tools": [strict]}, Chat(wanted, [tool])),
        ({"tools": []}, wanted),
        ({"tools": [tool], "tool_choice": "none"}, wanted),
    ):
        assert read_request(asked | tools, True, SETUP).prompts == (prompt,)


def test_defaults_of_max_tokens(served: Served) -> None:
    """/v1/completions writes 16 tokens; a default gives way to the context, a limit set by the client does not."""
    asked: dict[str, Any] = {"model": MODEL, "prompt": "123", "ignore_eos": True}
    longer = replace(SETUP.settings, sampling=SamplingParams(max_tokens=30))
    assert read_request(asked, False, SETUP).params.max_tokens == 16
    assert read_request(asked, False, replace(SETUP, settings=longer)).params.max_tokens == 30
    answer = served.send(json.dumps(asked | {"prompt": "1" * 505}).encode()).json()
    assert answer["usage"]["completion_tokens"] == 7
    error = served.post(max_tokens=510).json()["error"]
    assert error["code"] == "context_length_exceeded"


# ---- paths and bodies ----


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


def test_what_is_accepted_is_described(served: Served) -> None:
    """The fields of both bodies, with bounds, and every status that occurs; each name in it leads somewhere."""
    described = served.get("/openapi.json").json()
    schemas = described["components"]["schemas"]
    fields = {each: schemas[each]["properties"] for each in ("ChatCompletionRequest", "CompletionRequest")}
    assert {"messages", "tools", "top_logprobs", "max_completion_tokens"} <= fields["ChatCompletionRequest"].keys()
    assert {"prompt", "logprobs", "seed", "structured_outputs", "echo"} <= fields["CompletionRequest"].keys()
    assert {"suffix", "best_of"}.isdisjoint(fields["CompletionRequest"])
    assert (fields["CompletionRequest"]["n"]["minimum"], fields["CompletionRequest"]["n"]["maximum"]) == (1, 128)
    assert set(re.findall('"#/components/schemas/(.+?)"', json.dumps(described))) == schemas.keys()
    for path, methods in described["paths"].items():
        for method in methods:
            status = httpx.request(method, served.url + path.replace("{name}", MODEL), timeout=BOUND).status_code
            assert str(status) in methods[method]["responses"], path
    assert "security" not in described


def test_bodies_that_are_no_request(served: Served) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(limits.MOST_BODY // 65536 + 2):
            yield b" " * 65536

    bad: list[bytes] = [b"", b"{", b"[]", b"3", b'{"model": "\xff"}', b"[" * 200_000, b'{"\\ud800": 1}']
    bad += [b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b'{"seed": ' + b"9" * 10_000 + b"}"]
    bad += [b'{"model": "toy-model", "prompt": "1", "temperature": NaN}']
    for content, status in (*((each, 400) for each in bad), (b" " * (limits.MOST_BODY + 1), 413), (endless(), 413)):
        response = served.send(content)
        assert response.status_code == status, content[:50] if isinstance(content, bytes) else ""
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert served.is_well()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": "1 " * 900_000}),
        ("chat/completions", {"messages": [called(json.dumps({"x": "1" * 1_900_000}))]}),
    ],
)
def test_only_part_of_a_far_too_long_prompt_is_encoded(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    """All of it takes seconds, and requests are encoded one after the other."""
    tokenizer, seen = served.service.engine.tokenizer, []
    encode = tokenizer.encode

    def noted(text: str, special: bool = True) -> list[int]:
        seen.append(len(text))
        return encode(text, special)  # type: ignore[no-any-return]

    monkeypatch.setattr(tokenizer, "encode", noted)
    refused = served.post(path, **fields)
    assert refused.status_code == 400
    assert "the context holds" in refused.json()["error"]["message"]
    assert max(seen) <= 1 << 16


# ---- who may ask ----


def test_a_key_is_required(served: Served) -> None:
    with Served(served.service.engine, bind("127.0.0.1:0", "secret", 8, None)) as keyed:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            for path in ("/v1/models", "/v1/timeline", "/v1/nothing"):
                response = keyed.get(path, headers=headers)
                assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert keyed.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        assert keyed.client("secret").completions.create(model=MODEL, prompt="12", max_tokens=2).choices
        assert keyed.get("/health").status_code == 200
        assert keyed.figure("pearl:http_refused_total") == 9


@pytest.mark.parametrize("key", [None, "secret"])
def test_refusals_of_strangers_are_slowed_down_too(
    served: Served, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    """Wrong keys and wrong hosts were not delayed: 2000 a second took a third of a text's speed."""
    monkeypatch.setattr(limits, "BURST", 2)
    monkeypatch.setattr(limits, "A_SECOND", 5.0)
    with Served(served.service.engine, bind("127.0.0.1:0", key, 8, None)) as other:
        wrong = {"Authorization": "Bearer wrong"} if key else {"Host": "elsewhere.example"}
        began = time.monotonic()
        with httpx.Client(timeout=BOUND) as client:
            codes = [client.get(f"{other.url}/v1/models", headers=wrong).status_code for _ in range(6)]
        assert set(codes) == {401 if key else 403}
        assert time.monotonic() - began > 0.7


def test_a_web_page_cannot_reach_the_loopback(served: Served) -> None:
    """Neither under a name of its own that leads here, nor with a form, which may not send JSON."""
    for host, status in (("evil.example", 403), ("localhost", 200), ("127.0.0.1:1", 200), ("[::1]:8000", 200)):
        assert served.get("/v1/models", headers={"host": host}).status_code == status
    form = {"content-type": "text/plain"}
    url = f"{served.url}/v1/completions"
    assert httpx.post(url, content=b"{}", headers=form, timeout=BOUND).status_code == 415


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
    text = httpx.post(f"{served.url}/v1/completions", json=body(), headers=headers, timeout=BOUND)
    with httpx.stream("GET", f"{served.url}/v1/timeline", headers=headers, timeout=BOUND) as timeline:
        assert (text.status_code, timeline.status_code) == (status, status)
    for response in (text, timeline, served.get("/", headers=headers)):
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


def test_a_models_name_does_not_reveal_its_directory(tmp_path: Any) -> None:
    (tmp_path / "llama").mkdir()
    assert name_of(str(tmp_path / "llama")) == "llama"
    assert name_of("someone/llama") == "someone/llama"
