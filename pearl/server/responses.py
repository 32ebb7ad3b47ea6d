"""/v1/responses: turns its requests into chats, and the chats' texts into items and events, in OpenAI's order."""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, field_validator

from pearl.engine import Piece, Result
from pearl.server.errors import ApiError, invalid
from pearl.server.http import AnswerWriter
from pearl.server.requests import Setup, TextRequest, read_request
from pearl.server.schemas import (
    MOST_MESSAGES,
    MOST_TOOLS,
    UNSERVED,
    ChatCompletionRequest,
    SharedRequest,
    Text,
    Unserved,
    check_text,
    validate,
)
from pearl.text.tools import Call

MOST_KEPT = 1000  # responses that can be continued
MOST_CHARACTERS = 64 << 20  # of their conversations as JSON
_UNSERVED_HERE: Unserved = {
    "conversation": (),
    "prompt": (),
    "messages": (),
    "max_tokens": (),
    "max_completion_tokens": (),
    "background": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled", "auto"),
}
# Fields of a chat -> their names here. Messages have other numbers than items.
_RENAMED = {
    re.compile(r"^messages(\[\d+\])?(?=\W|$)"): "input",
    re.compile("^max_completion_tokens"): "max_output_tokens",
    re.compile("^response_format"): "text.format",
}


class ResponsesRequest(SharedRequest):
    unserved: ClassVar = {**UNSERVED, **_UNSERVED_HERE}
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
        """Return the body of the chat. `messages`: those of `input` and of earlier responses."""
        shared = self.model_fields_set & ChatCompletionRequest.field_names
        chat = {name: body[name] for name in shared - {"stream_options"}}
        if self.instructions is not None:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        chat["messages"] = messages
        chat["max_completion_tokens"] = self.max_output_tokens
        chat["tools"] = [_tool(number, tool) for number, tool in enumerate(self.tools)]
        chat["tool_choice"] = self._tool_choice()
        chat["response_format"] = self._response_format()
        chat["reasoning_effort"] = self.reasoning.get("effort")
        return chat

    def _tool_choice(self) -> Any:
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            return {"type": "function", "function": {"name": choice.get("name")}}
        return choice

    def _response_format(self) -> Any:
        format = self.text.get("format") or None
        if isinstance(format, dict) and format.get("type") == "json_schema":
            return {"type": "json_schema", "json_schema": _without(format, "type")}
        return format


def _without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def _tool(number: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:50]
        raise invalid(f"tools[{number}]", f"{kind!r} is not supported: functions alone are")
    return {"type": "function", "function": _without(tool, "type")}


def _messages(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat's messages. Raises `ApiError`.

    An assistant's reasoning, content and calls are three items and one message:
    [{"type": "reasoning", ...}, {"type": "function_call", ...}] becomes
    [{"role": "assistant", "content": "", "reasoning_content": ..., "tool_calls": [...]}].
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if len(items) > MOST_MESSAGES:
        raise invalid("input", f"takes at most {MOST_MESSAGES} items")
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        match item.get("type", "message"):
            case "message" if item.get("role") == "assistant":
                message = _assistant(messages, "content", "tool_calls")
                message["content"] = _content(item.get("content"))
            case "message":
                content = _content(item.get("content"))
                messages.append({"role": item.get("role"), "content": content})
            case "reasoning":
                message = _assistant(messages, "content", "tool_calls", "reasoning_content")
                message["reasoning_content"] = _reasoning(item)
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"type": "function", "id": item.get("call_id"), "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                content = _content(item.get("output"))
                result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
                messages.append(result)
            case kind:
                raise invalid(f"input[{number}]", f"{str(kind)[:50]!r} is not supported")
    return messages


def _assistant(messages: list[dict[str, Any]], *ends: str) -> dict[str, Any]:
    """Return the assistant's message that the next item belongs to: the last, unless it has one of the fields `ends`.

    Otherwise the item begins a new message, which is appended.
    """
    last_message = messages[-1] if messages else {}
    if last_message.get("role") != "assistant" or any(last_message.get(end) for end in ends):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _reasoning(item: dict[str, Any]) -> str:
    parts = _objects(item.get("content")) + _objects(item.get("summary"))
    return "\n".join(str(part.get("text")) for part in parts)


def _content(content: Any) -> Any:
    """Return a chat's content; parts of unknown kinds stay, to be refused by the chat's schema."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in _objects(content):
        if part.get("type") in ("input_text", "output_text"):
            part = part | {"type": "text"}
        parts.append(_without(part, "annotations", "logprobs"))
    return parts


def _objects(parts: Any) -> list[dict[str, Any]]:
    if not isinstance(parts, list):
        return []
    return [part for part in parts if isinstance(part, dict)]


class _Conversation(NamedTuple):
    messages: list[dict[str, Any]]
    size: int  # in characters of JSON


class Responses:
    """The endpoint: reads requests, and keeps the conversations of the latest responses."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._conversations: OrderedDict[str, _Conversation] = OrderedDict()  # by response id
        self._size = 0  # of all conversations
        self._lock = threading.Lock()

    def read(self, body: Any) -> tuple[TextRequest, AnswerWriter]:
        """Return the checked request, and what writes its answer. Raises `ApiError`."""
        response = validate(ResponsesRequest, body)
        messages = self._earlier(response.previous_response_id) + _messages(response.input)
        try:
            request = read_request(response.chat(body, messages), True, self._setup)
        except ApiError as error:
            for chat_name, name in _RENAMED.items():
                error.param = chat_name.sub(name, error.param or "")
                error.message = chat_name.sub(name, error.message)
            raise
        writer = _ResponseWriter(response, lambda id, reply: self._keep(id, [*messages, reply]))
        request = replace(request, chat_field="input", chat_limit_field="max_output_tokens")
        return request, writer

    def _earlier(self, id: str | None) -> list[dict[str, Any]]:
        """Return the messages of the response `id` and those before it."""
        with self._lock:
            if id is None:
                return []
            if id not in self._conversations:
                text = f"there is no response {id[:100]!r} here: the latest are kept, while the server runs"
                param = "previous_response_id"
                raise ApiError(404, text, param=param, code="previous_response_not_found")
            self._conversations.move_to_end(id)
            return self._conversations[id].messages

    def _keep(self, id: str, messages: list[dict[str, Any]]) -> None:
        size = len(json.dumps(messages))
        with self._lock:
            self._conversations[id] = _Conversation(messages, size)
            self._size += size
            while len(self._conversations) > MOST_KEPT or self._size > MOST_CHARACTERS:
                _, oldest = self._conversations.popitem(last=False)
                self._size -= oldest.size


# ---- answers ----

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}  # of an item's id
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}  # item -> the kind of its part
_ECHOED = (  # fields that a response repeats
    "instructions",
    "max_output_tokens",
    "previous_response_id",
    "metadata",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "store",
    "temperature",
    "top_p",
)


class _ResponseWriter(AnswerWriter):
    """Writes one response. Every method that writes takes the next numbers of the stream's events."""

    done = b""

    def __init__(
        self, request: ResponsesRequest, keep: Callable[[str, dict[str, Any]], None]
    ) -> None:
        super().__init__(True, request.model, lambda _: b"")
        self._request = request
        self._keep = keep
        self._id = f"resp_{secrets.token_hex(24)}"
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # whether the last item is
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
        events = list(self._grown(self._parts[0].feed("", True)))
        if not self._items:
            events += self._begun("message")
        events += self._closed()
        return b"".join(events)

    def usage(self, usage: dict[str, Any]) -> Iterator[bytes]:
        response = self._ended(usage)
        yield self._event(response["status"], response=response)

    def error(self, body: dict[str, Any]) -> bytes:
        return self._written("error", body["error"] | body)

    @property
    def _status(self) -> str:
        """The status of what has ended."""
        return "incomplete" if self._reason == "length" else "completed"

    def _ended(self, usage: dict[str, Any]) -> dict[str, Any]:
        if self._request.store:
            self._keep(self._id, self._parts[0].message)
        response = self._response(self._status)
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
            "pearl": usage["pearl"],
        }
        return response

    def _response(self, status: str) -> dict[str, Any]:
        incomplete_details = None
        if status == "incomplete":
            incomplete_details = {"reason": "max_output_tokens"}
        echoed = {name: getattr(self._request, name) for name in _ECHOED}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "error": None,
            "incomplete_details": incomplete_details,
            "model": self._head["model"],
            "output": self._items,
            **echoed,
            "reasoning": {"effort": self._request.reasoning.get("effort"), "summary": None},
            "text": self._request.text or {"format": {"type": "text"}},
            "truncation": "disabled",
            "usage": None,
        }

    def _event(self, name: str, /, **fields: Any) -> bytes:
        return self._written(f"response.{name}", fields)

    def _written(self, name: str, fields: dict[str, Any]) -> bytes:
        fields = fields | {"type": name, "sequence_number": self._number}
        self._number += 1
        return f"event: {name}\ndata: {json.dumps(fields, ensure_ascii=False)}\n\n".encode()

    @property
    def _item(self) -> dict[str, Any]:
        """The last item."""
        return self._items[-1]

    @property
    def _place(self) -> dict[str, Any]:
        """The fields of an event that name its item, the last one."""
        return {"item_id": self._item["id"], "output_index": len(self._items) - 1}

    def _grown(self, delta: dict[str, Any]) -> Iterator[bytes]:
        yield from self._text_grown("reasoning", delta.get("reasoning_content", ""))
        yield from self._text_grown("message", delta.get("content", ""))
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self._begun("function_call", call)
            arguments = call["function"]["arguments"]
            if arguments:
                self._item["arguments"] += arguments
                yield self._event("function_call_arguments.delta", **self._place, delta=arguments)

    def _text_grown(self, kind: str, text: str) -> Iterator[bytes]:
        if not text:
            return
        if not self._is_open or self._item["type"] != kind:
            yield from self._begun(kind)
        self._item["content"][0]["text"] += text
        place = self._place | {"content_index": 0}
        if kind == "message":
            place["logprobs"] = []
        yield self._event(f"{_TEXTS[kind]}.delta", **place, delta=text)

    def _begun(self, kind: str, call: Call | None = None) -> Iterator[bytes]:
        """Close the last item, and begin a new one."""
        yield from self._closed()
        id = f"{_PREFIXES[kind]}_{secrets.token_hex(12)}"
        item: dict[str, Any] = {"id": id, "type": kind, "status": "in_progress"}
        if call is not None:
            item |= {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self._items.append(item)
        self._is_open = True
        yield self._event("output_item.added", output_index=len(self._items) - 1, item=item)
        if call is not None:
            return
        part: dict[str, Any] = {"type": _TEXTS[kind], "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
        item["content"].append(part)
        yield self._event("content_part.added", **self._place, content_index=0, part=part)

    def _closed(self) -> Iterator[bytes]:
        if not self._is_open:
            return
        self._is_open = False
        item = self._item
        item["status"] = self._status
        place = self._place
        if item["type"] == "function_call":
            call = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **place, **call)
        else:
            part = item["content"][0]
            place["content_index"] = 0
            text = {"text": part["text"], "logprobs": part.get("logprobs")}
            yield self._event(f"{part['type']}.done", **place, **text)
            yield self._event("content_part.done", **place, part=part)
        yield self._event("output_item.done", output_index=len(self._items) - 1, item=item)
