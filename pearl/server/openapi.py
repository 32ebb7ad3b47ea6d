"""The OpenAPI document, /openapi.json, from which tools generate clients and tests."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from pearl.server.errors import Error
from pearl.server.schemas import Body
from pearl.version import __version__

_PROBLEMS = (400, 401, 403, 404, 405, 408, 413, 415, 500, 503)


@dataclass(frozen=True)
class HttpEndpoint:
    """A path of the server; its route and its entry in /openapi.json are made from this.

    Attributes:
        path: the path in Starlette's notation, such as /v1/models/{name:path}, where {name} is a
            model.
        answer: the function that answers a request.
        description: what the answer is. An endpoint without a description is not in /openapi.json.
        body: the schema of a POST request; None if the endpoint is for GET.
    """

    path: str
    answer: Callable[[Request], Awaitable[Response]]
    description: str = ""
    body: type[Body] | None = None


def document(endpoints: Sequence[HttpEndpoint], model: str, keyed: bool) -> dict[str, Any]:
    """Return the whole document.

    Args:
        model: the name of the served model.
        keyed: whether the paths under /v1 need an API key.
    """
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    paths = {}
    for endpoint in endpoints:
        if endpoint.description:
            paths[endpoint.path.replace(":path", "")] = _described(endpoint)
    openapi: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "PEARL",
            "version": __version__,
            "description": "OpenAI's API, as far as PEARL serves it.",
        },
        "paths": paths,
        "components": {"schemas": _schemas(bodies, model)},
    }
    if keyed:
        openapi["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        openapi["security"] = [{"key": []}]
    return openapi


def _schemas(bodies: Sequence[type[Body]], model: str) -> dict[str, Any]:
    modes: Any = [(schema, "validation") for schema in (*bodies, Error)]
    _, definitions = models_json_schema(modes, ref_template="#/components/schemas/{model}")
    schemas = definitions["$defs"]
    schemas["Model"] = {"type": "string", "enum": [model]}
    for body in bodies:
        schemas[body.__name__]["properties"]["model"] = _named("Model")
    return schemas


def _described(endpoint: HttpEndpoint) -> dict[str, Any]:
    """Return OpenAPI's path item of an endpoint."""
    success = _content(endpoint.description, {"type": "object"})
    responses = {"200": success}
    for status in _PROBLEMS:
        responses[str(status)] = _content(HTTPStatus(status).phrase, _named("Error"))
    if endpoint.body is not None:
        if "stream" in endpoint.body.field_names:
            success["content"]["text/event-stream"] = {"schema": {"type": "string"}}
        content = {"application/json": {"schema": _named(endpoint.body.__name__)}}
        request_body = {"required": True, "content": content}
        return {"post": {"requestBody": request_body, "responses": responses}}
    if "{name" in endpoint.path:
        name = {"name": "name", "in": "path", "required": True, "schema": _named("Model")}
        return {"get": {"parameters": [name], "responses": responses}}
    return {"get": {"responses": responses}}


def _named(schema: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}


def _content(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
