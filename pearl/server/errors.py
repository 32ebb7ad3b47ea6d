"""Errors for clients: OpenAI's error object and a status code. Errors of the engine and of pydantic are converted."""

import re
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

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

# An error within one of these fields names the whole field.
_WHOLE = re.compile(
    r"^(prompt|input|stop|stop_token_ids|logit_bias|tool_choice|tools\[\d+\](?=\.type)|tools\[\d+\]\.function"
    r"|response_format\.json_schema|messages\[\d+\]\.content\[\d+\](?=\.type)"
    r"|messages\[\d+\]\.tool_calls\[\d+\])(?!\w).*",
    re.DOTALL,
)
_HEADERS = {  # by status
    401: {"www-authenticate": "Bearer"},
    408: {"connection": "close"},  # so that the rest of the body is not read as a request
}


class Problem(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The body of an error, as /openapi.json describes it."""

    error: Problem


@dataclass(eq=False)
class ApiError(Exception):
    """The error with which the server refuses a request.

    Attributes:
        status: the HTTP status code.
        param: the name of the wrong field; None if the error is about no single field.
        code: a short name that programs can test.
    """

    status: int
    message: str
    param: str | None = field(default=None, kw_only=True)
    code: str | None = field(default=None, kw_only=True)

    @property
    def body(self) -> dict[str, Any]:
        if self.status >= 500:
            kind = "server_error"
        elif self.status == 401:
            kind = "authentication_error"
        else:
            kind = "invalid_request_error"
        problem = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": problem}

    @property
    def headers(self) -> dict[str, str]:
        return _HEADERS.get(self.status, {})


def invalid(param: str, problem: str) -> ApiError:
    """Make the refusal of a request whose field `param` is wrong."""
    return ApiError(400, f"{param}: {problem}", param=param)


def no_model(name: str, only: str) -> ApiError:
    text = f"there is no model {name[:100]!r} here, only {only!r}"
    return ApiError(404, text, param="model", code="model_not_found")


def of_engine(error: PearlError, param: str | None = None) -> ApiError:
    """Turn an error of the engine into an error for the client.

    Args:
        param: the field that a `RequestError` or `ConfigError` is about. If the error's text begins
            with the name of an option, that option is named instead.
    """
    match error:
        case RequestError() | ConfigError():
            name = str(error).partition(" ")[0]
            if name in OPTIONS:
                param = name
            return ApiError(400, str(error), param=param)
        case GrammarError():
            return ApiError(400, str(error), code=type(error).__name__)
        case EngineClosed():
            return ApiError(503, "the server is shutting down", code="shutting_down")
        case TargetLost() | StartError() | TransportError():
            return ApiError(503, str(error), code="engine_lost")
        case _:
            return ApiError(500, str(error), code=type(error).__name__)


def invalid_field(failure: ValidationError) -> ApiError:
    """Turn pydantic's errors about a body into the refusal of its first invalid field."""
    errors: list[Any] = failure.errors(include_url=False, include_input=False)
    first_error = errors[0]
    path = _path(first_error["loc"])
    if first_error["type"] == "extra_forbidden":
        return ApiError(400, f"{path} is not supported", param=path, code="unsupported_parameter")
    param = _WHOLE.sub(r"\1", path)
    if first_error["type"] == "missing":
        is_whole = param == path
        first_error["msg"] = "is missing" if is_whole else f"{first_error['loc'][-1]} is missing"
    if path == "response_format":
        param = "response_format.type"
    if param in ("prompt", "input", "stop"):  # pydantic has an error for each type of these
        errors = [error for error in errors if error["loc"][0] == param]
    else:
        errors = [first_error]
    messages = dict.fromkeys(_in_words(error["msg"]) for error in errors)
    if not param:  # two fields contradict each other: the message names the one to report first
        text = next(iter(messages))
        return ApiError(400, text, param=text.partition(" ")[0])
    return invalid(param, " or ".join(messages))


def _in_words(message: str) -> str:
    """Return pydantic's message without words for programmers, such as "Value error, "."""
    message = re.sub(
        "^(Value error, |(Input|String|List|Value|Dictionary) (?=should ))", "", message
    )
    return re.sub(" after validation, not [0-9]+$", "", message)


def _path(loc: tuple[int | str, ...]) -> str:
    """Return pydantic's location as a path such as messages[0].content.

    Tags of unions, such as "|text", are left out.
    """
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("|"):
            path += f".{part:.100}"
    return path.removeprefix(".")
