"""Ollama's /api/chat, /api/generate and /api/tags: its requests as chats, and lines of JSON as answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from pearl.engine import Piece, Result
from pearl.server.answers import Answer
from pearl.server.errors import ApiError
from pearl.server.fields import check_text
from pearl.server.requests import Setup, TextRequest, read_request

_RENAMED = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
_MESSAGE = {"thinking": "reasoning_content", "tool_name": "name"}
_UNSERVED = ("images", "suffix", "context", "raw", "template")


def tags(card: dict[str, Any]) -> dict[str, Any]:
    """The answer of /api/tags. `card`: the model's in /v1/models."""
    made = datetime.fromtimestamp(card["created"], UTC).isoformat()
    named = {"name": card["id"], "model": card["id"], "modified_at": made}
    return {"models": [named | {"size": 0, "digest": "", "details": {}}]}


def read(kind: str, setup: Setup, body: Any) -> tuple[TextRequest, Answer]:
    """The checked request, and what writes its answer. Raises `ApiError`. `kind`: chat or generate."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    try:
        check_text(body)
    except ValueError as error:
        raise ApiError(400, f"the body {error}") from None
    asked, messages = _options(body), body.get("messages")
    if kind == "generate":
        if not isinstance(body.get("prompt"), str):
            raise ApiError(400, "prompt: is missing, or no text", param="prompt")
        system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
        messages = [*system, {"role": "user", "content": body.get("prompt")}]
    if isinstance(messages, list):
        messages = [_message(one) if isinstance(one, dict) else one for one in messages]
    asked |= {"messages": messages, "tools": body.get("tools"), "stream": body.get("stream", True)}
    return read_request(asked, True, setup), _OllamaAnswer(kind, setup.model)


def _options(body: dict[str, Any]) -> dict[str, Any]:
    """A chat's fields, besides messages and tools."""
    for name in _UNSERVED:
        if body.get(name):
            raise ApiError(400, f"{name} is not supported", param=name, code="unsupported_parameter")
    options, model, format, think = (body.get(name) for name in ("options", "model", "format", "think"))
    if not isinstance(options or {}, dict):
        raise ApiError(400, "options: must be an object", param="options")
    given: dict[str, Any] = {_RENAMED.get(name, name): value for name, value in (options or {}).items()}
    if given.get("max_tokens") in (-1, -2):  # as many as fit
        del given["max_tokens"]
    if format:
        schema = {"type": "json_schema", "json_schema": {"schema": format}}
        given["response_format"] = {"type": "json_object"} if format == "json" else schema
    if isinstance(think, str):
        given["reasoning_effort"] = think
    elif think is not None:
        given["chat_template_kwargs"] = {"enable_thinking": think}
    return given | {"model": model.removesuffix(":latest") if isinstance(model, str) else model}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    made = {_MESSAGE.get(name, name): value for name, value in message.items()}
    for call in calls if isinstance(calls := made.get("tool_calls"), list) else ():
        if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
            call["type"] = "function"
            function["arguments"] = json.dumps(function.get("arguments") or {})
    return made


class _OllamaAnswer(Answer):
    """The answer to one request: calls come whole, with the last line."""

    media_type, done = "application/x-ndjson", b""

    def __init__(self, kind: str, model: str) -> None:
        super().__init__(True, model, lambda _: b"")
        self._is_chat = kind == "chat"
        self._rest: dict[str, Any] = {}
        self._reason = ""

    def whole(self, results: Sequence[Result], usage: dict[str, Any]) -> bytes:
        self._reason = results[0].finish_reason
        return self._line(self._parts[0].feed(results[0].text, True), usage)

    def first(self, index: int) -> Iterator[bytes]:
        return iter(())

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        delta = self._parts[0].feed(piece.text)
        if delta.keys() - {"tool_calls"}:
            yield self._line(delta)

    def last(self, index: int, result: Result) -> bytes:
        self._rest, self._reason = self._parts[0].feed("", True), result.finish_reason
        return b""

    def usage(self, usage: dict[str, Any]) -> Iterator[bytes]:
        yield self._line(self._rest, usage)

    def error(self, body: dict[str, Any]) -> bytes:
        return json.dumps({"error": body["error"]["message"]}).encode() + b"\n"

    def _line(self, delta: dict[str, Any], usage: dict[str, Any] | None = None) -> bytes:
        """With `usage` the last one."""
        content, thought = delta.get("content", ""), delta.get("reasoning_content")
        more: dict[str, Any] = {"thinking": thought} if thought else {}
        if self._is_chat:
            if usage is not None and (calls := self._parts[0].message.get("tool_calls")):
                more["tool_calls"] = [{"function": _with_object(call["function"])} for call in calls]
            fields: dict[str, Any] = {"message": {"role": "assistant", "content": content, **more}}
        else:
            fields = {"response": content, **more}
        fields |= {"model": self._head["model"], "created_at": datetime.now(UTC).isoformat(), "done": usage is not None}
        if usage is not None:
            whole, first = usage["pearl"]["seconds"][0], usage["pearl"]["seconds_to_first_token"] or 0.0
            seconds = {"total": whole, "prompt_eval": first, "eval": whole - first, "load": 0.0}
            fields |= {f"{name}_duration": int(1e9 * value) for name, value in seconds.items()}
            fields |= {"prompt_eval_count": usage["prompt_tokens"], "eval_count": usage["completion_tokens"]}
            fields["done_reason"] = "length" if self._reason == "length" else "stop"
        return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object; none where the text was cut within them."""
    try:
        return function | {"arguments": dict(json.loads(function["arguments"]))}
    except (TypeError, ValueError):
        return function | {"arguments": {}}
