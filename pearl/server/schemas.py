"""The bodies of requests as pydantic models, and the checks that their fields share.

/openapi.json is made from the same models. A field that is not supported is refused by name if it
would change the text, and ignored otherwise. Unknown fields are ignored, so that clients of other
servers need no change; the log warns once about each.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.resources import files
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from pearl.config.option_names import NUMBERS, bounds_of, description_of, type_of
from pearl.config.option_values import LONGEST_STOP, MAX_BIASES, MAX_LOGPROBS, MOST_STOPS
from pearl.config.options import OPTIONS
from pearl.server.errors import ApiError, invalid_field
from pearl.spec.methods import METHODS

log = logging.getLogger(__name__)

MOST_TEXTS = 128  # of one request: prompts times n
MOST_MESSAGES = 4096
MOST_TOOLS = 128
MOST_UNKNOWN = 8  # unknown fields of a request that the log names
_MOST_WARNED = 100  # warnings about requests: bounded, because clients choose the names in them
warned: set[str] = set()

# Fields that are refused or ignored; for each refused field, the values that are accepted because they change nothing.
FOREIGN_FIELDS: dict[str, Any] = yaml.decode(
    (files("pearl.server") / "foreign_fields.yaml").read_bytes()
)


# ---- shared checks ----


class Body(BaseModel):
    """A JSON object; a field that is null counts as missing.

    The validation context is a set, to which validation adds the names of unknown fields.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    unserved: ClassVar[dict[str, Any]] = {}
    field_names: ClassVar[set[str]] = set()

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, body: Any, info: ValidationInfo) -> Any:
        if not isinstance(body, dict):
            raise ValueError("must be an object")
        fields = {}
        unknown: Any = info.context
        for name, value in body.items():
            if value is None or _is_among(value, cls.unserved.get(name, ())):
                continue
            if name in cls.field_names or name in cls.unserved:  # pydantic refuses the latter
                fields[name] = value
            elif name not in FOREIGN_FIELDS["ignored"] and len(unknown) < MOST_UNKNOWN:
                unknown.add(name[:50])
        return fields

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.field_names = {field.alias or name for name, field in cls.model_fields.items()}


def _is_among(value: Any, neutral_values: Sequence[Any]) -> bool:
    """Return whether `value` is one of `neutral_values`. Unlike in Python, false is not 0 and true is not 1."""
    is_bool = isinstance(value, bool)
    return any(
        value == neutral and isinstance(neutral, bool) is is_bool for neutral in neutral_values
    )


def check_text(value: Any) -> Any:
    """Return `value`. Raise `ValueError` if any text in it has half a surrogate pair, which tokenizers reject."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which is no character") from None
    except RecursionError:
        raise ValueError("is nested too deep") from None
    return value


Text = Annotated[str, AfterValidator(check_text)]


def only_with(field: str, other: str, required: Any) -> Any:
    """Return a validator that allows `field` only if the field `other` has the value `required`.

    `other` must be declared before `field`.
    """

    def check(cls: type[Body], value: Any, info: ValidationInfo) -> Any:
        if value not in (None, [], 0) and info.data.get(other) != required:
            raise ValueError(f"is for {other} {json.dumps(required)} only")
        return value

    return field_validator(field, mode="before")(classmethod(check))


_Schema = TypeVar("_Schema", bound=Body)


def validate(schema: type[_Schema], body: Any) -> _Schema:
    """Parse a body as `schema`, and warn about its unknown fields. Raises `ApiError`."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    unknown = set[str]()
    try:
        request = schema.model_validate(body, context=unknown)
    except ValidationError as error:
        raise invalid_field(error) from None
    for name in sorted(unknown):
        nearest = get_close_matches(name, schema.field_names, n=1)
        hint = f": did you mean {nearest[0]}?" if nearest else ""
        warn_once(f"requests have the field {name!r}, which is not known and ignored{hint}")
    return request


def warn_once(message: str) -> None:
    """Log a warning about what clients send, unless it was logged before."""
    if message not in warned and len(warned) < _MOST_WARNED:
        warned.add(message)
        log.warning("%s", message)


# ---- chats ----


class TextPart(Body):
    type: Literal["text"]
    text: Text

    @field_validator("type", mode="before")
    @classmethod
    def _is_no_picture(cls, value: Any) -> Any:
        if value in FOREIGN_FIELDS["pictures"]:
            raise ValueError(f"{value} is not supported: the model gets text alone")
        return value


class CalledFunction(Body):
    model_config = ConfigDict(extra="ignore")
    name: str
    arguments: str = Field(
        default="{}", description="JSON; where the model's text was cut, a part of it."
    )


class ToolCall(Body):
    model_config = ConfigDict(extra="ignore")
    id: Any = None
    type: Literal["function"]
    function: CalledFunction

    @model_validator(mode="after")
    def _is_text(self) -> ToolCall:
        check_text([self.id, self.function.name, self.function.arguments])
        return self

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments or "{}"}
        call: dict[str, Any] = {"type": "function", "function": function}
        if isinstance(self.id, str):
            call["id"] = self.id
        return call


class ChatMessage(Body):
    unserved: ClassVar = FOREIGN_FIELDS["refused_in_messages"]
    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: Text | None = Field(default=None, description="For the chat template.")
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] = Field(
        default=[], description="Of role assistant."
    )
    tool_call_id: str | None = Field(default=None, description="Of role tool.")
    reasoning_content: Text | None = Field(
        default=None, description="Of role assistant; for the chat template."
    )
    reasoning: Text | None = Field(default=None, description="The same by its other name.")
    content: (
        Annotated[
            Annotated[Text, Tag("|")]
            | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag("|parts")],
            Discriminator(lambda value: "|" if isinstance(value, str) else "|parts"),
        ]
        | None
    ) = Field(
        default=None,
        validate_default=True,
        description="Only an assistant that thinks or calls tools may leave it out.",
    )

    _of_assistant = only_with("tool_calls", "role", "assistant")
    _of_thinking = only_with("reasoning_content", "role", "assistant")
    _of_reasoning = only_with("reasoning", "role", "assistant")
    _of_tool = only_with("tool_call_id", "role", "tool")

    @field_validator("content")
    @classmethod
    def _is_there(cls, value: Any, info: ValidationInfo) -> Any:
        replacements = ("tool_calls", "reasoning_content", "reasoning")
        if value is None and not any(info.data.get(name) for name in replacements):
            raise ValueError("must be text or a list of text parts")
        return value

    def for_template(self) -> dict[str, Any]:
        content = self.content or ""
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        reasoning = self.reasoning_content or self.reasoning
        if reasoning:
            message["reasoning_content"] = reasoning
        return message | self.model_dump(include={"name", "tool_call_id"}, exclude_none=True)


class Function(Body):
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: Any = Field(default=None, description="Ignored.")


class Tool(Body):
    type: Literal["function"]
    function: Function

    _is_text = model_validator(mode="before")(check_text)


def is_function(tool: Any) -> bool:
    """Return whether to keep a tool; tools of other types than "function" are left out.

    The log warns about a tool that is left out. A tool whose type is no string is kept, so that
    validation refuses it.
    """
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or kind == "function":
        return True
    warn_once(
        f"requests have tools of type {kind[:50]!r}: left out, for functions alone are called"
    )
    return False


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ToolSubset(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[NamedTool], Field(min_length=1, max_length=MOST_TOOLS, fail_fast=True)
    ] = Field(description="The functions that may be called, of those in tools.")


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


def _kind_of_choice(choice: Any) -> str:
    """Return the tag by which pydantic finds the type of a `tool_choice`.

    The tag is "|" for a word such as "auto", "|allowed" for a subset of the tools, and "|named" for
    one function.
    """
    if isinstance(choice, str):
        return "|"
    is_subset = isinstance(choice, dict) and choice.get("type") == "allowed_tools"
    return "|allowed" if is_subset else "|named"


# ---- grammars and streams ----


class NamedSchema(Body):
    name: Any = Field(default=None, description="Ignored, as are description and strict.")
    description: Any = None
    strict: Any = None
    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    unserved: ClassVar = {"schema": ()}
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = Field(default=None, validate_default=True)

    @field_validator("json_schema")
    @classmethod
    def _of_its_type(cls, value: Any, info: ValidationInfo) -> Any:
        if (value is not None) != (info.data.get("type") == "json_schema"):
            raise ValueError("is needed with type json_schema, and for it alone")
        return value

    @property
    def schema_to_keep(self) -> dict[str, Any] | None:
        """The JSON schema that the text has to match; None if the text is free."""
        if self.json_schema is not None:
            return self.json_schema.json_schema
        if self.type == "json_object":
            return {"type": "object"}
        return None


class Prediction(Body):
    type: Literal["content"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] = Field(
        description="What the answer probably is, such as the file to be edited: speed, and no other text."
    )

    @property
    def text(self) -> str:
        """The predicted text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class StreamOptions(Body):
    include_usage: bool = False
    include_provenance: bool = False


# ---- requests ----

_BOOLEANS = {"true": True, "false": False}
OFF = "off"  # value of `speculation` that turns speculation off: the target decodes alone
_Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_Prompt = (
    Annotated[Text, Field(min_length=1)]
    | Annotated[list[_TokenId], Field(min_length=1, fail_fast=True)]
)


def _field_of(name: str) -> Any:
    """Return an option's type, and a pydantic field with its bounds, default and description."""
    option = OPTIONS[name]
    bounds = {}
    for bound in bounds_of(option.type):
        for limit in ("ge", "gt", "le", "lt"):
            value = getattr(bound, limit)
            if value is not None:
                bounds[limit] = value
    field = Field(default=option.default, description=description_of(name), **bounds)
    return type_of(option.type) | None, field


_FIELDS: dict[str, Any] = {name: _field_of(name) for name in NUMBERS}


class SharedRequest(create_model("Sampling", __base__=Body, **_FIELDS)):  # type: ignore[misc]
    """The fields that all endpoints share.

    A field that is also an option of `RequestOptions` has the bounds of that option.
    """

    unserved: ClassVar = FOREIGN_FIELDS["refused"]
    model: str
    n: int = Field(default=1, ge=1, le=MOST_TEXTS)
    stream: bool = False
    stream_options: StreamOptions | None = Field(default=None, description="Only with stream true.")
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,20}$")], float] = Field(
        default={}, max_length=MAX_BIASES
    )
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=MOST_STOPS, fail_fast=True)] = Field(
        default=[]
    )
    speculation: Literal[(OFF, *METHODS)] | None = Field(  # type: ignore[valid-type]
        default=None,
        description="The method of this text in place of the server's; off, or false: the target alone.",
    )

    @field_validator("top_k", "seed", mode="before")
    @classmethod
    def _as_elsewhere(cls, value: Any, info: ValidationInfo) -> Any:
        """Accept negative values that other servers accept.

        A top_k of -1 becomes 0 (off). A negative seed becomes the unsigned number with the same 64
        bits.
        """
        if type(value) is not int or not -(2**63) <= value < 0:
            return value
        if info.field_name == "seed":
            return value % 2**64
        return 0 if value == -1 else value

    @field_validator("speculation", mode="before")
    @classmethod
    def _in_words(cls, value: Any) -> Any:
        if isinstance(value, bool):
            return None if value else OFF
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _is_short(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_BIASES:  # before pydantic checks each of very many
            raise ValueError(f"takes at most {MAX_BIASES} token ids")
        if not all(key.isascii() and key.isdigit() for key in value):
            raise ValueError('takes token ids, each with a number, such as {"42": -100}')
        return value

    @field_validator("logit_bias")
    @classmethod
    def _as_pairs(cls, value: dict[str, float]) -> list[tuple[int, float]]:
        return [(int(token), bias) for token, bias in value.items()]

    _of_stream = only_with("stream_options", "stream", True)

    @property
    def options(self) -> dict[str, Any]:
        """The fields of `RequestOptions` that the request sets."""
        options = {name: getattr(self, name) for name in OPTIONS.keys() & self.model_fields_set}
        if self.prediction is not None:
            options["prediction"] = self.prediction.text
        return options

    @property
    def forced_functions(self) -> list[Function]:
        """The functions among which the model must choose its call; empty if the model may answer with text."""
        return []


class CompletionRequest(SharedRequest):
    unserved: ClassVar = SharedRequest.unserved | FOREIGN_FIELDS["refused_in_completions"]
    prompt: (
        _Prompt
        | Annotated[list[_Prompt], Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True)]
    )

    @field_validator("prompt", mode="before")
    @classmethod
    def _is_some(cls, value: Any) -> Any:
        if value in ("", []):
            raise ValueError("must not be empty")
        return value


def _names_in(choice: Any) -> list[str]:
    """Return the names of the functions that a `tool_choice` names."""
    if isinstance(choice, NamedTool):
        return [choice.function.name]
    if isinstance(choice, AllowedTools):
        return [tool.function.name for tool in choice.allowed_tools.tools]
    return []


class ChatCompletionRequest(SharedRequest):
    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    ]
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] = Field(default=[])
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"], Tag("|")]
        | Annotated[NamedTool, Tag("|named")]
        | Annotated[AllowedTools, Tag("|allowed")],
        Discriminator(_kind_of_choice),
    ] = "auto"
    parallel_tool_calls: bool = Field(
        default=True, description="False: only the first call is returned."
    )
    max_completion_tokens: int | None = Field(default=None, ge=1)
    reasoning_effort: Text | None = Field(
        default=None, description="For the chat template; none: enable_thinking off."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={}, description="Variables of the chat template."
    )
    continue_final_message: bool = Field(
        default=False, description="Continue the last message, an assistant's."
    )
    add_generation_prompt: bool = Field(
        default=True, description="False only with continue_final_message true."
    )

    _of_logprobs = only_with("top_logprobs", "logprobs", True)
    _is_text = field_validator("chat_template_kwargs", mode="before")(check_text)

    @field_validator("tools", mode="before")
    @classmethod
    def _are_functions(cls, value: Any) -> Any:
        return list(filter(is_function, value)) if isinstance(value, list) else value

    @field_validator("tool_choice")
    @classmethod
    def _is_listed(cls, value: Any, info: ValidationInfo) -> Any:
        names = [tool.function.name for tool in info.data.get("tools", ())]
        for name in _names_in(value):
            if name not in names:
                raise ValueError(f"names the function {name[:100]!r}, which is not in tools")
        if value == "required" and not names:
            raise ValueError("required needs tools")
        return value

    @model_validator(mode="after")
    def _continues_an_assistant(self) -> ChatCompletionRequest:
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message is for a last message of role assistant")
        if not self.add_generation_prompt and not self.continue_final_message:
            raise ValueError("add_generation_prompt false is for continue_final_message true only")
        return self

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = super().options
        if "logprobs" in options:
            options["logprobs"] = self.top_logprobs if self.logprobs else None
        if self.max_completion_tokens is not None:
            options["max_tokens"] = self.max_completion_tokens
        return options

    @property
    def allowed_functions(self) -> list[Function]:
        """The functions that the model may call."""
        if self.tool_choice == "none":
            return []
        functions = [tool.function for tool in self.tools]
        if not isinstance(self.tool_choice, AllowedTools):
            return functions
        names = _names_in(self.tool_choice)
        return [function for function in functions if function.name in names]

    @property
    def forced_functions(self) -> list[Function]:
        """The functions from which the model must call one. Empty if it may answer with text."""
        mode = self.tool_choice
        if isinstance(mode, NamedTool):
            name = mode.function.name
            return [tool.function for tool in self.tools if tool.function.name == name]
        if isinstance(mode, AllowedTools):
            mode = mode.allowed_tools.mode
        return self.allowed_functions if mode == "required" else []

    @property
    def variables(self) -> dict[str, Any]:
        """The variables that the chat template gets."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            variables["enable_thinking"] = False
        for name, value in self.chat_template_kwargs.items():
            variables[name] = value
            if isinstance(value, str):  # a template takes any text for true, "false" too
                variables[name] = _BOOLEANS.get(value.lower(), value)
        return variables
