"""Errors for clients: OpenAI's error object, with its status code."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from pearl.config.options import OPTIONS
from pearl.errors import (
    ConfigError,
    EngineClosed,
    GrammarError,
    PearlError,
    RequestError,
    StartError,
    TargetLost,
    TransportError,
)


class Problem(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The body of an error, as /openapi.json describes it."""

    error: Problem


class ApiError(Exception):
    """A request that is not served.

    Attributes:
        status: of HTTP.
        param: the wrong field of the request, if any.
        code: a short name for programs.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "authentication_error" if self.status == 401 else usual
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }

    @property
    def headers(self) -> dict[str, str]:
        # After 408 the rest of the body would otherwise be read as the next request.
        return {401: {"www-authenticate": "Bearer"}, 408: {"connection": "close"}}.get(
            self.status, {}
        )


def no_model(name: str, only: str) -> ApiError:
    text = f"there is no model {name[:100]!r} here, only {only!r}"
    return ApiError(404, text, param="model", code="model_not_found")


def engine_lost(why: str) -> ApiError:
    return ApiError(503, why, code="engine_lost")


def of_engine(error: PearlError, param: str | None = None) -> ApiError:
    """An error of the engine as one for the client.

    Args:
        param: the field that a `RequestError` is about, unless its text begins with another field's name.
    """
    match error:
        case RequestError() | ConfigError():
            first = str(error).partition(" ")[0]
            return ApiError(400, str(error), param=first if first in OPTIONS else param)
        case GrammarError():
            return ApiError(400, str(error), code=type(error).__name__)
        case EngineClosed():
            return ApiError(503, "the server is shutting down", code="shutting_down")
        case TargetLost() | StartError() | TransportError():
            return engine_lost(str(error))
        case _:
            return ApiError(500, str(error), code=type(error).__name__)
