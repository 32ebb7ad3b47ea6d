"""Calls of tools and /v1/responses, against a tiny pair that grammars hold."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import msgspec
import openai
import pytest

from pearl.config import SamplingParams
from pearl.engine import Piece
from pearl.server import responses
from pearl.server.errors import ApiError
from pearl.server.http import ReplyText
from pearl.server.requests import read_request
from pearl.server.schemas import ChatCompletionRequest
from pearl.text.calls import types_of
from pearl.text.reply import ReplyParser, TagParser, parser_of
from pearl.text.tools import FORMATS, forced_schema, format_of, in_words, with_call_ids
from tests.called import ADD, CALLS, NO_CALLS, POINT, SCHEMAS, TEXTS, TOOLS, joined
from tests.served import MODEL, SETUP, Served, message, serving_tools

NAMED = {"type": "function", "function": {"name": "add"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
WRITTEN = 'Well\n<tool_call>\n\\{"name": "add", "arguments": \\{"x": (1|22)\\}\\}\n</tool_call>'  # as an expression


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving_tools() as running:
        yield running


def asked(**fields: Any) -> dict[str, Any]:
    given = {
        "messages": [message("Hi")],
        "tools": TOOLS,
        "max_tokens": 200,
        "temperature": 1.0,
        "seed": 3,
    }
    return given | fields


# ---- formats ----


def parsed(parser: ReplyParser, text: str, size: int = 1000) -> tuple[str, list[list[str]]]:
    """The content and the calls; every character of the text has its place."""
    content, source, calls = "", "", []
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for delta in [*(parser.feed([piece]) for piece in pieces), parser.finish()]:
        content += delta.content
        source += "".join(event.source for event in parser.events)
        for call in delta.calls:
            if call.get("id"):
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return content, calls


def in_format(name: str, text: str, size: int = 1000, **options: Any) -> Any:
    parser = parser_of(None, None, FORMATS[name.partition(" ")[0]], SCHEMAS, **options)
    return parsed(parser, text, size)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", TEXTS)
def test_calls_are_taken_out_of_a_text(name: str, size: int) -> None:
    """Whatever the size of its pieces; one call alone if no more are asked for."""
    content, calls = in_format(name, TEXTS[name], size)
    assert [(called, json.loads(arguments)) for called, arguments in calls] == CALLS
    assert content == ("Sure, a < b." if "Sure" in TEXTS[name] else "")
    assert in_format(name, TEXTS[name], size, max_calls=1) == (content, calls[:1])


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("name", NO_CALLS)
def test_other_texts_stay_as_they_are(name: str, size: int) -> None:
    for text in (NO_CALLS[name], NO_CALLS[name] + " and so on" * 100):
        assert in_format(name, text, size) == (text, [])


@pytest.mark.parametrize("name", TEXTS)
def test_a_call_that_is_cut_has_its_arguments_as_far_as_they_go(name: str) -> None:
    """At any character after the first call's name; its arguments are there as far as they go."""
    text = TEXTS[name]
    whole = in_format(name, text)[1][0][1]
    for end in range(text.index("add") + 4, len(text)):
        content, calls = in_format(name, text[:end], 1)
        assert (content, calls) == in_format(name, text[:end])
        if calls:
            rest = content.removeprefix("Sure, a < b.").lstrip()
            assert whole.startswith(calls[0][1])
            assert text[:end].endswith(rest)
            assert not rest or calls[0][1] == whole, "of a further call nothing is certain yet"


def test_arguments_come_as_they_are_written() -> None:
    """Not at their end, which may be a file's length away."""
    parser = TagParser(None, None, FORMATS["hermes"], SCHEMAS)
    pieces = ('<tool_call>{"name": "add", "arguments": {', '"x": "long', " text")
    calls = [call for piece in pieces for call in parser.feed([piece]).calls]
    assert [call["function"]["arguments"] for call in calls] == ["", '{"x": "long', " text"]
    parser = TagParser(None, None, FORMATS["gemma"], SCHEMAS)
    string = '<|"|>long<|"|>,'
    pieces = ("<|tool_call>call:add{x:[", string, string * 100, "1]}<tool_call|>")
    calls = [call for piece in pieces for call in parser.feed([piece]).calls]
    assert [call["function"]["arguments"] for call in calls] == [
        '{"x": [',
        '"long"',  # a comma is certain once something follows it
        ', "long"' * 100,
        ", 1]}",
    ]
    parser = TagParser(None, None, FORMATS["qwen3_coder"], SCHEMAS)
    pieces = ("<function=add>\n<parameter=x>\n", "long\n", "text</par", "t>")
    calls = [call for piece in pieces for call in parser.feed([piece]).calls]
    assert [call["function"]["arguments"] for call in calls] == [
        '{"x": "',
        "long",
        "\\ntext",
        "</part>",
    ]


MALFORMED = {  # what a model forgot, and the arguments all the same
    "hermes": ('<tool_call>{"name": "add", "arguments": {"x": ["a"</tool_call>', {"x": ["a"]}),
    "hermes with a field of its own": (
        '<tool_call>{"name": "add", "arguments": {"x": 1}, "why": "so"}</tool_call>',
        {"x": 1},
    ),
    "hermes with single quotes": (
        """<tool_call>{"name": "add", "arguments": {'x': "it's", 'y': None}}</tool_call>""",
        {"x": "it's", "y": None},
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"x": {"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
        {"x": {"a": 1}},
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=add>\n<parameter=x>\na\n<parameter=y>\n1\n</function>\n</tool_call>",
        {"x": "a", "y": 1},
    ),
    "seed": (
        "<seed:tool_call><function=add><parameter=x>a\n</function>\n</seed:tool_call>",
        {"x": "a"},
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="x">a\n'
        '<parameter name="y">1</invoke>\n</minimax:tool_call>',
        {"x": "a", "y": 1},
    ),
    "gemma": (
        "<|tool_call>call:add{x:in Rome,y:[1,True<tool_call|>",
        {"x": "in Rome", "y": [1, True]},
    ),
    "gemma with a quoted key": ('<|tool_call>call:add{<|"|>x<|"|>: 1}<tool_call|>', {"x": 1}),
    "gemma with commas that nothing follows": (
        "<|tool_call>call:add{,x:1,,y:[2,],}<tool_call|>",
        {"x": 1, "y": [2]},
    ),
    "gemma without values": ("<|tool_call>call:add{x:,y:}<tool_call|>", {"x": None, "y": None}),
    "gemma without a value and a bracket": ("<|tool_call>call:add{x:<tool_call|>", {"x": None}),
    "lfm2": (
        "<|tool_call_start|>[add(x=true, y=[null])]<|tool_call_end|>",
        {"x": True, "y": [None]},
    ),
    "qwen3_coder with a number that JSON has not": (
        "<tool_call><function=add><parameter=y>NaN</parameter></function></tool_call>",
        {"y": "NaN"},
    ),
}


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("name", MALFORMED)
def test_what_a_model_forgot_costs_no_other_text(name: str, size: int) -> None:
    """A bracket, a closing tag or a quote: all that came behind it was part of the arguments."""
    text, arguments = MALFORMED[name]
    content, calls = in_format(name, f"{text} Done.", size)
    ((called, written),) = calls
    assert (content, called, json.loads(written)) == ("Done.", "add", arguments)


HALF = '"\\ud83d"'  # half a surrogate pair, as JSON and Python write it
HALVES = {  # the texts of each reply's tokens
    "hermes": ["<tool_call>", f'{{"arguments": {{"x": {HALF}}}, "name": "add"}}', "</tool_call>"],
    "hermes with a name of it": ["<tool_call>", f'{{"arguments": {{}}, "name": {HALF}}}'],
    "lfm2": ["<|tool_call_start|>", f"[add(x={HALF})]", "<|tool_call_end|>"],
    "glm": ["<tool_call>", "add", "<arg_key>", "y", "</arg_key>", "<arg_value>", f"[{HALF}]"],
    "qwen3_coder": ["<function=a", "<tool_call>", ">\n<parameter=", "</tool_call>", ">\n1\n"],
    "minimax": ["<minimax:tool_call>", '<invoke name="', "<minimax:tool_call>", '"></invoke>'],
}
HALVES["glm"] += ["</arg_value>", "</tool_call>"]


@pytest.mark.parametrize("name", HALVES)
def test_any_call_can_be_sent(name: str) -> None:
    """UTF-8 has no form for half a surrogate pair, nor for what stands for a special token within."""
    format = FORMATS[name.partition(" ")[0]]
    tokenizer = Mock(tokens=lambda: format.shown)
    reply = ReplyText(0, parser_of(tokenizer, None, format, SCHEMAS))
    for text in HALVES[name]:
        token = format.shown.index(text) if text in format.shown else len(format.shown)
        reply.feed(Piece(text, (token,), texts=(text,)))
    reply.finish()
    msgspec.json.encode(reply.message)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string", "enum": None}, {"string"}),
        ({"type": None, "anyOf": None, "enum": [None, "1"]}, {"string"}),
        ({"type": ["integer", 3], "oneOf": {"type": "string"}}, {"integer"}),
        ({"const": "1"}, {"string"}),
        ({"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]}, {"string", "null"}),
        ({"$ref": "#/$defs/Circle"}, {"integer"}),
        ({"$ref": "#/$defs/Nothing"}, set()),
        (3, set()),
    ],
)
def test_types_of_any_schema(schema: Any, types: set[str]) -> None:
    """A reply ended in an error where its client's schema had a null."""
    circle = {"anyOf": [{"$ref": "#/$defs/Circle"}, {"type": "integer"}]}
    root = {"$defs": {"Zip": {"type": "string"}, "Circle": circle}}
    assert types_of(schema, root) == types


def test_a_template_shows_its_format(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = served.service.engine.tokenizer
    assert format_of(tokenizer) is FORMATS["hermes"]
    assert format_of(tokenizer, "llama3") is FORMATS["llama3"]
    for name, call in TEMPLATES.items():
        monkeypatch.setattr(tokenizer, "chat_template", writing_calls(call))
        assert format_of(tokenizer) is FORMATS[name]
    assert not caplog.records


TEMPLATES = {  # how a template writes a call; some leave it out
    "lfm2": "List of tools: ",
    "tool_calls": "<tool_calls>[{{ c.function | tojson }}]</tool_calls>",
    "mistral": "[TOOL_CALLS]{{ [c.function] | tojson }}",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>",
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.{{ c.function.name }} <|constrain|>json"
    "<|message|>{{ c.function.arguments | tojson }}<|call|>",
    "dsml": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="{{ c.function.name }}">\n'
    '<｜DSML｜parameter name="key" string="true">{{ c.function.arguments.key }}</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
}


def writing_calls(call: str) -> str:
    """A chat template that tells of tools, and writes each call `c` so."""
    calls = f"{{% for c in m.tool_calls or [] %}}{call}{{% endfor %}}"
    return f"{{{{ tools }}}}{{% for m in messages %}}{calls}{{% endfor %}}"


@pytest.mark.parametrize(
    ("call", "format"),
    [
        ("<weird>{{ c.function.name }}(1)</weird>", "hermes"),
        (
            '<tool_call>\n<invoke name="{{ c.function.name }}"><key>{{ c.function.arguments.key }}</key>',
            "hermes",
        ),
        ("<|python_tag|><function=f>{{ c.function.arguments | tojson }}</function>", "llama3"),
    ],
)
def test_a_template_of_another_format_is_told(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    format: str,
) -> None:
    """At start, even if it has a mark of ours: what it writes for a call is read back."""
    monkeypatch.setattr(served.service.engine.tokenizer, "chat_template", writing_calls(call))
    assert format_of(served.service.engine.tokenizer) is FORMATS[format]
    assert repr(format) in caplog.text
    assert "--tool-parser names another format" in caplog.text


def test_kimis_calls_have_the_ids_that_its_template_writes_for_their_names() -> None:
    """In a whole conversation, whatever ids its client gave them; a result has that of its call."""
    call = {"type": "function", "id": "a", "function": {"name": "add", "arguments": "{}"}}
    other = {"type": "function", "id": "b", "function": {"name": "stop", "arguments": "{}"}}
    history = [
        message("Hi"),
        message("", "assistant") | {"tool_calls": [call, other]},
        message("2", "tool") | {"tool_call_id": "b"},
        message("1", "tool") | {"tool_call_id": "a"},
        message("", "assistant") | {"tool_calls": [call | {"id": "c"}]},
        message("3", "tool") | {"tool_call_id": "c"},
    ]
    body = {"model": MODEL, "messages": history}
    setup = replace(SETUP, tools=FORMATS["kimi"])
    (chat,) = read_request(body, ChatCompletionRequest, setup).prompts
    ids = []
    for entry in chat.messages:
        ids += [call["id"] for call in entry.get("tool_calls", ())]
        if entry["role"] == "tool":
            ids.append(entry["tool_call_id"])
    first = ["functions.add:0", "functions.stop:1"]
    assert ids == [*first, *reversed(first), "functions.add:2", "functions.add:2"]
    (chat,) = read_request(body, ChatCompletionRequest, SETUP).prompts
    assert chat.messages[1]["tool_calls"][0]["id"] == "a"


def test_mistrals_templates_get_ids_that_they_take() -> None:
    """Nine letters and digits, whatever another model or a client has made of them."""
    call = {"type": "function", "id": "call_1", "function": {"name": "add", "arguments": "{}"}}
    history = [
        message("Hi"),
        message("", "assistant") | {"tool_calls": [call, call | {"id": "toolu_2"}]},
        message("2", "tool") | {"tool_call_id": "toolu_2"},
    ]
    renamed = with_call_ids(history, FORMATS["mistral"])
    ids = [entry["id"] for entry in renamed[1]["tool_calls"]]
    assert ids == ["000000000", "000000001"]
    assert renamed[2]["tool_call_id"] == ids[1]


def test_references_of_a_schema_lead_to_the_same_place() -> None:
    (call,) = forced_schema([ADD], "arguments")["anyOf"]
    moved = call["properties"]["arguments"]["properties"]["at"]["$ref"]
    assert moved == "#/anyOf/0/properties/arguments/$defs/Point"
    assert call["properties"]["arguments"]["$defs"]["Point"] == POINT


# ---- chats ----


@pytest.mark.parametrize("choice", ["required", NAMED, ALLOWED])
def test_calls_that_must_be_made_fit_their_schema(served: Served, choice: Any) -> None:
    """Whole and streamed; the model is random, so that only the grammar makes it so."""
    names = set()
    for seed in range(3):
        fields = asked(seed=seed, tool_choice=choice)
        (choice_made,) = served.post("chat/completions", **fields).json()["choices"]
        assert choice_made["finish_reason"] == "tool_calls"
        made = choice_made["message"]
        assert made["content"] is None
        (call,) = made["tool_calls"]
        assert (call["type"], len(call["id"])) == ("function", 9)
        arguments = json.loads(call["function"]["arguments"])
        names.add(call["function"]["name"])
        assert arguments == {} or (
            arguments["x"] in (1, 22) and arguments["at"]["y"] in (True, False)
        )
        chunks = served.events("chat/completions", **fields)
        assert [call["function"] for call in joined(chunks)] == [call["function"]]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert names <= ({"add", "stop"} if choice == "required" else {"add"})


def test_calls_that_the_model_chooses_to_make(served: Served) -> None:
    """Content before them; streamed as deltas that add up."""
    with served.writing(f"{WRITTEN}({WRITTEN[5:]})?"):
        _check_chosen_calls(served, asked())


def _check_chosen_calls(served: Served, fields: dict[str, Any]) -> None:
    (choice,) = served.post("chat/completions", **fields).json()["choices"]
    calls = choice["message"]["tool_calls"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Well", "tool_calls")
    assert {call["function"]["name"] for call in calls} == {"add"}
    chunks = served.events("chat/completions", **fields)
    assert [call["function"] for call in joined(chunks)] == [call["function"] for call in calls]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Well"
    for other in ({"tool_choice": "none"}, {"tools": []}):
        (choice,) = served.post("chat/completions", **fields | other).json()["choices"]
        assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("stop", False)
    (cut,) = served.post("chat/completions", **fields | {"max_tokens": 48}).json()["choices"]
    assert cut["finish_reason"] == "length"
    limits = {"max_output_tokens": 48, "temperature": 1.0, "seed": 3}
    items = served.post("responses", tools=FUNCTIONS, **limits).json()["output"]
    statuses = [item["status"] for item in items]
    assert statuses == ["completed"] * (len(items) - 1) + ["incomplete"]
    assert len(items) > 1
    (held,) = served.post(
        "chat/completions", **fields, response_format={"type": "json_object"}
    ).json()["choices"]
    assert held["message"]["content"].startswith("{"), (
        "a request's own grammar is kept to in place of the server's"
    )
    refused = served.post("chat/completions", **fields, ignore_eos=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "regex")


def test_openais_client_runs_a_tool(served: Served) -> None:
    """A call, its result, and the next call; as a stream, too."""
    client = served.client().chat.completions
    given: Any = {
        "model": MODEL,
        "tools": TOOLS,
        "tool_choice": "required",
        "max_tokens": 200,
        "temperature": 1,
        "seed": 1,
    }
    history: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "Eva"},
    ]
    first = client.create(messages=history, **given).choices[0].message
    assert first.tool_calls
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "5"}
    second = client.create(
        messages=[*history, first.model_dump(), result], parallel_tool_calls=False, **given
    )
    assert second.choices[0].finish_reason == "tool_calls"
    with client.stream(messages=history, **given) as events:
        streamed = events.get_final_completion().choices[0].message.tool_calls
    assert [call.function.arguments for call in streamed or []] == [
        first.tool_calls[0].function.arguments
    ]
    with pytest.raises(openai.BadRequestError, match="not in tools"):
        client.create(
            messages=history,
            **given | {"tool_choice": {"type": "function", "function": {"name": "x"}}},
        )
    odd = [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": 3}}},
        }
    ]
    with pytest.raises(openai.BadRequestError) as refused:
        client.create(messages=history, **given | {"tools": odd})
    assert refused.value.param == "tools"


def test_a_template_without_tools_gets_them_in_words(served: Served) -> None:
    """In its system message; results of calls are a user's, and one message, for templates want turns."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    results = [{"role": "tool", "tool_call_id": "1", "content": text} for text in ("5", "6")]
    history = [
        message("Be brief.", "system"),
        message("Hi"),
        message("", "assistant") | {"tool_calls": [call]},
        *results,
    ]
    system, user, assistant, told = in_words(history, TOOLS)
    assert '"name": "add"' in system["content"]
    assert system["content"].endswith("Be brief.")
    assert (user, assistant["content"]) == (message("Hi"), CALL)
    assert told == message(
        "<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response>"
    )
    assert in_words([message("Hi")], TOOLS, "user")[0]["content"].endswith("Hi")


def test_what_a_reply_begins_with_is_part_of_the_prompt(served: Served) -> None:
    """A continued message, and variables of the template."""
    encode, decode = served.service.engine.encode, served.service.engine.tokenizer.decode
    body = {"model": MODEL, "messages": [message("Hi"), message("I am", "assistant")]}
    (prompt,) = read_request(
        body | {"continue_final_message": True}, ChatCompletionRequest, SETUP
    ).prompts
    assert decode(encode(prompt)).endswith("assistant\nI am")
    (prompt,) = read_request(
        body | {"chat_template_kwargs": {"mood": "Joy"}}, ChatCompletionRequest, SETUP
    ).prompts
    assert decode(encode(prompt)).endswith("assistant\nJoy")
    (prompt,) = read_request(
        body | {"reasoning_effort": "none"}, ChatCompletionRequest, SETUP
    ).prompts
    assert prompt.variables == {"reasoning_effort": "none", "enable_thinking": False}


def test_special_tokens_of_a_format_are_part_of_the_text(served: Served) -> None:
    """[TOOL_CALLS] is one in Mistral's vocabularies, and had no text."""
    engine, params = (
        served.service.engine,
        SamplingParams(temperature=1, seed=1, max_tokens=6, logit_bias={2: 100.0}),
    )
    (hidden,) = engine.generate("ab", params)
    (shown,) = engine.generate("ab", params, show=["<|start|>"])
    assert hidden.tokens == shown.tokens == [2] * 6
    assert (hidden.text, shown.text) == ("", "<|start|>" * 6)


# ---- /v1/responses ----

FUNCTIONS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]


def test_a_response_and_its_events(served: Served) -> None:
    """In OpenAI's order, numbered; their text is that of the whole response, and of a chat."""
    client = served.client().responses
    given: Any = {
        "model": MODEL,
        "input": "Hi",
        "max_output_tokens": 12,
        "temperature": 1.0,
        "extra_body": {"seed": 4},
    }
    whole = client.create(**given, instructions="Be brief.", metadata={"a": "b"})
    history = [message("Be brief.", "system"), message("Hi")]
    chat = served.post("chat/completions", messages=history, max_tokens=12, temperature=1.0, seed=4)
    assert whole.output_text == chat.json()["choices"][0]["message"]["content"]
    assert (whole.status, whole.metadata, whole.instructions) == (
        "incomplete",
        {"a": "b"},
        "Be brief.",
    )
    assert whole.usage.output_tokens == 12
    events = list(client.create(**given, instructions="Be brief.", stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [f"response.{kind}" for kind in
                         ("created", "in_progress", "output_item.added", "content_part.added")]  # fmt: skip
    ends = ("output_text.done", "content_part.done", "output_item.done", "incomplete")
    assert kinds[-4:] == [f"response.{kind}" for kind in ends]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text  # type: ignore[union-attr]
    assert events[-1].response.output_text == whole.output_text  # type: ignore[union-attr]


def test_a_response_calls_functions_and_is_continued(served: Served) -> None:
    client = served.client().responses
    given: Any = {"model": MODEL, "tools": FUNCTIONS, "temperature": 1.0, "extra_body": {"seed": 4}}
    first = client.create(input="Hi", tool_choice={"type": "function", "name": "add"}, **given)
    (call,) = first.output
    subset: Any = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "add"}],
    }
    (allowed_call,) = client.create(input="Hi", tool_choice=subset, **given).output
    assert allowed_call.type == call.type == "function_call"
    assert allowed_call.name == call.name == "add"
    assert json.loads(call.arguments)["x"] in (1, 22)
    assert first.status == "completed"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    sent = {"tool_choice": "required", **given}
    continued = client.create(input=[result], previous_response_id=first.id, **sent)
    again = client.create(input=[message("Hi"), call.model_dump(), result], **sent)
    assert continued.usage.input_tokens == again.usage.input_tokens
    message_first: list[Any] = [
        {"type": "reasoning", "summary": [{"text": "Hm"}]},
        message("Well", "assistant"),
    ]
    (one,) = responses.chat_messages([*message_first, call.model_dump(), result])[:-1]
    assert (one["reasoning_content"], one["content"], len(one["tool_calls"])) == ("Hm", "Well", 1)
    with client.stream(
        input="Hi", tool_choice="required", model=MODEL, tools=FUNCTIONS, temperature=1.0
    ) as events:
        kinds = [event.type for event in events]
        (streamed,) = events.get_final_response().output
    assert streamed.type == "function_call"
    json.loads(streamed.arguments)
    assert kinds[2:4] == ["response.output_item.added", "response.function_call_arguments.delta"]
    assert kinds[-3:] == [f"response.{end}" for end in
                          ("function_call_arguments.done", "output_item.done", "completed")]  # fmt: skip


def test_responses_that_are_kept_are_bounded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "MOST_KEPT", 2)
    client = served.client().responses
    ids = [
        client.create(model=MODEL, input="Hi", max_output_tokens=2, store=number != 3).id
        for number in range(4)
    ]
    for id, is_kept in zip(ids, (False, True, True, False), strict=True):
        status = served.post(
            "responses", input="And?", previous_response_id=id, prompt=None, max_tokens=None
        ).status_code
        assert status == (200 if is_kept else 404)
        monkeypatch.setattr(responses, "MOST_KEPT", 100)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 3}, "input"),
        ({"input": [{"type": "image"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.content[0]",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [{"type": "custom", "name": "patch"}],
                "tool_choice": {"type": "custom", "name": "patch"},
            },
            "tool_choice",
        ),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_responses_refuse_they_name(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    refused = served.post("responses", **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


# ---- any body ----


@pytest.mark.parametrize("depth", [100, 600, 5000])
def test_values_may_be_nested_deep(depth: int) -> None:
    """Python's own limit was an internal error."""
    deep: dict[str, Any] = {}
    for _ in range(depth):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    called = message("", "assistant") | {
        "tool_calls": [{"function": {"name": "f", "arguments": deep}}]
    }
    asked = {"model": MODEL, "messages": [message("Hi")]}
    for read, body in (
        (
            lambda body: read_request(body, ChatCompletionRequest, SETUP),
            asked | {"tools": [tool], "tool_choice": "required"},
        ),
        (
            responses.Responses(SETUP).read,
            {"model": MODEL, "input": "Hi", "metadata": {"a": deep}, "text": deep},
        ),
        (
            lambda body: read_request(body, ChatCompletionRequest, SETUP),
            asked | {"messages": [called]},
        ),
    ):
        with suppress(ApiError):
            read(body)
