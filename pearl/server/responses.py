"""/v1/responses: its requests as chats, and chats' texts as its items and events, in OpenAI's order."""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from pearl.engine import Piece, Result
from pearl.server.bodies import (
    MOST_MESSAGES,
    MOST_TOOLS,
    UNSERVED,
    ChatCompletionRequest,
    SharedRequest,
)
from pearl.server.errors import ApiError
from pearl.server.fields import Text, check_text, validate
from pearl.server.http import Answer
from pearl.server.requests import Setup, TextRequest, read_request
from pearl.text.tools import Call

MOST_KEPT, MOST_CHARACTERS = (
    1000,
    64 << 20,
)  # responses that can be continued, and of their conversations as JSON
_NEITHER: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("conversation", "prompt", "messages", "max_tokens", "max_completion_tokens"), ()
    ),
    "background": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled", "auto"),
}
# Fields of a chat -> what they are called here. Messages have other numbers than items.
_CALLED = {
    re.compile(r"^messages(\[\d+\])?(?=\W|$)"): "input",
    re.compile("^max_completion_tokens"): "max_output_tokens",
    re.compile("^response_format"): "text.format",
}


class ResponsesRequest(SharedRequest):
    unserved: ClassVar = {**UNSERVED, **_NEITHER}
    n: Literal[1] = 1
    input: Text | list[dict[str, Any]] = Field(
        description="A text, or items: messages, calls of functions, outputs."
    )
    instructions: Text | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    previous_response_id: str | None = Field(
        default=None, description="Continues this response, if it is kept."
    )
    store: bool = Field(
        default=True, description="Keep this response, in memory, so that another can continue it."
    )
    metadata: dict[str, Any] = Field(default={}, max_length=16)
    reasoning: dict[str, Any] = Field(default={}, description="effort, for the chat template.")
    text: dict[str, Any] = Field(default={}, description="format: text, json_object, json_schema.")
    tools: list[dict[str, Any]] = Field(
        default=[], max_length=MOST_TOOLS, description="Of type function."
    )
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True

    _is_text = field_validator(
        "input", "metadata", "reasoning", "text", "tools", "tool_choice", mode="before"
    )(check_text)

    def chat(self, body: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The body of the chat that is asked for. `messages`: those that come from `input` and before."""
        shared = self.model_fields_set & ChatCompletionRequest.known - {
            "tools",
            "tool_choice",
            "stream_options",
        }
        format, choice = self.text.get("format") or {}, self.tool_choice
        if isinstance(format, dict) and format.get("type") == "json_schema":
            format = {
                "type": "json_schema",
                "json_schema": {k: v for k, v in format.items() if k != "type"},
            }
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        told = (
            [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        )
        return {name: body[name] for name in shared} | {
            "messages": [*told, *messages],
            "max_completion_tokens": self.max_output_tokens,
            "tools": [_tool(number, tool) for number, tool in enumerate(self.tools)],
            "tool_choice": choice,
            "response_format": format or None,
            "reasoning_effort": self.reasoning.get("effort"),
        }


def _tool(number: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:50]
        raise ApiError(
            400,
            f"tools[{number}]: {kind!r} is not supported: functions alone are",
            param=f"tools[{number}]",
        )
    return {
        "type": "function",
        "function": {name: value for name, value in tool.items() if name != "type"},
    }


def _messages(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat's messages. Raises `ApiError`."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if len(items) > MOST_MESSAGES:
        raise ApiError(400, f"input: takes at most {MOST_MESSAGES} items", param="input")
    made: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        match item.get("type", "message"):
            case "message" if item.get("role") == "assistant":
                _assistant(made, "content", "tool_calls")["content"] = _content(item.get("content"))
            case "message":
                made.append({"role": item.get("role"), "content": _content(item.get("content"))})
            case "reasoning":
                parts = (*_listed(item.get("content")), *_listed(item.get("summary")))
                text = "\n".join(str(part.get("text")) for part in parts)
                _assistant(made, "content", "tool_calls", "reasoning_content")[
                    "reasoning_content"
                ] = text
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"type": "function", "id": item.get("call_id"), "function": function}
                _assistant(made).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                result = {
                    "role": "tool",
                    "tool_call_id": item.get("call_id"),
                    "content": _content(item.get("output")),
                }
                made.append(result)
            case other:
                raise ApiError(
                    400,
                    f"input[{number}]: {str(other)[:50]!r} is not supported",
                    param=f"input[{number}]",
                )
    return made


def _assistant(made: list[dict[str, Any]], *ends: str) -> dict[str, Any]:
    """The assistant's message that the next item is part of: the last one, unless it has one of these fields."""
    last = made[-1] if made else {}
    if last.get("role") != "assistant" or any(last.get(end) for end in ends):
        made.append({"role": "assistant", "content": ""})
    return made[-1]


def _content(content: Any) -> Any:
    """A chat's content; parts of unknown kinds stay, to be refused there."""
    if not isinstance(content, list):
        return content
    texts = ("input_text", "output_text")
    parts = [
        part | {"type": "text"} if part.get("type") in texts else part for part in _listed(content)
    ]
    return [
        {key: value for key, value in part.items() if key not in ("annotations", "logprobs")}
        for part in parts
    ]


def _listed(parts: Any) -> list[dict[str, Any]]:
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


class Responses:
    """The endpoint: reads requests, and keeps the conversations of the latest responses."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._kept: OrderedDict[str, tuple[list[dict[str, Any]], int]] = (
            OrderedDict()
        )  # with their sizes
        self._size = 0
        self._lock = threading.Lock()

    def read(self, body: Any) -> tuple[TextRequest, Answer]:
        """The checked request, and what writes its answer. Raises `ApiError`."""
        asked = validate(ResponsesRequest, body)
        messages = [*self._before(asked.previous_response_id), *_messages(asked.input)]
        try:
            made = read_request(asked.chat(body, messages), True, self._setup)
        except ApiError as error:
            for name, here in _CALLED.items():
                error.param, error.message = (
                    name.sub(here, text) for text in (error.param or "", error.message)
                )
            raise
        answer = _ResponsesAnswer(asked, lambda id, reply: self._keep(id, [*messages, reply]))
        return replace(made, named=("input", "max_output_tokens")), answer

    def _before(self, id: str | None) -> list[dict[str, Any]]:
        with self._lock:
            if id is None:
                return []
            if id not in self._kept:
                text = f"there is no response {id[:100]!r} here: the latest are kept, while the server runs"
                raise ApiError(
                    404, text, param="previous_response_id", code="previous_response_not_found"
                )
            self._kept.move_to_end(id)
            return self._kept[id][0]

    def _keep(self, id: str, messages: list[dict[str, Any]]) -> None:
        size = len(json.dumps(messages))
        with self._lock:
            self._kept[id], self._size = (messages, size), self._size + size
            while len(self._kept) > MOST_KEPT or self._size > MOST_CHARACTERS:
                self._size -= self._kept.popitem(last=False)[1][1]


# ---- answers ----

_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}  # item -> the kind of its part


class _ResponsesAnswer(Answer):
    """One response. Every method that writes takes the next numbers of the stream's events."""

    done = b""

    def __init__(
        self, asked: ResponsesRequest, keep: Callable[[str, dict[str, Any]], None]
    ) -> None:
        super().__init__(True, asked.model, lambda _: b"")
        self._asked, self._keep = asked, keep
        self._id, self._created = f"resp_{secrets.token_hex(24)}", int(time.time())
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # the last item
        self._number = 0
        self._reason = ""

    def whole(self, results: Sequence[Result], usage: dict[str, Any]) -> bytes:
        for _ in self._grown(self._parts[0].feed(results[0].text)):
            pass
        self.last(0, results[0])
        return json.dumps(self._ended(usage), ensure_ascii=False).encode()

    def first(self, index: int) -> Iterator[bytes]:
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        yield from self._grown(self._parts[0].feed(piece.text))

    def last(self, index: int, result: Result) -> bytes:
        self._reason = self._parts[0].finish_reason(result)
        events = [*self._grown(self._parts[0].feed("", True))]
        if not self._items:
            events += self._begun("message")
        return b"".join((*events, *self._closed()))

    def usage(self, usage: dict[str, Any]) -> Iterator[bytes]:
        ended = self._ended(usage)
        yield self._event(ended["status"], response=ended)

    def error(self, body: dict[str, Any]) -> bytes:
        return self._written("error", body["error"] | body)

    def _ended(self, usage: dict[str, Any]) -> dict[str, Any]:
        if self._asked.store:
            self._keep(self._id, self._parts[0].message)
        tokens = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
            "pearl": usage["pearl"],
        }
        return self._response("incomplete" if self._reason == "length" else "completed") | {
            "usage": tokens
        }

    def _response(self, status: str) -> dict[str, Any]:
        asked = self._asked
        sent = (
            "instructions",
            "max_output_tokens",
            "previous_response_id",
            "metadata",
            "tools",
            "tool_choice",
        )
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "model": self._head["model"],
            "output": self._items,
            **{
                name: getattr(asked, name)
                for name in (*sent, "parallel_tool_calls", "store", "temperature", "top_p")
            },
            "reasoning": {"effort": asked.reasoning.get("effort"), "summary": None},
            "text": asked.text or {"format": {"type": "text"}},
            "truncation": "disabled",
            "usage": None,
        }

    def _event(self, name: str, /, **fields: Any) -> bytes:
        return self._written(f"response.{name}", fields)

    def _written(self, name: str, fields: dict[str, Any]) -> bytes:
        data = json.dumps(
            fields | {"type": name, "sequence_number": self._number}, ensure_ascii=False
        )
        self._number += 1
        return f"event: {name}\ndata: {data}\n\n".encode()

    @property
    def _at(self) -> dict[str, Any]:
        """Which item an event is about: the last one."""
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _grown(self, delta: dict[str, Any]) -> Iterator[bytes]:
        for kind, field in (("reasoning", "reasoning_content"), ("message", "content")):
            if text := delta.get(field):
                if not self._is_open or self._items[-1]["type"] != kind:
                    yield from self._begun(kind)
                self._items[-1]["content"][0]["text"] += text
                at = (
                    self._at
                    | {"content_index": 0}
                    | ({"logprobs": []} if kind == "message" else {})
                )
                yield self._event(f"{_TEXTS[kind]}.delta", **at, delta=text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self._begun("function_call", call)
            if arguments := call["function"]["arguments"]:
                self._items[-1]["arguments"] += arguments
                yield self._event("function_call_arguments.delta", **self._at, delta=arguments)

    def _begun(self, kind: str, call: Call | None = None) -> Iterator[bytes]:
        """A new item, after the end of the last."""
        yield from self._closed()
        short = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item: dict[str, Any] = {
            "id": f"{short}_{secrets.token_hex(12)}",
            "type": kind,
            "status": "in_progress",
        }
        if call is not None:
            item |= {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
        else:
            item |= (
                {"role": "assistant", "content": []}
                if kind == "message"
                else {"summary": [], "content": []}
            )
        self._items.append(item)
        self._is_open = True
        yield self._event("output_item.added", output_index=len(self._items) - 1, item=item)
        if call is None:
            part = {"type": _TEXTS[kind], "text": ""}
            item["content"].append(
                part | ({"annotations": [], "logprobs": []} if kind == "message" else {})
            )
            yield self._event(
                "content_part.added", **self._at, content_index=0, part=item["content"][0]
            )

    def _closed(self) -> Iterator[bytes]:
        if not self._is_open:
            return
        item, self._is_open = self._items[-1], False
        item["status"] = "incomplete" if self._reason == "length" else "completed"
        if item["type"] == "function_call":
            named = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **self._at, **named)
        else:
            part, at = item["content"][0], self._at | {"content_index": 0}
            yield self._event(
                f"{part['type']}.done", **at, text=part["text"], logprobs=part.get("logprobs")
            )
            yield self._event("content_part.done", **at, part=part)
        yield self._event("output_item.done", output_index=len(self._items) - 1, item=item)
