"""What models write, said by a script behind the real server: whole and streamed, by single characters and at once."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pearl.server.http import without
from pearl.server.listen import bind
from pearl.text.tokenizer import FileTokenizer
from pearl.text.tools import FORMATS
from tests.called import CALLS as TWO_CALLS
from tests.called import NO_CALLS, SCHEMAS, TEXTS, joined
from tests.replies import HARMONY_TEXTS, Case, with_tokens
from tests.served import Served, message

PARAMETERS = {
    "type": "object",
    "properties": {
        "key": {"type": "string"},
        "limit": {"type": "integer"},
        "where": {"$ref": "#/$defs/Where"},
    },
    "$defs": {"Where": {"type": "object"}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "lookup", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]
RED = ("lookup", {"key": "red"})
HERMES = '<tool_call>\n{"name": "lookup", "arguments": {"key": "red"}}\n</tool_call>'
FUNCTIONS: list[Any] = []
for function, schema in SCHEMAS.items():
    FUNCTIONS.append({"type": "function", "function": {"name": function, "parameters": schema}})
THINK = ("<think>", "</think>")
CALL = ("<tool_call>", "</tool_call>")


def qwen(*parameters: str) -> str:
    values = "".join(parameters)
    return f"<tool_call>\n<function=lookup>\n{values}</function>\n</tool_call>"


HARMONY = FORMATS["harmony"].shown
CASES = {
    "a tag in prose": Case(
        "A call starts with <tool_call> here. " + "word " * 90 + "\n" + HERMES,
        "A call starts with <tool_call> here. " + ("word " * 90).strip(),
        calls=[RED],
    ),
    "a tag in prose that is a token": Case(
        "A call starts with <tool_call> here. " + HERMES,
        "A call starts with <tool_call> here.",
        calls=[RED],
        tokens=CALL,
    ),
    "a sentence between calls": Case(
        f"{HERMES} And this one. {HERMES}", "And this one.", calls=[RED, RED]
    ),
    "text on both sides": Case(
        f"Before it. {HERMES} After it.", "Before it.  After it.", calls=[RED]
    ),
    "arguments as text": Case(
        '<tool_call>{"name": "lookup", "arguments": "{\\"key\\": \\"red\\"}"}</tool_call>',
        calls=[RED],
    ),
    "arguments null": Case(
        '<tool_call>{"name": "stop", "arguments": null}</tool_call>', calls=[("stop", {})]
    ),
    "no arguments": Case('<tool_call>{"name": "stop"}</tool_call>', calls=[("stop", {})]),
    "arguments first": Case(
        '<tool_call>{"arguments": {"key": "red"}, "name": "lookup"}</tool_call>', calls=[RED]
    ),
    "a fence": Case(
        '<tool_call>\n```json\n{"name": "lookup", "arguments": {"key": "red"}}\n```\n</tool_call>',
        calls=[RED],
    ),
    "a word of prose": Case(
        '<tool_call>\nSure: {"name": "lookup", "arguments": {"key": "red"}}\n</tool_call>',
        calls=[RED],
    ),
    "a value without a name": Case('[lookup("red")]', calls=[RED], parser="pythonic"),
    "more values than the schema has": Case(
        '[lookup("red", 1, {}, 2)]', '[lookup("red", 1, {}, 2)]', parser="pythonic"
    ),
    "qwen's types": Case(
        "I look.\n"
        + qwen(
            "<parameter=key>\na < b\n\n</parameter> or\n</parameter>\n",
            "<parameter=limit>\n3\n</parameter>\n",
            '<parameter=where>\n{"a": [true]}\n</parameter>\n',
        ),
        "I look.",
        calls=[("lookup", {"key": "a < b\n\n</parameter> or", "limit": 3, "where": {"a": [True]}})],
        parser="qwen3_coder",
        tokens=CALL,
    ),
    "glm's types": Case(
        "<tool_call>lookup\n<arg_key>key</arg_key>\n<arg_value>3</arg_value>\n<arg_key>limit</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        calls=[("lookup", {"key": "3", "limit": 3})],
        parser="glm",
        tokens=FORMATS["glm"].shown,
    ),
    "a call before the end of the reasoning": Case(
        f"<think>\nLook it up.\n{HERMES}\n</think>\n\nDone.",
        "Done.",
        "Look it up.",
        [RED],
        tags="think",
        tokens=(*THINK, *CALL),
    ),
    "a quoted end": Case(
        "<think>\nIt ends with `</think>`, they say.\n</think>\n\nYes: `<think>`.",
        "Yes: `<think>`.",
        "It ends with `</think>`, they say.",
        tags="think",
        tokens=THINK,
    ),
    "a second block": Case(
        "<think>One.</think>First. <think>Two.</think>Second.",
        "First.\n\nSecond.",
        "One.\n\nTwo.",
        tags="think",
        tokens=THINK,
    ),
    "magistral": Case(
        "[THINK]Hm.[/THINK]Yes.",
        "Yes.",
        "Hm.",
        tags="mistral",
        tokens=("[THINK]", "[/THINK]"),
        special=True,
    ),
    "gemma": Case(
        '<|channel>thought\nHm.<channel|><|tool_call>call:lookup{key:<|"|>r "e" {d<|"|>,limit:3}<tool_call|>',
        "",
        "Hm.",
        [("lookup", {"key": 'r "e" {d', "limit": 3})],
        parser="gemma",
        tags="gemma",
        tokens=("<|channel>", "<channel|>", *FORMATS["gemma"].shown),
        special=True,
    ),
    "cohere": Case(
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        "Yes.",
        "Hm.",
        tags="cohere",
        tokens=("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        special=True,
    ),
    "seed": Case(
        "<seed:think>Hm.</seed:think>\n<seed:tool_call>\n<function=lookup>\n<parameter=key>red</parameter>\n"
        "</function>\n</seed:tool_call>",
        "",
        "Hm.",
        [RED],
        parser="seed",
        tags="seed",
        tokens=("<seed:think>", "</seed:think>", *FORMATS["seed"].shown),
        special=True,
    ),
    "the user's own tags": Case(
        "<reason>Hm.</reason>Yes.", "Yes.", "Hm.", tags="<reason> </reason>"
    ),
    "a continued thought": Case(
        " the whole.</think>Yes.",
        "Yes.",
        "the whole.",
        tags="think",
        tokens=THINK,
        begun="<think>part of",
    ),
    "a continued thought that the template opens": Case(
        " the whole.</think>Yes.",
        "Yes.",
        "the whole.",
        tags="think",
        begun="<think>part of",
        opening="<think>\n",
    ),
    "a continued answer": Case(
        " am.", " am.", tags="think", tokens=THINK, begun="I", opening="<think>\n"
    ),
    "a thought that the template opens": Case(
        "Hm, `</think>`.\n</think>\n\nYes.",
        "Yes.",
        "Hm, `</think>`.",
        tags="think",
        tokens=THINK,
        opening="<think>\n",
    ),
    "tags alone": Case("<think></think>", tags="think", tokens=THINK, special=True),
    "harmony": Case(
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>finally, the word assistantfinal<|end|><|start|>assistant"
        '<|channel|>analysis to=functions.lookup <|constrain|>json<|message|>{"key": "red"}<|call|>',
        "finally, the word assistantfinal",
        "One.\n\nTwo.",
        [RED],
        parser="harmony",
        tags="harmony",
        tokens=HARMONY,
        special=True,
    ),
}


def tokens_of(tokenizer: FileTokenizer, case: Case, by_character: bool = False) -> list[int]:
    """The reply as the model writes it: a quoted tag of several tokens.

    Args:
        by_character: whether all but the case's own tokens is written by characters.
    """
    names = "|".join(map(re.escape, sorted(case.tokens, key=len, reverse=True)))
    tokens = []
    for part in re.split(f"(`[^`\n]*`|{names})", case.text):
        is_quote = part.startswith("`") and part.endswith("`") and case.tokens
        if is_quote or (by_character and part not in case.tokens):
            for character in part:
                tokens += tokenizer.encode(character, special=False)
        else:
            tokens += tokenizer.encode(part, special=False)
    return tokens


@contextmanager
def behind(served: Served, case: Case, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    engine = served.service.engine
    monkeypatch.setattr(engine, "tokenizer", with_tokens(case))
    with Served(engine, bind("127.0.0.1:0", tool_parser=case.parser)) as server:
        yield server


@pytest.mark.parametrize("name", CASES)
def test_what_models_write(served: Served, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    with behind(served, case, monkeypatch) as server:
        _check_replies(server, case, TOOLS)


@pytest.mark.parametrize("name", [*TEXTS, *(f"no call: {name}" for name in NO_CALLS)])
def test_each_format_of_calls(served: Served, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the marks of calls are special tokens; of texts without calls, where they are text."""
    parser = name.removeprefix("no call: ").partition(" ")[0]
    if name in TEXTS:
        content = "Sure, a < b." if "Sure" in TEXTS[name] else ""
        marks = FORMATS[parser].shown
        case = Case(
            TEXTS[name], content, calls=TWO_CALLS, parser=parser, tokens=marks, special=True
        )
    else:
        text = NO_CALLS[name.removeprefix("no call: ")]
        case = Case(text, text, parser=parser)
    with behind(served, case, monkeypatch) as server:
        _check_replies(server, case, FUNCTIONS)


@pytest.mark.parametrize("name", HARMONY_TEXTS)
def test_each_message_of_harmony(
    served: Served, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, (reasoning, content, functions) = HARMONY_TEXTS[name]
    calls = [(call["name"], json.loads(call["arguments"])) for call in functions]
    case = Case(text, content, reasoning, calls, "harmony", "harmony", HARMONY, special=True)
    with behind(served, case, monkeypatch) as server:
        _check_replies(server, case, FUNCTIONS)


def _check_replies(server: Served, case: Case, tools: list[Any]) -> None:
    """Check the reply in chats and responses, whole and streamed, by characters, some and all at once."""
    fields: dict[str, Any] = {"messages": [message("Hi")], "tools": tools, "max_tokens": None}
    if case.begun:
        fields["messages"].append(message(case.begun, "assistant"))
        fields["continue_final_message"] = True
    tokenizer = server.service.engine.tokenizer
    characters = tokens_of(tokenizer, case, by_character=True)
    tokens = tokens_of(tokenizer, case)
    for script, step in ((characters, 1), (characters, 25), (tokens, len(tokens))):
        with server.saying(script, step):
            (choice,) = server.post("chat/completions", **fields).json()["choices"]
            chunks = server.events("chat/completions", **fields)
            if not case.begun and step > 1:
                functions = [{"type": "function", **tool["function"]} for tool in tools]
                response = server.post("responses", tools=functions)
                _check_response(response.json()["output"], case)
                streamed = server.post("responses", tools=functions, stream=True)
                assert _streamed_items(streamed.text) == without_ids(response.json()["output"])
        reply = choice["message"]
        calls = [call["function"] for call in reply.get("tool_calls", ())]
        assert (reply["content"] or "") == case.content
        assert reply.get("reasoning_content", "") == case.reasoning
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == case.calls
        assert choice["finish_reason"] == ("tool_calls" if case.calls else "stop")
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        for key, text in (("content", case.content), ("reasoning_content", case.reasoning)):
            assert "".join(delta.get(key, "") for delta in deltas) == text
        assert [call["function"] for call in joined(chunks)] == calls


def _streamed_items(stream: str) -> list[Any]:
    """Return the items of a streamed response. A client that joins their events gets the same."""
    items: list[Any] = []
    for lines in stream.strip().split("\n\n"):
        event = json.loads(lines.partition("data: ")[2])
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            items.append(event["item"])
        elif kind == "content_part.added":
            items[event["output_index"]]["content"].append(event["part"])
        elif kind == "function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif kind.endswith("text.delta"):
            items[event["output_index"]]["content"][0]["text"] += event["delta"]
    assert event["type"] == "response.completed"
    output = event["response"]["output"]
    assert without_ids(items, "status") == without_ids(output, "status")
    return without_ids(output)


def without_ids(items: list[Any], *others: str) -> list[Any]:
    """Return items without their ids, which differ from reply to reply, and without `others`."""
    return [without(item, "id", "call_id", *others) for item in items]


def _check_response(items: list[Any], case: Case) -> None:
    texts = {"message": "", "reasoning": ""}
    calls = []
    for item in items:
        if item["type"] == "function_call":
            calls.append((item["name"], json.loads(item["arguments"])))
        else:
            texts[item["type"]] += "".join(part["text"] for part in item["content"])
    assert (texts["message"], texts["reasoning"], calls) == (
        case.content,
        case.reasoning,
        case.calls,
    )
