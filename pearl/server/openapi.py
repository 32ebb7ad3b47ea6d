"""The OpenAPI document, /openapi.json, from which tools generate clients and tests."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from pydantic.json_schema import models_json_schema

from pearl.server.bodies import ChatCompletionRequest, CompletionRequest
from pearl.server.errors import Error
from pearl.server.responses import ResponsesRequest
from pearl.version import __version__

_PROBLEMS = (400, 401, 403, 404, 405, 408, 413, 415, 500, 503)


def _named(schema: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}


def _content(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _responses(description: str) -> dict[str, Any]:
    problems = {
        str(status): _content(HTTPStatus(status).phrase, _named("Error")) for status in _PROBLEMS
    }
    return {"responses": {"200": _content(description, {"type": "object"}), **problems}}


def _posted(schema: str) -> dict[str, Any]:
    answer = _responses("The texts, at once or as server-sent events.")
    answer["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    body = {"required": True, "content": {"application/json": {"schema": _named(schema)}}}
    return {"post": {"requestBody": body, **answer}}


def document(model: str, keyed: bool) -> dict[str, Any]:
    """The whole document. `model`: the name of the model that is served; `keyed`: /v1 needs an API key."""
    models = [
        (each, "validation")
        for each in (ChatCompletionRequest, CompletionRequest, ResponsesRequest, Error)
    ]
    _, made = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas = {**made["$defs"], "Model": {"type": "string", "enum": [model]}}
    for request in ("ChatCompletionRequest", "CompletionRequest", "ResponsesRequest"):
        schemas[request]["properties"]["model"] = _named("Model")
    name = {"name": "name", "in": "path", "required": True, "schema": _named("Model")}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "PEARL",
            "version": __version__,
            "description": "OpenAI's API, as far as PEARL serves it.",
        },
        "paths": {
            "/v1/models": {"get": _responses("The model that is served.")},
            "/v1/models/{name}": {"get": {"parameters": [name], **_responses("A model.")}},
            "/v1/chat/completions": _posted("ChatCompletionRequest"),
            "/v1/completions": _posted("CompletionRequest"),
            "/v1/responses": _posted("ResponsesRequest"),
            "/health": {"get": _responses("The engine runs.")},
            "/version": {"get": _responses("The server's version.")},
        },
        "components": {"schemas": schemas},
    }
    if keyed:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found
