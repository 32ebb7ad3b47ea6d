"""The formats in which models write calls of tools, and the description of tools in a prompt.

A chat template that renders tools shows the format of its model. For other templates the system prompt describes the
tools, in Hermes' format: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import regex
from msgspec import Struct, toml

from pearl.errors import RequestError
from pearl.text.calls import (
    NEVER,
    Cursor,
    NamedCall,
    Reading,
    Schemas,
    TaggedCall,
    read_block,
    read_gemma,
    read_known_object,
    read_object,
    read_python,
    value_in,
)
from pearl.text.marks import Marks
from pearl.text.reasoning import entries_for

if TYPE_CHECKING:
    from pearl.text.stream import Tokenizer, Tools

log = logging.getLogger(__name__)

# A call as OpenAI's API has it. If it is streamed in parts, only the first part has the name and the id.
Call = dict[str, Any]


# Readers of a call that have no settings.
_READERS = {
    "object": read_object,
    "known_object": read_known_object,
    "python": read_python,
    "gemma": read_gemma,
}


class Format(Struct, frozen=True, forbid_unknown_fields=True):
    """How a model writes calls; calls.toml has all formats.

    Expressions contain names as `regex.escape` writes them.

    Attributes:
        marks: a model writes this format if its chat template contains one of these strings.
        start: an expression that matches where calls may begin.
        opening, between, closing: expressions for the text around calls, as `read_block` takes
            them.
        call: the name in `_READERS` of the function that reads a call; unused if `named` or
            `tagged` is set.
        prefix: the beginning of a reply that must be a call. The model continues it with {"name":
            ..., `key`: ...}.
        key: the name of the field with the arguments.
        leads: whether calls count only at the beginning of the content, and only if they name a
            function of the request. This is set if `start` is also found in texts without calls.
        shown: names that may be special tokens of a vocabulary. Only these special tokens are
            decoded to their names; all others are decoded to nothing.
        call_id: the form of the ids of calls in a conversation; empty if the template needs none.
            It is needed if the template writes a call's id in place of its function, or refuses ids
            of another form. It may contain {name} and {number}, which counts the calls from 0.
        is_harmony: whether calls are messages of the harmony format, which `pearl.text.reply`
            reads.
    """

    marks: tuple[str, ...]
    shown: tuple[str, ...]
    start: str = NEVER
    opening: str = NEVER
    between: str = NEVER
    closing: str = NEVER
    call: str = "object"
    named: NamedCall | None = None
    tagged: TaggedCall | None = None
    prefix: str = ""
    key: str = "arguments"
    leads: bool = False
    call_id: str = ""
    is_harmony: bool = False

    def read(self, cursor: Cursor, schemas: Schemas) -> Reading:
        """Read calls from a text that begins with `start`."""
        call = self.named or self.tagged or _READERS[self.call]
        return read_block(cursor, schemas, self.opening, call, self.between, self.closing)

    def read_forced(self, cursor: Cursor, schemas: Schemas) -> Reading:
        """Read a call that the prompt has begun with `prefix`."""
        return read_block(cursor, schemas, r"\s*(?=\{)", read_object)


_TABLES = Path(__file__).with_name("calls.toml")
# All formats, by their names in `--tool-parser`. If a template has marks of several, the first one counts.
FORMATS = toml.decode(_TABLES.read_bytes(), type=dict[str, Format])
# A call that a chat template is made to write.
_PROBE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
_QUESTION = {"role": "user", "content": "?"}
_CALLED: dict[str, Any] = {"name": "lookup", "arguments": {"key": "crimson"}}
_TALK = (
    _QUESTION,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "a1b2c3d4e", "type": "function", "function": _CALLED}],
    },
    {"role": "tool", "name": "lookup", "tool_call_id": "a1b2c3d4e", "content": "1"},
)


def knows_tools(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template describes tools to the model."""
    prompt = _prompt(tokenizer, [_QUESTION], [_PROBE])
    return prompt is not None and prompt != _prompt(tokenizer, [_QUESTION])


def _prompt(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Tools = None
) -> str | None:
    """Return the prompt of a conversation; None if the chat template does not accept it."""
    try:
        return tokenizer.chat_text(messages, tools)
    except RequestError:
        return None


def reads_template(format: Format, tokenizer: Tokenizer) -> bool:
    """Return whether a format can read a call that the chat template has written.

    If the template writes no call, this is True. A template may have the mark of one format and
    write another: MiniMax M3 writes <tool_call>, too, but no JSON in it.
    """
    text = _prompt(tokenizer, with_call_ids(_TALK, format), [_PROBE])
    if text is None or _CALLED["arguments"]["key"] not in text:
        return True
    if format.is_harmony:
        return "to=functions.lookup" in text
    calls = []
    for start in regex.finditer(format.start, text):
        calls.append(_read_probe(format, text[start.start() :]))
    return _CALLED in calls


def _read_probe(format: Format, text: str) -> dict[str, Any]:
    """Return the call with which `text` begins, as `format` reads it."""
    cursor = Cursor(Marks(()))
    cursor.text = text
    cursor.is_last = True
    name = ""
    arguments = ""
    for part in format.read(cursor, {"lookup": _PROBE["function"]["parameters"]}):
        if part is not None:
            name += part.name
            arguments += part.arguments
    return {"name": name, "arguments": value_in(arguments)}


def format_of(tokenizer: Tokenizer, name: str = "auto") -> Format:
    """Return the format `name`; for "auto", the format that the chat template writes.

    If the template shows no format, this is `hermes`.
    """
    if name != "auto":
        return FORMATS[name]
    template = tokenizer.tool_template or tokenizer.chat_template
    if not template or not knows_tools(tokenizer):
        return FORMATS["hermes"]
    formats = entries_for(template, FORMATS)
    for format in formats.values():
        if reads_template(format, tokenizer):
            return format
    name = next(iter(formats), "hermes")
    log.warning(
        "the chat template writes calls of tools in a format that is not known here: calls are read as those of %r, "
        "all else is text; --tool-parser names another format",
        name,
    )
    return FORMATS[name]


def with_call_ids(messages: Sequence[dict[str, Any]], format: Format) -> list[dict[str, Any]]:
    """Return the messages, with each call's id in the form that the format's template can read.

    The new ids replace the ids that the client has chosen.
    """
    if not format.call_id:
        return list(messages)
    renamed = []
    ids = {}
    number = 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            id = format.call_id.format(name=call["function"]["name"], number=number)
            number += 1
            ids[call.get("id")] = id
            calls.append(call | {"id": id})
        if calls:
            message = message | {"tool_calls": calls}
        answered = message.get("tool_call_id")
        if answered in ids:
            message = message | {"tool_call_id": ids[answered]}
        renamed.append(message)
    return renamed


# ---- for templates that leave tools out ----

_INSTRUCTIONS = """You can call these functions, each given as JSON:
{}

To call one, write its name and its arguments as JSON between tags, once for each call, and nothing after that:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>
The result then comes between <tool_response> and </tool_response>."""


def in_words(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], role: str = "system"
) -> list[dict[str, Any]]:
    """Return the messages with tools, calls and results written as text.

    Args:
        role: the role of the first message, which describes the tools.
    """
    functions = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    instructions = _INSTRUCTIONS.format("\n".join(functions))
    texts = []
    for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:  # in one message: a template may require that user and assistant alternate
            results = []
            for message in group:
                results.append(f"<tool_response>\n{message.get('content')}\n</tool_response>")
            texts.append({"role": "user", "content": "\n".join(results)})
        else:
            texts += [_with_calls_in_words(message) for message in group]
    if texts and texts[0]["role"] == role:
        texts[0]["content"] = f"{instructions}\n\n{texts[0]['content']}"
    else:
        texts.insert(0, {"role": role, "content": instructions})
    return texts


def _with_calls_in_words(message: Mapping[str, Any]) -> dict[str, Any]:
    parts = []
    if message.get("content"):
        parts.append(message["content"])
    for call in message.get("tool_calls") or ():
        parts.append(_written(call["function"]))
    fields = {**message, "content": "\n".join(parts)}
    fields.pop("tool_calls", None)
    return fields


def _written(function: Mapping[str, Any]) -> str:
    name = json.dumps(function["name"])
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


# ---- calls that must be made ----


def forced_schema(functions: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """Return the JSON schema of a call of one of the functions.

    In a call the name comes first, then the arguments, in the field `key`.
    """
    calls = []
    for number, function in enumerate(functions):
        path = f"#/anyOf/{number}/properties/{key}"
        arguments = _moved(function.get("parameters") or {"type": "object"}, path)
        properties = {"name": {"const": function["name"]}, key: {"type": "object"} | arguments}
        call = {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
        calls.append(call)
    return {"anyOf": calls}


def _moved(schema: Any, path: str) -> Any:
    """Return a copy of a schema for the place `path` in a larger document.

    The schema's references, which begin at its own root, begin at `path` in the copy: "#/$defs/Point" becomes
    "#/anyOf/0/$defs/Point" for the path "#/anyOf/0".
    """
    if isinstance(schema, list):
        return [_moved(entry, path) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, path) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = path + reference[1:]
    return moved
