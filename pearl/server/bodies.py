"""The bodies of requests as pydantic models, which also give /openapi.json. Raises `ApiError` that names the field.

A field is honoured, ignored because it cannot change the text, or refused by name, so that no client believes that a
setting had an effect which it had not.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)

from pearl.config.sampling import LONGEST_STOP, MAX_BIASES, MAX_LOGPROBS, MOST_STOPS, SamplingParams
from pearl.document import parse_json
from pearl.server.errors import ApiError

MOST_TEXTS = 128  # of one request: prompts times n
MOST_MESSAGES = 4096
MOST_TOOLS = 128

# Fields that are not supported -> values that are accepted, for they have no effect. Null is, for every field.
_Unserved = dict[str, tuple[Any, ...]]
_UNSERVED: _Unserved = {
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "best_of": (1,),
    "suffix": ("",),
    "min_tokens": (0,),
    "metadata": ({},),
    **dict.fromkeys(("echo", "store"), (False,)),
    **dict.fromkeys(("audio", "prediction", "reasoning_effort", "verbosity"), ()),
    **dict.fromkeys(("web_search_options", "prompt_cache_retention"), ()),
}
# Clients send back the messages that they received.
_UNSERVED_IN_MESSAGE: _Unserved = {
    **dict.fromkeys(("name", "function_call", "refusal", "audio"), ()),
    "annotations": ([],),
}
# Errors below one of these paths name this path.
_WHOLE = re.compile(
    r"^(prompt|stop|logit_bias|tools\[\d+\](?=\.type)|tools\[\d+\]\.function|structured_outputs(?=\.(?:json|regex)$)"
    r"|response_format\.json_schema|messages\[\d+\]\.content\[\d+\](?=\.type)"
    r"|messages\[\d+\]\.tool_calls\[\d+\](?!\.function\.arguments))(?!\w).*",
    re.DOTALL,
)


class Body(BaseModel):
    """A JSON object. Nulls count as missing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    unserved: ClassVar[_Unserved] = {}
    known: ClassVar[set[str]] = set()

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            raise ValueError("must be an object")
        kept, is_known = {}, True
        for name, value in given.items():
            if value is None or (name in cls.unserved and any(_same(value, one) for one in cls.unserved[name])):
                continue
            if name in cls.known:
                kept[name] = value
            elif is_known:  # the first unknown field only: pydantic would report each of very many
                is_known = False
                kept[name.encode(errors="backslashreplace").decode()] = value
        return kept

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.known = {field.alias or name for name, field in cls.model_fields.items()}


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _check_text(value: Any) -> Any:
    """JSON can hold half a surrogate pair, which tokenizers reject."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which is no character") from None
    except RecursionError:
        raise ValueError("is nested too deep") from None
    return value


Text = Annotated[str, AfterValidator(_check_text)]


def _arguments(value: Any) -> Any:
    try:
        return parse_json(value or "{}")
    except (TypeError, ValueError):
        raise ValueError("must be the text of a JSON object") from None


def _only_with(field: str, other: str, wanted: Any) -> Any:
    """A validator: `field` is allowed only if the field `other`, declared before it, has this value."""

    def check(cls: type[Body], value: Any, info: ValidationInfo) -> Any:
        if value not in (None, [], 0) and info.data.get(other) != wanted:
            raise ValueError(f"is for {other} {json.dumps(wanted)} only")
        return value

    return field_validator(field, mode="before")(classmethod(check))


# ---- chats ----


class TextPart(Body):
    type: Literal["text"]
    text: Text


class CalledFunction(Body):
    model_config = ConfigDict(extra="ignore")
    name: str
    arguments: Annotated[
        dict[str, Any],
        BeforeValidator(_arguments),
        WithJsonSchema({"type": "string", "contentMediaType": "application/json"}),
    ] = Field(default_factory=dict)


class ToolCall(Body):
    model_config = ConfigDict(extra="ignore")
    id: Any = None
    type: Literal["function"]
    function: CalledFunction

    @model_validator(mode="after")
    def _is_text(self) -> ToolCall:
        _check_text([self.id, self.function.name, self.function.arguments])
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: the arguments are an object, not its JSON text."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"type": "function", "function": function} | ({"id": self.id} if isinstance(self.id, str) else {})


class ChatMessage(Body):
    unserved: ClassVar = _UNSERVED_IN_MESSAGE
    role: Literal["system", "user", "assistant", "tool"]
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] = Field(default=[], description="Of role assistant.")
    tool_call_id: str | None = Field(default=None, description="Of role tool.")
    content: (
        Annotated[
            Annotated[Text, Tag("|")] | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag("|parts")],
            Discriminator(lambda value: "|" if isinstance(value, str) else "|parts"),
        ]
        | None
    ) = Field(default=None, validate_default=True, description="Only an assistant that calls tools may leave it out.")

    reasoning_content: Text | None = Field(default=None, description="Of role assistant; for the chat template.")

    _of_assistant = _only_with("tool_calls", "role", "assistant")
    _of_thinking = _only_with("reasoning_content", "role", "assistant")
    _of_tool = _only_with("tool_call_id", "role", "tool")

    @field_validator("content")
    @classmethod
    def _is_there(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and not info.data.get("tool_calls"):
            raise ValueError("must be text or a list of text parts")
        return value

    def for_template(self) -> dict[str, Any]:
        text = self.content or ""
        made: dict[str, Any] = {
            "role": self.role,
            "content": text if isinstance(text, str) else "\n".join(part.text for part in text),
        }
        if self.tool_calls:
            made["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.reasoning_content is not None:
            made["reasoning_content"] = self.reasoning_content
        return made if self.tool_call_id is None else made | {"tool_call_id": self.tool_call_id}


class Function(Body):
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: Any = Field(default=None, description="Ignored.")


class Tool(Body):
    type: Literal["function"]
    function: Function

    _is_text = model_validator(mode="before")(_check_text)


# ---- grammars and streams ----


class NamedSchema(Body):
    name: Any = Field(default=None, description="Ignored, as are description and strict.")
    description: Any = None
    strict: Any = None
    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = Field(default=None, validate_default=True)

    @field_validator("json_schema")
    @classmethod
    def _of_its_type(cls, value: Any, info: ValidationInfo) -> Any:
        if (value is not None) != (info.data.get("type") == "json_schema"):
            raise ValueError("is needed with type json_schema, and for it alone")
        return value

    @property
    def grammar(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that keep the text to it."""
        if self.json_schema is not None:
            return {"json_schema": self.json_schema.json_schema}
        return {"json_schema": {"type": "object"}} if self.type == "json_object" else {}


class StructuredOutputs(Body):
    """vLLM's grammars; at most one of them."""

    json_schema: dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = Field(default=None, min_length=1)
    json_object: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        if (self.json_schema is not None) + (self.regex is not None) + self.json_object > 1:
            raise ValueError("takes one of json, regex, json_object")
        return self

    @property
    def grammar(self) -> dict[str, Any]:
        given = {"json_schema": {"type": "object"} if self.json_object else self.json_schema, "regex": self.regex}
        return {name: value for name, value in given.items() if value is not None}


class StreamOptions(Body):
    unserved: ClassVar = {"include_obfuscation": (False,)}
    include_usage: bool = False
    include_provenance: bool = False


# ---- requests ----

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_Prompt = Annotated[Text, Field(min_length=1)] | Annotated[list[_TokenId], Field(min_length=1, fail_fast=True)]
_Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


def _sampling(*names: str) -> dict[str, Any]:
    return {name: (SamplingParams.model_fields[name].annotation, SamplingParams.model_fields[name]) for name in names}


class _Request(create_model("Sampling", __base__=Body, **_sampling(*SAMPLING))):  # type: ignore[misc]
    """The fields of both endpoints; those of `SamplingParams` have its bounds."""

    unserved: ClassVar = _UNSERVED
    model: str
    n: int = Field(default=1, ge=1, le=MOST_TEXTS)
    stream: bool = False
    stream_options: StreamOptions | None = Field(default=None, description="Only with stream true.")
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,20}$")], float] = Field(default={}, max_length=MAX_BIASES)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: Any = Field(default=None, description="Ignored, as are safety_identifier and prompt_cache_key.")
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _is_short(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_BIASES:  # before each of very many is checked
            raise ValueError(f"takes at most {MAX_BIASES} token ids")
        return value

    _of_stream = _only_with("stream_options", "stream", True)


class CompletionRequest(_Request):
    unserved: ClassVar = {**_UNSERVED, "tools": ([],), "tool_choice": ("none", "auto"), "logprobs": (False,)}
    prompt: _Prompt | Annotated[list[_Prompt], Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True)]
    logprobs: _Logprobs | None = None


class ChatCompletionRequest(_Request):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    logprobs: bool = False
    top_logprobs: _Logprobs = 0
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] = Field(default=[])
    tool_choice: Literal["none", "auto"] = "auto"
    max_completion_tokens: int | None = Field(default=None, ge=1)

    _of_logprobs = _only_with("top_logprobs", "logprobs", True)


_Some = TypeVar("_Some", bound=_Request)


def validate(model: type[_Some], body: Any) -> _Some:
    """The body as `model`. Raises `ApiError`."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False), model) from None


def _refusal(errors: list[Any], model: type[Body]) -> ApiError:
    """For the first error, but preferably for an unknown field: it may be the misspelled name of a missing one."""
    first = next((e for e in errors if e["type"] == "extra_forbidden" and len(e["loc"]) == 1), errors[0])
    param = _path(first["loc"])
    if first["type"] != "extra_forbidden":
        param = "response_format.type" if param == "response_format" else _WHOLE.sub(r"\1", param)
        # One error for each type that the field may have.
        several = [e for e in errors if e["loc"][0] == param] if param in ("prompt", "stop") else [first]
        messages = dict.fromkeys(re.sub("^(Value error, |Input )", "", e["msg"]) for e in several)
        return ApiError(400, f"{param}: {' or '.join(messages)}", param=param)
    name = str(first["loc"][-1])
    unserved = {"messages": ChatMessage.unserved, "stream_options": StreamOptions.unserved}
    if name in (model.unserved if len(first["loc"]) == 1 else unserved.get(first["loc"][0], ())):
        return ApiError(400, f"{param} is not supported", param=param, code="unsupported_parameter")
    return ApiError(400, f"unknown field {param!r}", param=param, code="unknown_parameter")


def _path(loc: tuple[int | str, ...]) -> str:
    """Such as messages[0].content; tags of unions begin with |."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part:.100}" for part in loc if str(part)[:1] != "|")
    return "".join(parts).removeprefix(".")
