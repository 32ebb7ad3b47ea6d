"""Turns the body of a request into prompts and options. No I/O; raises `ApiError`s that name the field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pearl.config import RequestOptions, Settings
from pearl.config.options import NUMBERS
from pearl.engine.request import Chat, Prompt
from pearl.errors import ConfigError, RequestError
from pearl.server.errors import ApiError, invalid, no_model
from pearl.server.http import Parts
from pearl.server.schemas import (
    MOST_TEXTS,
    ChatCompletionRequest,
    CompletionRequest,
    Function,
    validate,
)
from pearl.text.grammar import grammar_of
from pearl.text.reasoning import splitter_of
from pearl.text.stream import Tokenizer
from pearl.text.tools import FORMATS, CallSplitter, Format, forced_schema

LEGACY_MAX_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions

TextBody = ChatCompletionRequest | CompletionRequest


@dataclass(frozen=True)
class Setup:
    """What a server serves.

    Attributes:
        model: the name under which clients request the model.
        settings: the engine's settings, whose options are the defaults of requests.
        tools: the format in which the model writes calls.
    """

    model: str
    settings: Settings
    tools: Format = FORMATS["hermes"]


@dataclass(frozen=True)
class TextRequest:
    """A checked request.

    Attributes:
        prompts: texts, token ids, or the messages of one chat.
        params: how to decode and sample; `numbered` has them for each text.
        format: the format of calls in the text; None if the text may have none.
        chat_field: the endpoint's name of the field with a chat's messages.
        chat_limit_field: the endpoint's name of `max_completion_tokens`.
    """

    body: TextBody
    prompts: tuple[Prompt, ...]
    params: RequestOptions
    format: Format | None = None
    chat_field: str = "messages"
    chat_limit_field: str = "max_completion_tokens"

    @property
    def is_chat(self) -> bool:
        return isinstance(self.body, ChatCompletionRequest)

    def parts(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> Parts:
        """Make what splits one text into reasoning, content and calls."""
        if not isinstance(self.body, ChatCompletionRequest):
            return Parts()
        thoughts = None
        if self.params.json_schema is None and self.params.regex is None:  # else without tags
            thoughts = splitter_of(tokenizer, prompt)
        if self.format is None:
            return Parts(thoughts)
        names = [tool.function.name for tool in self.body.tools]
        is_forced = bool(self.body.forced_functions)
        max_calls = None if self.body.parallel_tool_calls else 1
        return Parts(thoughts, CallSplitter(self.format, names, is_forced, max_calls))

    @property
    def prompt_field(self) -> str:
        return self.chat_field if self.is_chat else "prompt"

    @property
    def limit_field(self) -> str:
        """The field that set max_tokens; empty if it is a default."""
        if "max_completion_tokens" in self.body.model_fields_set:
            return self.chat_limit_field
        return "max_tokens" if "max_tokens" in self.body.model_fields_set else ""

    def numbered(self, sample: int, room: int) -> RequestOptions:
        """Return the params of text number `sample`, from 0; all share one seed.

        Args:
            room: tokens that the context has besides the prompt; bounds a default of max_tokens.
        """
        max_tokens = self.params.max_tokens
        if max_tokens is not None and not self.limit_field:
            max_tokens = min(max_tokens, room)
        return self.params.changed(sample=sample, max_tokens=max_tokens)


def read_request(body: Any, is_chat: bool, setup: Setup) -> TextRequest:
    """Check the parsed body. `is_chat`: whether it was sent to /v1/chat/completions."""
    schema = ChatCompletionRequest if is_chat else CompletionRequest
    request: TextBody = validate(schema, body)
    if request.model != setup.model:
        raise no_model(request.model, setup.model)
    prompts: tuple[Prompt, ...]
    if isinstance(request, ChatCompletionRequest):
        prompts = (_chat(request, body, setup),)
    else:
        prompts = _prompts(request)
    if request.n * len(prompts) > MOST_TEXTS:
        text = f"prompts times n may be at most {MOST_TEXTS} texts a request"
        raise ApiError(400, text, param="n")
    params = _params(request, setup).with_seed()
    may_call = isinstance(prompts[0], Chat) and bool(prompts[0].tools)
    if isinstance(request, ChatCompletionRequest) and not request.forced_functions:
        may_call = may_call and params.json_schema is None
    return TextRequest(request, prompts, params, setup.tools if may_call else None)


def _chat(request: ChatCompletionRequest, body: Mapping[str, Any], setup: Setup) -> Prompt:
    messages = [message.for_template() for message in request.messages]
    prefix = ""
    if request.continue_final_message:
        prefix = messages.pop()["content"]
    tools: list[dict[str, Any]] = []
    if request.tools and request.tool_choice != "none":
        tools = [_tool(tool["function"]) for tool in body["tools"]]
    if request.forced_functions:
        prefix += setup.tools.prefix
    if tools or prefix or request.variables:
        return Chat(messages, tools, prefix, request.variables)
    return messages


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool from the body, as templates write its fields in the client's order."""
    fields = {}
    for name, value in function.items():
        if name in Function.field_names and name != "strict" and value is not None:
            fields[name] = value
    return {"type": "function", "function": fields}


def _prompts(request: CompletionRequest) -> tuple[Prompt, ...]:
    prompt: Any = request.prompt
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        return tuple(prompt)
    return (prompt,)


def _params(request: TextBody, setup: Setup) -> RequestOptions:
    defaults = setup.settings.options
    values: dict[str, Any] = {}
    for name in NUMBERS:
        if name in request.model_fields_set:
            values[name] = getattr(request, name)
    if isinstance(request, CompletionRequest):
        values.setdefault("max_tokens", defaults.max_tokens or LEGACY_MAX_TOKENS)
    else:
        if request.max_completion_tokens is not None:
            values["max_tokens"] = request.max_completion_tokens
        if request.logprobs:
            values["logprobs"] = request.top_logprobs
    if request.stop is not None:
        values["stop"] = request.stop
    if request.stop_token_ids:
        values["stop_token_ids"] = tuple(request.stop_token_ids)
    if request.logit_bias:
        biases = request.logit_bias.items()
        values["logit_bias"] = tuple((int(token), bias) for token, bias in biases)
    try:
        return defaults.changed(**(values | _grammar(request, setup)))
    except ConfigError as error:  # it begins with a field's name
        raise ApiError(400, str(error), param=re.split(r"\W", str(error))[0]) from None


def _grammar(request: TextBody, setup: Setup) -> dict[str, Any]:
    """Return the options that keep the text to a grammar: of `response_format`, or of a call that must be made."""
    field = "response_format"
    schema = None
    if request.response_format is not None:
        schema = request.response_format.schema_to_keep
    if isinstance(request, ChatCompletionRequest) and request.forced_functions:
        field = "tools"
        functions = [function.model_dump() for function in request.forced_functions]
        try:
            schema = forced_schema(functions, setup.tools.key)
        except RecursionError:
            raise invalid("tools", "are nested too deep") from None
    if schema is None:
        return {}
    if request.ignore_eos:
        text = f"{field} ends a text where it is whole, which ignore_eos forbids"
        raise ApiError(400, text, param="ignore_eos")
    try:
        grammar_of(RequestOptions(json_schema=schema).json_schema, None)
    except (ConfigError, RequestError) as error:
        raise invalid(field, str(error)) from None
    return {"json_schema": schema, "regex": None}


def check_fits(tokens: Sequence[int], request: TextRequest, context: int) -> None:
    """Raise `ApiError` if prompt and text do not fit the context."""
    if not tokens:
        raise ApiError(400, "the prompt is empty", param=request.prompt_field)
    limit = request.limit_field
    max_tokens = request.params.max_tokens if limit else None
    if len(tokens) + (max_tokens or 1) <= context:
        return
    text = f"the context holds {context} tokens; the prompt has {len(tokens)}"
    if max_tokens:
        text += f" and {limit} asks for {max_tokens}"
    param = request.prompt_field if len(tokens) >= context else limit
    raise ApiError(400, text, param=param, code="context_length_exceeded")
