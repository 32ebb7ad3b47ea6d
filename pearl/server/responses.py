"""The endpoint /v1/responses.

Its requests become chats. The texts of these chats become items and events, in OpenAI's order.
"""

import json
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, field_validator

from pearl.engine import Piece
from pearl.server.errors import ApiError, invalid
from pearl.server.http import ReplyText, ReplyWriter, without
from pearl.server.requests import Setup, TextRequest, read_request
from pearl.server.response_tools import ResponseTools, chat_name, objects_in
from pearl.server.schemas import (
    FOREIGN_FIELDS,
    MOST_MESSAGES,
    MOST_TOOLS,
    ChatCompletionRequest,
    SharedRequest,
    Text,
    check_text,
    validate,
    warn_once,
)
from pearl.text.reply import Delta
from pearl.text.tools import Call

MOST_KEPT = 1000  # responses that can be continued
MOST_CHARACTERS = 64 << 20  # of their conversations as JSON
# Fields of a chat -> their names here. A message's index is dropped: items have other indices.
_RENAMED = {
    re.compile(r"^messages(\[\d+\])?(?=\W|$)"): "input",
    re.compile("^max_completion_tokens"): "max_output_tokens",
    re.compile("^response_format"): "text.format",
}


class ResponsesRequest(SharedRequest):
    unserved: ClassVar = SharedRequest.unserved | FOREIGN_FIELDS["refused_in_responses"]
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
        default=[],
        max_length=MOST_TOOLS,
        description="Of type function, or namespace, a group of these; others are left out.",
    )
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(
        default={}, description="Variables of the chat template."
    )

    _is_text = field_validator(
        "input",
        "metadata",
        "reasoning",
        "text",
        "tools",
        "tool_choice",
        "chat_template_kwargs",
        mode="before",
    )(check_text)

    @property
    def items(self) -> list[dict[str, Any]]:
        """The items of `input`; if `input` is a text, one message of the user."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    def chat(
        self, body: dict[str, Any], messages: list[dict[str, Any]], tools: ResponseTools
    ) -> dict[str, Any]:
        """Return the body of an equivalent request to /v1/chat/completions.

        `messages`: the chat's messages, made from earlier responses and from `input`.
        """
        shared = self.model_fields_set & ChatCompletionRequest.field_names
        chat = {name: body[name] for name in shared - {"stream_options"}}
        if self.instructions is not None:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        chat["messages"] = messages
        chat["max_completion_tokens"] = self.max_output_tokens
        chat["tools"] = tools.chat_tools
        chat["tool_choice"] = self._tool_choice()
        chat["response_format"] = self._response_format()
        chat["reasoning_effort"] = self.reasoning.get("effort")
        return chat

    def _tool_choice(self) -> Any:
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return choice
        if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
            subset = without(choice, "type") | {"tools": list(map(_named, choice["tools"]))}
            return {"type": "allowed_tools", "allowed_tools": subset}
        return _named(choice)

    def _response_format(self) -> Any:
        format = self.text.get("format") or None
        if isinstance(format, dict) and format.get("type") == "json_schema":
            return {"type": "json_schema", "json_schema": without(format, "type")}
        return format


def _renamed(text: str) -> str:
    """Return `text` with a field of chat completions renamed as the Responses API names it.

    For example, messages becomes input. `text` is the name of a field of chat completions, or an
    error message that begins with such a name.
    """
    for pattern, name in _RENAMED.items():
        text = pattern.sub(name, text)
    return text


def _named(choice: Any) -> Any:
    """Return a choice of a function in the notation of chats.

    For example, {"type": "function", "name": "read"} becomes {"type": "function", "function":
    {"name": "read"}}. Any other choice is returned unchanged.
    """
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return choice
    name = chat_name(choice.get("namespace"), str(choice.get("name")))
    return {"type": "function", "function": {"name": name}}


def chat_messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items as messages of a chat.

    An assistant's reasoning, content and calls are three items here, but one message of a chat:
    [{"type": "reasoning", ...}, {"type": "function_call", ...}] becomes [{"role": "assistant",
    "content": "", "reasoning_content": ..., "tool_calls": [...]}].

    Items of unknown types are left out. Raises `ApiError` if there are too many items, or if one
    refers to an earlier item by its id.
    """
    if len(items) > MOST_MESSAGES:
        raise invalid("input", f"takes at most {MOST_MESSAGES} items")
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        match item.get("type") or "message":
            case "message" if item.get("role") == "assistant":
                # Codex may send a message between a call and its output: its content joins the call's message.
                message = _assistant(messages, "content")
                message["content"] = _content(item.get("content"))
            case "message":
                content = _content(item.get("content"))
                messages.append({"role": item.get("role"), "content": content})
            case "reasoning":
                thought = _reasoning(item)
                if thought:  # encrypted reasoning has no text, and may be the only item of a turn
                    message = _assistant(messages, "content", "tool_calls", "reasoning_content")
                    message["reasoning_content"] = thought
            case "function_call":
                name = chat_name(item.get("namespace"), str(item.get("name")))
                function = {"name": name, "arguments": item.get("arguments")}
                call = {"type": "function", "id": item.get("call_id"), "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = _output(item.get("output"))
                result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
                messages.append(result)
            case "additional_tools":
                pass  # `ResponseTools` has these
            case "item_reference":
                problem = "items are not kept here: send the item itself, or previous_response_id"
                raise invalid(f"input[{number}]", problem)
            case kind:
                warn_once(
                    f"requests have items of type {str(kind)[:50]!r}: left out of the conversation"
                )
    return messages


def _assistant(messages: list[dict[str, Any]], *ends: str) -> dict[str, Any]:
    """Return the assistant's message to which the next item is added.

    The last of `messages` is returned if it is an assistant's and has none of the fields `ends`.
    Otherwise, a new message is appended to `messages` and returned.
    """
    last_message = messages[-1] if messages else {}
    if last_message.get("role") != "assistant" or any(last_message.get(end) for end in ends):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _reasoning(item: dict[str, Any]) -> str:
    parts = objects_in(item.get("content")) + objects_in(item.get("summary"))
    return "\n".join(str(part.get("text")) for part in parts)


def _output(output: Any) -> Any:
    """Return a function's output as text. A part that is no text, such as a picture, becomes its type in brackets."""
    if not isinstance(output, list):
        return output or ""
    texts = []
    for part in objects_in(output):
        kind = str(part.get("type"))[:50]
        if isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            warn_once(f"outputs of functions have parts of type {kind!r}: left out")
            texts.append(f"({kind})")
    return "\n".join(texts)


def _content(content: Any) -> Any:
    """Return an item's content as the content of a chat's message.

    For example, a part of the type input_text gets the type text. Parts of unknown types are kept,
    so that the chat's schema refuses them.
    """
    if not isinstance(content, list):
        return content
    parts = []
    for part in objects_in(content):
        if part.get("type") in ("input_text", "output_text"):
            part = part | {"type": "text"}
        parts.append(without(part, "annotations", "logprobs"))
    return parts


class _Conversation(NamedTuple):
    messages: list[dict[str, Any]]
    size: int  # in characters of JSON


class Responses:
    """Reads requests, and keeps the conversations of the latest responses for later requests."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._conversations: OrderedDict[str, _Conversation] = OrderedDict()  # by response id
        self._size = 0  # of all conversations
        self._lock = threading.Lock()

    def read(self, body: Any) -> tuple[TextRequest, ReplyWriter]:
        """Return the checked request, and the writer of its reply. Raises `ApiError`."""
        response = validate(ResponsesRequest, body)
        messages = self._earlier(response.previous_response_id) + chat_messages(response.items)
        tools = ResponseTools(response.tools, response.items)
        try:
            chat = response.chat(body, messages, tools)
            request = read_request(chat, ChatCompletionRequest, self.setup)
        except ApiError as error:
            error.param = _renamed(error.param or "")
            error.message = _renamed(error.message)
            raise
        writer = _ResponseWriter(
            response, tools, lambda id, reply: self._keep(id, [*messages, reply])
        )
        request = replace(
            request,
            prompt_field=_renamed(request.prompt_field),
            limit_field=_renamed(request.limit_field),
        )
        return request, writer

    def _earlier(self, id: str | None) -> list[dict[str, Any]]:
        """Return the conversation up to and including the response `id`; empty if `id` is None.

        Raises `ApiError` if the response is not kept.
        """
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
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}  # by the item's type
# Fields of a chat's usage -> their names here.
_RENAMED_USAGE = {
    "prompt_tokens": "input_tokens",
    "prompt_tokens_details": "input_tokens_details",
    "completion_tokens": "output_tokens",
    "completion_tokens_details": "output_tokens_details",
}
_ECHOED = (  # fields that a response repeats
    "model",
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


class _ResponseWriter(ReplyWriter):
    """Writes one response, whose output is a list of items; new text is added to the last item.

    Events are numbered, so the methods that return events must be called in the order of the
    stream.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        tools: ResponseTools,
        keep: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._request = request
        self._tools = tools
        self._keep = keep
        self._id = f"resp_{secrets.token_hex(24)}"
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._number = 0
        self._events = b""  # not returned yet
        self._status = "completed"  # what items get when they end, and finally the response

    def whole(self, texts: Sequence[ReplyText], usage: dict[str, Any]) -> bytes:
        self.last(texts[0], texts[0].reply)
        return json.dumps(self._ended(usage), ensure_ascii=False).encode()

    def piece(self, text: ReplyText, piece: Piece, delta: Delta) -> bytes:
        if self._number == 0:
            for name in ("created", "in_progress"):
                self._add(name, response=self._response("in_progress"))
        self._grow(delta)
        return self._written()

    def last(self, text: ReplyText, delta: Delta) -> bytes:
        self._grow(delta)
        if text.finish_reason == "length":
            self._status = "incomplete"
        if not self._items:
            self._begin("message")
        self._close()
        self._message = text.message
        return self._written()

    def end(self, usage: dict[str, Any]) -> bytes:
        response = self._ended(usage)
        self._add(self._status, response=response)
        return self._written()

    def error(self, body: dict[str, Any]) -> bytes:
        return self._event("error", body["error"] | body)

    def _ended(self, usage: dict[str, Any]) -> dict[str, Any]:
        if self._request.store:
            self._keep(self._id, self._message)
        counts = {_RENAMED_USAGE.get(name, name): value for name, value in usage.items()}
        return self._response(self._status) | {"usage": counts}

    def _response(self, status: str) -> dict[str, Any]:
        incomplete_details = None
        if status == "incomplete":
            incomplete_details = {"reason": "max_output_tokens"}
        echoed = {name: getattr(self._request, name) for name in _ECHOED}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": incomplete_details,
            "output": self._items,
            **echoed,
            "reasoning": {"effort": self._request.reasoning.get("effort"), "summary": None},
            "text": self._request.text or {"format": {"type": "text"}},
            "truncation": "disabled",
            "usage": None,
        }

    def _add(self, name: str, /, **fields: Any) -> None:
        """Add an event to those that the next call of `_written` returns."""
        self._events += self._event(f"response.{name}", fields)

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        fields = fields | {"type": name, "sequence_number": self._number}
        self._number += 1
        return f"event: {name}\ndata: {json.dumps(fields, ensure_ascii=False)}\n\n".encode()

    def _written(self) -> bytes:
        events = self._events
        self._events = b""
        return events

    def _add_of_item(self, name: str, /, **fields: Any) -> None:
        """Add an event about the last item, with that item's id and index."""
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        self._add(name, **place, **fields)

    def _grow(self, delta: Delta) -> None:
        for event in delta.events:
            if event.call is not None:
                self._grow_call(event.call)
            elif event.kind == "reasoning":
                self._grow_text("reasoning", event.text)
            else:
                self._grow_text("message", event.text)

    def _grow_call(self, call: Call) -> None:
        """Begin an item if the call is new, and add the arguments to the call's item."""
        if "id" in call:
            self._begin("function_call", call)
        arguments = call["function"]["arguments"]
        if arguments:
            self._items[-1]["arguments"] += arguments
            self._add_of_item("function_call_arguments.delta", delta=arguments)

    def _grow_text(self, kind: str, text: str) -> None:
        if not self._items or self._items[-1]["type"] != kind:
            self._begin(kind)
        self._items[-1]["content"][0]["text"] += text
        fields: dict[str, Any] = {"content_index": 0, "delta": text}
        if kind == "message":
            fields["logprobs"] = []
        self._add_of_item(f"{_TEXTS[kind]}.delta", **fields)

    def _begin(self, kind: str, call: Call | None = None) -> None:
        """Close the last item, and begin a new item of the type `kind`."""
        self._close()
        id = f"{_PREFIXES[kind]}_{secrets.token_hex(12)}"
        item: dict[str, Any] = {"id": id, "type": kind, "status": "in_progress"}
        if call is not None:
            names = self._tools.call_fields(call["function"]["name"])
            item |= {"call_id": call["id"], **names, "arguments": ""}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self._items.append(item)
        self._add("output_item.added", output_index=len(self._items) - 1, item=item)
        if call is not None:
            return
        part: dict[str, Any] = {"type": _TEXTS[kind], "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
        item["content"].append(part)
        self._add_of_item("content_part.added", content_index=0, part=part)

    def _close(self) -> None:
        """Close the last item, if there is one."""
        if not self._items:
            return
        item = self._items[-1]
        item["status"] = self._status
        if item["type"] == "function_call":
            call = {"name": item["name"], "arguments": item["arguments"]}
            self._add_of_item("function_call_arguments.done", **call)
        else:
            part = item["content"][0]
            text = {"text": part["text"], "logprobs": part.get("logprobs")}
            self._add_of_item(f"{part['type']}.done", content_index=0, **text)
            self._add_of_item("content_part.done", content_index=0, part=part)
        self._add("output_item.done", output_index=len(self._items) - 1, item=item)
