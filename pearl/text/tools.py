"""Calls of tools in a model's text: the formats that models write, and a splitter that takes calls out of a text.

A chat template that renders tools shows which format its model writes. For other templates the tools are described in
the system prompt, in Hermes' format.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pearl.text.reasoning import decided

if TYPE_CHECKING:
    from pearl.text.stream import Tokenizer

_MOST_HEAD = 400  # characters from where calls may begin to the arguments of the first; after that it is plain text
_NAMED = r'"name"\s*:\s*"([^"]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
_LEFT_OVER = re.compile(  # what formats put behind calls
    r'(?:</?tool_calls?>|<｜[^｜]*｜>|```|"id"\s*:\s*"[^"]*"|[\s\]},;)])*'
)


@dataclass(frozen=True)
class Format:
    """How a model writes calls.

    Attributes:
        marks: what a chat template has whose model writes them so, any of these.
        start: what begins the calls of a text.
        head: matches up to a call's arguments; a group is the function's name.
        prefix: begins a reply that must be a call: behind it comes {"name": ..., `key`: ...}.
        leads: calls stand at the beginning of a text or nowhere, and name a function that the request has: `start` is
            no mark of calls alone.
        is_python: arguments are Python's keywords, not JSON.
        shown: special tokens that are part of the format; they have no text otherwise.
    """

    marks: tuple[str, ...]
    start: str
    head: str = _NAMED
    prefix: str = ""
    key: str = "arguments"
    leads: bool = False
    is_python: bool = False
    shown: tuple[str, ...] = ()


_DEEPSEEK = tuple(
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)
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
        shown=_DEEPSEEK,
    ),
    "pythonic": Format(
        ("[func_name1(", "<|python_start|>"),
        "[",
        r"[\[,]\s*([A-Za-z_][\w.]*)(?=\()",
        leads=True,
        is_python=True,
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
    """Whether the chat template tells its model of tools."""
    question = [{"role": "user", "content": "?"}]
    return tokenizer.chat_text(question, [_PROBE]) != tokenizer.chat_text(question)


def format_of(tokenizer: Tokenizer, name: str = "auto") -> Format:
    """The format `name`; auto: that of the chat template, and `hermes` where it shows none."""
    if name != "auto":
        return FORMATS[name]
    template = tokenizer.tool_template or tokenizer.chat_template
    if not template or not knows_tools(tokenizer):
        return FORMATS["hermes"]
    return next(
        (one for one in FORMATS.values() if any(mark in template for mark in one.marks)),
        FORMATS["hermes"],
    )


# ---- for templates that leave tools out ----

_TOLD = """You can call these functions, each given as JSON:
{}

To call one, write its name and its arguments as JSON between tags, once for each call, and nothing after that:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>
The result then comes between <tool_response> and </tool_response>."""


def in_words(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], role: str = "system"
) -> list[dict[str, Any]]:
    """The messages with tools, calls and results as text. `role`: whose message, the first one, has the tools."""
    told = _TOLD.format(
        "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    )
    made: list[dict[str, Any]] = []
    for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:  # one message, for templates may want users and assistants in turns
            results = (
                f"<tool_response>\n{message.get('content')}\n</tool_response>" for message in group
            )
            made.append({"role": "user", "content": "\n".join(results)})
        else:
            made += [_with_calls_in_words(message) for message in group]
    if not made or made[0]["role"] != role:
        return [{"role": role, "content": told}, *made]
    return [{**made[0], "content": f"{told}\n\n{made[0]['content']}"}, *made[1:]]


def _with_calls_in_words(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [_written(call["function"]) for call in message.get("tool_calls") or ()]
    parts = filter(None, (message.get("content"), *calls))
    return {
        **{name: value for name, value in message.items() if name != "tool_calls"},
        "content": "\n".join(parts),
    }


def _written(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments")
    given = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {given}}}\n</tool_call>'


# ---- calls that must be made ----


def forced_schema(functions: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """The JSON schema of a call of one of the functions, name before arguments (`key`)."""

    def call(number: int, function: Mapping[str, Any]) -> dict[str, Any]:
        at = f"#/anyOf/{number}/properties/{key}"
        arguments = _moved(function.get("parameters") or {"type": "object"}, at)
        properties = {"name": {"const": function["name"]}, key: {"type": "object"} | arguments}
        return {
            "type": "object",
            "properties": properties,
            "required": [*properties],
            "additionalProperties": False,
        }

    return {"anyOf": [call(number, function) for number, function in enumerate(functions)]}


def _moved(schema: Any, to: str) -> Any:
    """A schema whose references begin at its own root, for another place in a document."""
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, dict):
        return schema
    is_here = isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#")
    moved = {name: _moved(value, to) for name, value in schema.items()}
    return moved | {"$ref": to + schema["$ref"][1:]} if is_here else moved


# ---- calls in a text ----


Call = dict[
    str, Any
]  # in OpenAI's notation; of a call that comes in parts only the first has its name and id


class CallSplitter:
    """Takes calls out of a text that comes in pieces of any size.

    Args:
        names: of the functions that the model was told of.
        is_forced: the prompt has begun the call.
        most: further calls are dropped.
    """

    def __init__(
        self,
        format: Format,
        names: Collection[str],
        is_forced: bool = False,
        most: int | None = None,
    ) -> None:
        self._format, self._names, self._most = format, names, most
        self._head = re.compile(_NAMED if is_forced else format.head)
        self._step = self._find_head if is_forced else self._find_start
        self._is_python = format.is_python and not is_forced
        self._pending = ""  # text that may be the beginning of a call
        self._text = ""
        self._calls: list[Call] = []  # parts that are known with this piece
        self._count = 0  # of calls so far
        self._end, self._held = _End(), ""  # of the arguments that are being read

    def feed(self, piece: str, is_last: bool = False) -> tuple[str, list[Call]]:
        """The text besides calls, and the parts of calls, that are known with this piece and were not before."""
        self._pending += piece
        self._text, self._calls = "", []
        while self._step(is_last):
            pass
        return self._text, self._calls

    def _find_start(self, is_last: bool) -> bool:
        before, start, _ = self._pending.partition(self._format.start)
        if self._format.leads and before.strip():
            self._step = self._pass_on
            return True
        size = (
            len(before.rstrip())
            if start
            else len(before)
            if is_last
            else decided(before, self._format.start)
        )
        self._text, self._pending = self._text + self._pending[:size], self._pending[size:]
        self._step = self._find_head if start else self._find_start
        return bool(start)

    def _find_head(self, is_last: bool) -> bool:
        found = self._head.search(self._pending)
        if (
            found
            and (name := found.group(found.lastindex or 0))
            and (not self._format.leads or name in self._names)
        ):
            self._pending = self._pending[found.end() :]
            self._end, self._held, self._step = _End(), "", self._take_arguments
            self._count += 1
            if self._is_wanted:
                # Nine letters and digits: Mistral's templates take no other id.
                id = secrets.token_hex(5)[:9]
                function = {"name": name, "arguments": ""}
                self._calls.append(
                    {"index": self._count - 1, "id": id, "type": "function", "function": function}
                )
            return True
        if not found and not is_last and len(self._pending) <= _MOST_HEAD:
            return False
        if self._count:  # no further call
            self._pending = _LEFT_OVER.sub("", self._pending, count=1)
        self._step = self._pass_on
        return True

    def _take_arguments(self, is_last: bool) -> bool:
        end = self._end.find(self._pending)
        taken, self._pending = self._pending[:end], "" if end is None else self._pending[end:]
        if self._is_python:  # whose arguments are converted as a whole
            self._held += taken
            taken = _as_json(self._held) if end is not None or is_last else ""
        if taken and self._is_wanted:
            if not self._calls:
                self._calls.append({"index": self._count - 1, "function": {"arguments": ""}})
            self._calls[-1]["function"]["arguments"] += taken
        if end is not None:
            self._step = self._find_head
        return end is not None

    def _pass_on(self, is_last: bool) -> bool:
        self._text, self._pending = self._text + self._pending, ""
        return False

    @property
    def _is_wanted(self) -> bool:
        return self._most is None or self._count <= self._most


class _End:
    """Finds where brackets balance outside of strings, in a text that comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._quote, self._is_escaped = 0, "", False

    def find(self, text: str) -> int | None:
        """The index behind the closing bracket in the next piece, `text`."""
        for at, character in enumerate(text):
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
                    return at + 1
        return None


def _as_json(arguments: str) -> str:
    """Python's keyword arguments, with their parentheses, as a JSON object; other text as it is."""
    try:
        call = ast.parse(f"f{arguments}", mode="eval").body
        assert isinstance(call, ast.Call)
        return json.dumps(
            {str(word.arg): ast.literal_eval(word.value) for word in call.keywords},
            ensure_ascii=False,
        )
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return arguments
