"""Calls of tools in a model's text: the formats that models write, and a splitter that takes calls out of a text.

A chat template that renders tools shows the format of its model. For other templates the system prompt describes the
tools, in Hermes' format: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pearl.text.reasoning import decided, entry_for

if TYPE_CHECKING:
    from pearl.text.stream import Tokenizer

_MAX_HEAD = 400  # characters from where calls may begin to the arguments of the first; after that it is plain text
_NAMED = r'"name"\s*:\s*"([^"]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
_LEFT_OVER = re.compile(  # marks of formats that follow calls
    r'(?:</?tool_calls?>|<｜[^｜]*｜>|```|"id"\s*:\s*"[^"]*"|[\s\]},;)])*'
)


def _as_json(arguments: str) -> str:
    """Convert Python's keyword arguments, such as (a=1, b="x"), to a JSON object; return other text as it is."""
    try:
        call = ast.parse(f"f{arguments}", mode="eval").body
        assert isinstance(call, ast.Call)
        values = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        return json.dumps(values, ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return arguments


@dataclass(frozen=True)
class Format:
    """How a model writes calls.

    Attributes:
        marks: strings of which a model's chat template has one if the model writes this format.
        start: the string that begins the calls of a text.
        head: an expression that matches up to a call's arguments; a group is the function's name.
        prefix: begins a reply that must be a call: {"name": ..., `key`: ...} follows it.
        leads: whether calls stand at the beginning of a text or nowhere, and name a function that the request has, for
            texts without calls have `start`, too.
        convert: makes JSON of the whole arguments of a call; None: they are JSON.
        shown: special tokens that are part of the format; they have no text otherwise.
    """

    marks: tuple[str, ...]
    start: str
    head: str = _NAMED
    prefix: str = ""
    key: str = "arguments"
    leads: bool = False
    convert: Callable[[str], str] | None = None
    shown: tuple[str, ...] = ()


# Every format that is read, by its name in `--tool-parser`; of several in one template the first.
FORMATS = {
    "hermes": Format(("<tool_call>",), "<tool_call>", prefix="<tool_call>\n"),
    "mistral": Format(
        ("[TOOL_CALLS]",),
        "[TOOL_CALLS]",
        rf"\[TOOL_CALLS\]\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{{)|{_NAMED}",
        prefix="[TOOL_CALLS][",
        shown=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
    "deepseek": Format(
        ("<｜tool▁calls▁begin｜>",),
        "<｜tool▁calls▁begin｜>",
        r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^\s<]+)(?:<｜tool▁sep｜>|\s*```json)\s*(?=\{)",
        shown=(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    "pythonic": Format(
        ("[func_name1(", "<|python_start|>"),
        "[",
        r"[\[,]\s*([A-Za-z_][\w.]*)(?=\()",
        leads=True,
        convert=_as_json,
    ),
    # gpt-oss; its special tokens have no text, and `pearl.text.reasoning` takes the channel's name.
    "harmony": Format(
        ("to=functions.",),
        "to=functions.",
        r"to=functions\.([\w.-]+?)(?:\s*commentary)?\s*(?:json|code)?\s*(?=\{)",
    ),
    "llama3": Format(
        ("<|python_tag|>", '{"name": function name'), "{", key="parameters", leads=True
    ),
}
_PROBE = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object"}},
}


def knows_tools(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template tells its model of tools."""
    question = [{"role": "user", "content": "?"}]
    return tokenizer.chat_text(question, [_PROBE]) != tokenizer.chat_text(question)


def format_of(tokenizer: Tokenizer, name: str = "auto") -> Format:
    """Return the format `name`; for "auto" the chat template's, and `hermes` if the template shows none."""
    if name != "auto":
        return FORMATS[name]
    template = tokenizer.tool_template or tokenizer.chat_template
    if not template or not knows_tools(tokenizer):
        return FORMATS["hermes"]
    format: Format = entry_for(template, FORMATS) or FORMATS["hermes"]
    return format


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
    """Return the messages with tools, calls and results as text.

    Args:
        role: the role of the message, the first one, that describes the tools.
    """
    functions = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    instructions = _INSTRUCTIONS.format("\n".join(functions))
    texts: list[dict[str, Any]] = []
    for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:  # one message, for templates may want users and assistants in turns
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
    """Return the JSON schema of a call of one of the functions, name before arguments (`key`)."""
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
    """Return a schema whose references begin at its own root, for the place `path` in a document."""
    if isinstance(schema, list):
        return [_moved(entry, path) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, path) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = path + reference[1:]
    return moved


# ---- calls in a text ----


# In OpenAI's notation; if a call comes in parts, only the first has its name and id.
Call = dict[str, Any]


class CallSplitter:
    """Takes calls out of a text that comes in pieces of any size.

    Args:
        names: names of the functions that the model was told of.
        is_forced: whether the prompt has begun the call.
        most: the number of calls after which further ones are dropped; None for no limit.
    """

    def __init__(
        self,
        format: Format,
        names: Collection[str],
        is_forced: bool = False,
        most: int | None = None,
    ) -> None:
        self._format = format
        self._names = names
        self._max_calls = most
        self._head = re.compile(_NAMED if is_forced else format.head)
        self._step = self._find_head if is_forced else self._find_start
        self._convert = None if is_forced else format.convert
        self._pending = ""  # text that may be the beginning of a call
        self._text = ""
        self._calls: list[Call] = []  # parts that are known with this piece
        self._count = 0  # of calls so far
        self._end = _ArgumentsEnd()  # of the arguments that are being read
        self._unconverted = ""  # these arguments, if they are converted as a whole

    def feed(self, piece: str, is_last: bool = False) -> tuple[str, list[Call]]:
        """Take the next piece; return the text outside of calls, and the parts of calls, that become final with it."""
        self._pending += piece
        self._text = ""
        self._calls = []
        while self._step(is_last):
            pass
        return self._text, self._calls

    def _find_start(self, is_last: bool) -> bool:
        before, start, _ = self._pending.partition(self._format.start)
        if self._format.leads and before.strip():
            self._step = self._pass_on
            return True
        length = len(before)
        if start:
            length = len(before.rstrip())
            self._step = self._find_head
        elif not is_last:
            length = decided(before, self._format.start)
        self._text += self._pending[:length]
        self._pending = self._pending[length:]
        return bool(start)

    def _find_head(self, is_last: bool) -> bool:
        head = self._head.search(self._pending)
        if head is None and not is_last and len(self._pending) <= _MAX_HEAD:
            return False
        name = head.group(head.lastindex or 0) if head is not None else ""
        if head is None or not name or (self._format.leads and name not in self._names):
            if self._count:  # no further call
                self._pending = _LEFT_OVER.sub("", self._pending, count=1)
            self._step = self._pass_on
            return True
        self._pending = self._pending[head.end() :]
        self._begin_call(name)
        return True

    def _begin_call(self, name: str) -> None:
        self._end = _ArgumentsEnd()
        self._unconverted = ""
        self._step = self._take_arguments
        self._count += 1
        if self._is_within_limit:
            # Nine letters and digits: Mistral's templates take no other id.
            id = secrets.token_hex(5)[:9]
            function = {"name": name, "arguments": ""}
            call = {"index": self._count - 1, "id": id, "type": "function", "function": function}
            self._calls.append(call)

    def _take_arguments(self, is_last: bool) -> bool:
        end = self._end.find(self._pending)
        arguments = self._pending[:end]
        self._pending = "" if end is None else self._pending[end:]
        if self._convert is not None:
            self._unconverted += arguments
            arguments = ""
            if end is not None or is_last:
                arguments = self._convert(self._unconverted)
        if arguments and self._is_within_limit:
            if not self._calls:
                self._calls.append({"index": self._count - 1, "function": {"arguments": ""}})
            self._calls[-1]["function"]["arguments"] += arguments
        if end is None:
            return False
        self._step = self._find_head
        return True

    def _pass_on(self, is_last: bool) -> bool:
        self._text += self._pending
        self._pending = ""
        return False

    @property
    def _is_within_limit(self) -> bool:
        return self._max_calls is None or self._count <= self._max_calls


class _ArgumentsEnd:
    """Finds the end of arguments, where brackets balance outside of strings, in a text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """Return the index after the closing bracket in the next piece, `text`; None if the piece has none."""
        for index, character in enumerate(text):
            if self._quote:
                if self._is_escaped or character == "\\":
                    self._is_escaped = not self._is_escaped
                elif character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            elif character in "{[(":
                self._depth += 1
            elif character in "}])":
                self._depth -= 1
                if not self._depth:
                    return index + 1
        return None
