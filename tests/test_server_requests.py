"""What the HTTP server accepts and refuses by name: fields, messages, tools and bodies."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import hypothesis
import pytest
from hypothesis import strategies as st

from pearl.config import SamplingParams
from pearl.engine.request import Chat
from pearl.server import http, responses
from pearl.server.errors import ApiError
from pearl.server.requests import Setup, TextBody, read_request
from pearl.server.schemas import ChatCompletionRequest, CompletionRequest
from tests.served import BOUND, MODEL, SETUP, Served, body, message

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 2}}}


def called(arguments: Any) -> dict[str, Any]:
    """An assistant's message that is a call, as clients send it back."""
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def refusal_of(read: Callable[[], object]) -> ApiError | None:
    try:
        read()
    except ApiError as error:
        return error
    return None


def refusal(
    asked: dict[str, Any], schema: type[TextBody] = CompletionRequest, given: Setup = SETUP
) -> ApiError | None:
    return refusal_of(lambda: read_request(asked, schema, given))


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
    "logprobs": [1, True],
    "presence_penalty": [2.1],
    "frequency_penalty": [False],
    "repetition_penalty": [0],
    "logit_bias": [{"3": 101}, {"3": True}, {"x": 1}, {"3": 1, "03": 1}, {"9" * 5000: 1}, [3]],
    "response_format": [SCHEMA | {"json_schema": {"schema": {"type": "mouse"}}}],
    "structured_outputs": [{"regex": "a"}],
    "echo": ["yes", True],
    "stop_token_ids": [[-1], ["x"], [1] * 65],
    "guided_json": [{}],
    "truncate_prompt_tokens": [5],
    "suffix": ["x"],
    "best_of": [2],
    "prompt": ["", [], {}, [1, "x"], [-1]],
}
NESTED = [  # bad fields, and what is named
    ({"response_format": "json"}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"response_format": SCHEMA}, "response_format.json_schema"),
    ({"response_format": SCHEMA | {"json_schema": {"name": "x"}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"tools": [{}]}, "tools"),
]
IN_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [{}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]},
        "tools[0].function",
    ),
    ({"tools": [{"type": "function", "function": {"name": "\ud800"}}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": 3}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    (
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                },
            }
        },
        "tool_choice",
    ),
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
    ([message("1") | {"reasoning_content": "x"}], "messages[0].reasoning_content"),
    ([message("1", "assistant") | {"tool_calls": ["f"]}], "messages[0].tool_calls[0]"),
    (
        [message("1", "assistant") | {"tool_calls": [CALL | {"type": "x"}]}],
        "messages[0].tool_calls[0]",
    ),
    ([called(5)], "messages[0].tool_calls[0]"),
    ([called("\ud800")], "messages[0].tool_calls[0]"),
    ([message("1"), message(None, "assistant")], "messages[1].content"),
    ([message([{"type": "image_url", "image_url": {"url": "x"}}])], "messages[0].content[0]"),
    ([message([{"type": "text"}])], "messages[0].content[0].text"),
    ([message("1") | {"function_call": {}}], "messages[0].function_call"),
    ([message("\ud800")], "messages[0].content"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_fields_are_refused_by_name(stream: bool) -> None:
    singles = [({field: value}, field) for field, values in REFUSED.items() for value in values]
    for fields, param in singles + NESTED:
        error = refusal(
            body() | ({} if "stream_options" in fields else {"stream": stream}) | fields
        )
        assert error is not None, fields
        assert (error.status, error.param, error.body["error"]["type"]) == (
            400,
            param,
            "invalid_request_error",
        )
        assert param in error.message or param == "prompt"
    for fields, param in IN_CHATS + [
        ({"messages": messages}, param) for messages, param in MESSAGES
    ]:
        error = refusal(body("chat/completions") | fields, ChatCompletionRequest)
        assert error is not None, fields
        assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"temperature": "hot"}, "temperature"),
        ("completions", {"max_tokens": 600}, "max_tokens"),
        ("completions", {"prompt": [31, 32]}, "prompt"),
        ("completions", {"prompt": "1" * 512}, "prompt"),
        ("completions", {"logit_bias": {"32": 1}}, "logit_bias"),
        ("chat/completions", {"logit_bias": {"9999": 1}}, "logit_bias"),
        ("chat/completions", {"messages": [message("1" * 600)]}, "messages"),
        ("chat/completions", {"messages": [message("\ud800")]}, "messages[0].content"),
        (
            "chat/completions",
            {"max_tokens": None, "max_completion_tokens": 510},
            "max_completion_tokens",
        ),
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
    for schema, code in (
        ({"$ref": "#"}, None),
        ({"type": "string", "pattern": "^é\ue000$"}, "GrammarError"),
    ):
        response = served.post(
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        )
        assert (response.status_code, response.json()["error"]["code"]) == (400, code), (
            response.text
        )


NAMES = ["role", "content", "type", "text", "name", "function", "format", "include_usage", "x"]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["user", "assistant", "function", "json", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=6,
)
ITEMS = st.lists(
    st.dictionaries(st.sampled_from([*NAMES, "output", "arguments", "tool_calls", "images"]), JSON)
    | st.fixed_dictionaries(
        {"type": st.sampled_from(["reasoning", "function_call", "function_call_output"])}
    )
    | JSON,
    max_size=4,
)
FIELDS = [
    *body(),
    *body("chat/completions"),
    *REFUSED,
    "top_logprobs",
    "tools",
    "tool_choice",
    "user",
    "nonsense",
]
FIELDS += [
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
    "metadata",
    "previous_response_id",
]
FIELDS += ["input", "text", "reasoning", "stream"]
READERS: dict[str, Callable[[Any], object]] = {
    "completions": lambda asked: read_request(asked, CompletionRequest, SETUP),
    "chat/completions": lambda asked: read_request(asked, ChatCompletionRequest, SETUP),
    "responses": lambda asked: responses.Responses(SETUP).read(asked),
}


@pytest.mark.parametrize("kind", READERS)
@hypothesis.given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON | ITEMS, max_size=4))
def test_any_body_is_accepted_or_refused(kind: str, fields: dict[str, Any]) -> None:
    """With an error that can be sent, and that names a field of OpenAI's; nothing else is raised."""
    asked = body(kind) if "completions" in kind else {"model": MODEL, "input": "Hi"}
    error = refusal_of(lambda: READERS[kind](asked | fields))
    if error is not None:
        assert error.status in (400, 404)
        assert error.param is not None or "completions" not in kind
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


def test_unknown_fields_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """At any depth, and once for each name; not those that would change the text."""
    unknown = {
        "mood": "good",
        "messages": [message("1") | {"color": 3}],
        "prompt_tempo": {"x": 1},
        "store": True,
    }
    for _ in range(2):
        assert refusal(body("chat/completions") | unknown, ChatCompletionRequest, SETUP) is None
    for field in ("mood", "color", "prompt_tempo"):
        assert caplog.text.count(repr(field)) == 1
    assert "store" not in caplog.text
    refused = refusal(body() | {"best_of": 2}, given=SETUP)
    assert refused.code == "unsupported_parameter"
    picture = {"type": "image_url", "image_url": {"url": "x"}}
    refused = refusal(
        body("chat/completions") | {"messages": [message([picture])]}, ChatCompletionRequest, SETUP
    )
    assert "image_url is not supported" in refused.message
    many = refusal(body() | {f"x{number}": 1 for number in range(100_000)}, given=SETUP)
    assert many is None


def test_seeds_and_stop_tokens_of_other_servers(served: Served) -> None:
    """A negative seed is taken as 64 bits. A text ends at any of the given ids; here one is the id of "4"."""
    seeds = [served.post(seed=seed, max_tokens=40).json() for seed in (-3, 2**64 - 3)]
    assert seeds[0]["choices"] == seeds[1]["choices"]
    choice = served.post(max_tokens=40, ignore_eos=True, stop_token_ids=[4]).json()["choices"][0]
    whole = served.post(max_tokens=40, ignore_eos=True).json()["choices"][0]["text"]
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index("4") + 1], "stop")


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    """A `tool_choice` that allows these functions."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_tools_and_their_calls_reach_the_template() -> None:
    """And the reasoning of earlier turns; parts of a content are joined to one text."""
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    tool, strict = (
        {"type": "function", "function": function | more} for more in ({}, {"strict": True})
    )
    other = {"type": "function", "function": {"name": "g"}}
    answer = {"role": "tool", "tool_call_id": "1", "content": "5"}
    parts = [{"type": "text", "text": part} for part in "12"]
    thought = called('{"x": 2}') | {"reasoning_content": "Hm"}
    asked = body("chat/completions") | {"messages": [message(parts), thought, answer]}
    wanted = [message("1\n2"), thought | {"content": ""}, answer]
    for tools, prompt in (
        ({"tools": [strict]}, Chat(wanted, [tool])),
        ({"tools": []}, Chat(wanted, [])),
        ({"tools": [tool], "tool_choice": "none"}, Chat(wanted, [])),
        ({"tools": [tool, other], "tool_choice": allowed("f")}, Chat(wanted, [tool])),
    ):
        assert read_request(asked | tools, ChatCompletionRequest, SETUP).prompts == [prompt]


def test_defaults_of_max_tokens(served: Served) -> None:
    """/v1/completions writes 16 tokens; a default gives way to the context, a limit set by the client does not."""
    asked: dict[str, Any] = {"model": MODEL, "prompt": "123", "ignore_eos": True}
    longer = replace(SETUP, options=SamplingParams(max_tokens=30))
    assert read_request(asked, CompletionRequest, SETUP).params.max_tokens == 16
    assert read_request(asked, CompletionRequest, longer).params.max_tokens == 30
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
    fields = {
        each: schemas[each]["properties"] for each in ("ChatCompletionRequest", "CompletionRequest")
    }
    assert {"messages", "tools", "top_logprobs", "max_completion_tokens"} <= fields[
        "ChatCompletionRequest"
    ].keys()
    assert {"prompt", "seed", "response_format"} <= fields["CompletionRequest"].keys()
    assert {"suffix", "best_of"}.isdisjoint(fields["CompletionRequest"])
    assert (
        fields["CompletionRequest"]["n"]["minimum"],
        fields["CompletionRequest"]["n"]["maximum"],
    ) == (1, 128)
    assert set(re.findall('"#/components/schemas/(.+?)"', json.dumps(described))) == schemas.keys()
    for path, methods in described["paths"].items():
        for method in methods:
            status = httpx.request(
                method, served.url + path.replace("{name}", MODEL), timeout=BOUND
            ).status_code
            assert str(status) in methods[method]["responses"], path
    assert "security" not in described


def test_bodies_that_are_no_request(served: Served) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(http.MOST_BODY // 65536 + 2):
            yield b" " * 65536

    bad: list[bytes] = [
        b"",
        b"{",
        b"[]",
        b"3",
        b'{"model": "\xff"}',
        b"[" * 200_000,
        b'{"\\ud800": 1}',
    ]
    bad += [b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b'{"seed": ' + b"9" * 10_000 + b"}"]
    bad += [b'{"model": "toy-model", "prompt": "1", "temperature": NaN}']
    for content, status in (
        *((each, 400) for each in bad),
        (b" " * (http.MOST_BODY + 1), 413),
        (endless(), 413),
    ):
        response = served.send(content)
        assert response.status_code == status, content[:50] if isinstance(content, bytes) else ""
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert served.is_well()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": "1 " * 900_000}),
        ("chat/completions", {"messages": [{"role": "user", "content": "1" * 1_900_000}]}),
    ],
)
def test_a_far_too_long_prompt_is_not_encoded(
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
    assert max(seen, default=0) <= 1 << 16
