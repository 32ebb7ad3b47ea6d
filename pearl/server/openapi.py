"""What the server understands, as an OpenAPI document: for tools that make clients, or test servers, of one."""

from __future__ import annotations

from typing import Any

from pearl.config import LONGEST_STOP, MAX_LOGPROBS, MOST_STOPS, SamplingParams
from pearl.server.requests import MOST_MESSAGES, MOST_TEXTS, MOST_TOOLS
from pearl.version import __version__

_TEXT, _FLAG, _OBJECT = {"type": "string"}, {"type": "boolean"}, {"type": "object"}
_STOP = {"type": "string", "minLength": 1, "maxLength": LONGEST_STOP}
_TOKEN = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_FUNCTION = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": _TEXT, "description": _TEXT, "parameters": _OBJECT, "strict": _FLAG},
    "additionalProperties": False,
}
_PARTS = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": _TEXT},
        "additionalProperties": False,
    },
}
_CALL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "id": _TEXT,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": _TEXT, "arguments": {"type": "string", "contentMediaType": "application/json"}},
        },
    },
}


def _named(schema: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}


def _message(roles: list[str], required: list[str], **more: Any) -> dict[str, Any]:
    properties = {"role": {"enum": roles}, "content": {"anyOf": [_TEXT, _PARTS]}, **more}
    return {"type": "object", "required": ["role", *required], "properties": properties, "additionalProperties": False}


_MESSAGE = {
    "anyOf": [
        _message(["system", "user", "assistant"], ["content"]),
        _message(["assistant"], ["tool_calls"], tool_calls={"type": "array", "minItems": 1, "items": _CALL}),
        _message(["tool"], ["content"], tool_call_id=_TEXT),
    ]
}
_RESPONSE_FORMAT = {
    "oneOf": [
        {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"enum": ["text", "json_object"]}},
            "additionalProperties": False,
        },
        {
            "type": "object",
            "required": ["type", "json_schema"],
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "required": ["schema"],
                    "properties": {"name": _TEXT, "description": _TEXT, "strict": _FLAG, "schema": _OBJECT},
                    "additionalProperties": False,
                },
            },
            "additionalProperties": False,
        },
    ]
}


def _sampling(name: str) -> dict[str, Any]:
    """Of a field of `SamplingParams`, as pydantic has it, less what is for the command line."""
    found = dict(SamplingParams.model_json_schema()["properties"][name])
    if options := [dict(one) for one in found.pop("anyOf", ()) if one.get("type") != "null"]:
        found |= options[0]
    return {key: value for key, value in found.items() if key not in ("title", "default", "metavar", "prefixItems")}


_ALIKE = [
    *("temperature", "top_p", "min_p", "top_k", "seed", "max_tokens", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
]


def _asked(required: list[str], **more: Any) -> dict[str, Any]:
    properties = {name: _sampling(name) for name in _ALIKE} | {
        "model": _named("Model"),
        "n": {"type": "integer", "minimum": 1, "maximum": MOST_TEXTS},
        "stream": _FLAG,
        "stream_options": {
            "type": "object",
            "properties": {"include_usage": _FLAG, "include_provenance": _FLAG},
            "additionalProperties": False,
            "description": "With stream true alone.",
        },
        "stop": {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MOST_STOPS}]},
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
        "response_format": _RESPONSE_FORMAT,
        "structured_outputs": {
            "type": "object",
            "properties": {"json": _OBJECT, "regex": {"type": "string", "minLength": 1}, "json_object": _FLAG},
            "additionalProperties": False,
            "maxProperties": 1,
        },
        "user": _TEXT,
    }
    return {"type": "object", "required": ["model", *required], "properties": properties | more}


_SCHEMAS = {
    "ChatCompletionRequest": _asked(
        ["messages"],
        messages={"type": "array", "minItems": 1, "maxItems": MOST_MESSAGES, "items": _MESSAGE},
        max_completion_tokens=_sampling("max_tokens"),
        logprobs=_FLAG,
        top_logprobs={"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
        tools={
            "type": "array",
            "maxItems": MOST_TOOLS,
            "items": {
                "type": "object",
                "required": ["type", "function"],
                "properties": {"type": {"const": "function"}, "function": _FUNCTION},
                "additionalProperties": False,
            },
        },
        tool_choice={"enum": ["none", "auto"]},
    ),
    "CompletionRequest": _asked(
        ["prompt"],
        prompt={
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": _TOKEN},
                {"type": "array", "minItems": 1, "maxItems": MOST_TEXTS, "items": {"type": "string", "minLength": 1}},
            ]
        },
        logprobs={"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
    ),
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
}


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


_PROBLEMS = {
    400: "A field is wrong, or not supported; param names it.",
    401: "The API key is missing or wrong.",
    403: "The Host header names another host.",
    404: "There is no such model.",
    405: "There is no such method.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is not said to be JSON.",
    429: "Too many requests wait.",
    500: "This text failed; the engine is unharmed.",
    503: "The engine is lost.",
}


def _got(description: str, schema: dict[str, Any], *problems: int) -> dict[str, Any]:
    answers = {"200": _json(description, schema)}
    answers |= {str(status): _json(_PROBLEMS[status], _named("Error")) for status in (403, 405, *problems)}
    return {"get": {"responses": answers}}


def _posted(schema: str) -> dict[str, Any]:
    answer = _json("The texts, at once or as server-sent events.", _OBJECT)
    answer["content"]["text/event-stream"] = {"schema": _TEXT}
    answers = {"200": answer} | {str(s): _json(said, _named("Error")) for s, said in _PROBLEMS.items()}
    body = {"required": True, "content": {"application/json": {"schema": _named(schema)}}}
    return {"post": {"requestBody": body, "responses": answers}}


def document(model: str, keyed: bool) -> dict[str, Any]:
    """The whole of it.

    Args:
        model: the one that is served.
        keyed: whether an API key is needed for /v1.
    """
    one_model = _got("A model.", _OBJECT, 401, 404)
    one_model["get"]["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": _named("Model")}]
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "PEARL", "version": __version__, "description": "OpenAI's API, as far as PEARL serves it."},
        "paths": {
            "/v1/models": _got("The model that is served.", _OBJECT, 401),
            "/v1/models/{name}": one_model,
            "/v1/chat/completions": _posted("ChatCompletionRequest"),
            "/v1/completions": _posted("CompletionRequest"),
            "/health": _got("The engine runs.", _OBJECT, 503),
            "/version": _got("The server's version.", _OBJECT),
        },
        "components": {"schemas": {**_SCHEMAS, "Model": {"type": "string", "enum": [model]}}},
    }
    if keyed:
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}]
    return made
