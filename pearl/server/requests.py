"""Turns the body of a request into prompts and options, without I/O. An `ApiError` names the field that is wrong."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pearl.config import EngineConfig, RequestOptions
from pearl.engine.request import Chat, Prompt, as_prompts
from pearl.errors import ConfigError, RequestError
from pearl.server.errors import ApiError, invalid, no_model
from pearl.server.http import ReplyText
from pearl.server.schemas import (
    MOST_TEXTS,
    OFF,
    ChatCompletionRequest,
    CompletionRequest,
    Function,
    is_function,
    validate,
)
from pearl.text.grammar import grammar_of
from pearl.text.reasoning import is_open_after, tags_after, tags_for
from pearl.text.reply import parser_of
from pearl.text.stream import Tokenizer
from pearl.text.tools import FORMATS, Format, forced_schema, with_call_ids

LEGACY_MAX_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions

TextBody = ChatCompletionRequest | CompletionRequest


@dataclass(frozen=True)
class Setup:
    """The model that a server serves, and the settings with which requests are read.

    Attributes:
        model: the name under which clients request the model.
        options: the default options of requests.
        tools: the format in which the model writes calls of tools.
        engine: the configuration of the engine.
        tokenizer: the target's tokenizer.
    """

    model: str
    options: RequestOptions
    tools: Format = FORMATS["hermes"]
    engine: EngineConfig = field(default_factory=EngineConfig)
    tokenizer: Tokenizer | None = None


@dataclass(frozen=True)
class TextRequest:
    """A checked request.

    Attributes:
        prompts: texts, token ids, or the messages of one chat.
        params: the options that all texts of the request share; `numbered` completes them for one
            text.
        prompt_field: name of the field with the prompts.
        limit_field: name of the field that set max_tokens; empty if max_tokens is a default.
        format: how calls of tools are written in the text; None if the text may have no calls.
    """

    body: TextBody
    prompts: list[Prompt]
    params: RequestOptions
    prompt_field: str
    limit_field: str
    format: Format | None

    @property
    def prefix(self) -> str:
        """The beginning of the reply that a chat's prompt already has; empty if there is none."""
        prompt = self.prompts[0]
        return prompt.prefix if isinstance(prompt, Chat) else ""

    def text(self, index: int, tokenizer: Tokenizer, prompt: Sequence[int]) -> ReplyText:
        """Return the `ReplyText` number `index` of the reply.

        If the request is a chat that may reason or call tools, the `ReplyText` has a parser that splits the text into
        reasoning, content and calls.
        """
        if not isinstance(self.body, ChatCompletionRequest):
            return ReplyText(index)
        tags = tags_after(tokenizer, prompt, self.params.has_grammar, self.prefix)
        if tags is None and self.format is None:
            return ReplyText(index)
        is_open = False
        if tags is not None:
            is_open = is_open_after(tokenizer, tags, prompt, self.prefix)
        schemas = {}
        for tool in self.body.tools:
            schemas[tool.function.name] = tool.function.parameters or {}
        parser = parser_of(
            tokenizer,
            tags,
            self.format,
            schemas,
            is_open=is_open,
            is_forced=bool(self.body.forced_functions),
            max_calls=None if self.body.parallel_tool_calls else 1,
        )
        return ReplyText(index, parser)

    def shown(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> set[str]:
        """Return the special tokens that stay in the text because the reply's parser needs them."""
        names: set[str] = set()
        if not isinstance(self.body, ChatCompletionRequest):
            return names
        tags = tags_after(tokenizer, prompt, self.params.has_grammar, self.prefix)
        if tags is not None:
            names |= set(tags.tokens)
        if self.format is not None:
            names |= set(self.format.shown)
        return names

    def numbered(self, sample: int, room: int) -> RequestOptions:
        """Return the options of text number `sample`, counted from 0. All texts share one seed.

        Args:
            room: how many tokens the context can hold after the prompt. The server's default of
                max_tokens is reduced to this; a max_tokens in the request is not.
        """
        max_tokens = self.params.max_tokens
        if max_tokens is not None and not self.limit_field:
            max_tokens = min(max_tokens, room)
        return self.params.changed(sample=sample, max_tokens=max_tokens)


def read_request(body: Any, schema: type[TextBody], setup: Setup) -> TextRequest:
    """Return the request that a body describes, for the endpoint that takes `schema`. Raises `ApiError`."""
    request = validate(schema, body)
    if request.model != setup.model:
        raise no_model(request.model, setup.model)
    if isinstance(request, ChatCompletionRequest):
        prompt_field = "messages"
        prompts = as_prompts(_chat(request, body, setup))
    else:
        prompt_field = "prompt"
        prompts = as_prompts(request.prompt)
    if request.n * len(prompts) > MOST_TEXTS:
        text = f"prompts times n may be at most {MOST_TEXTS} texts a request"
        raise ApiError(400, text, param="n")
    params = _params(request, setup).with_seed()
    format = None
    may_call = params.json_schema is None or request.forced_functions
    if may_call and isinstance(prompts[0], Chat) and prompts[0].tools:
        format = setup.tools
    limit_field = ""
    for name in ("max_tokens", "max_completion_tokens"):
        if name in request.model_fields_set:
            limit_field = name
    return TextRequest(request, prompts, params, prompt_field, limit_field, format)


def _chat(request: ChatCompletionRequest, body: Mapping[str, Any], setup: Setup) -> Chat:
    messages = [message.for_template() for message in request.messages]
    prefix = ""
    if request.continue_final_message:
        prefix = _begun(messages.pop(), setup)
    tools = []
    allowed = {function.name for function in request.allowed_functions}
    for tool in body.get("tools") or ():
        if is_function(tool) and tool["function"]["name"] in allowed:
            tools.append(_tool(tool["function"]))
    call = ""
    if request.forced_functions:
        call = setup.tools.prefix
    messages = with_call_ids(messages, setup.tools)
    return Chat(messages, tools, prefix, call, request.variables)


def _begun(message: Mapping[str, Any], setup: Setup) -> str:
    """Return the beginning of the reply, which the client has sent and the model continues.

    If the client has sent reasoning, the result begins with the reasoning, in the tags that the
    model uses.
    """
    content = str(message["content"])
    thought = message.get("reasoning_content")
    if not thought or setup.tokenizer is None:
        return content
    tags = tags_for(setup.tokenizer)
    return content if tags is None else tags.begun(thought, content)


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool for the chat template.

    The prompt should have the fields in the client's order. A template writes the fields in the
    order in which it gets them, so the tool is made from the body, not from the parsed schema.
    """
    fields = {}
    for name, value in function.items():
        if name in Function.field_names and name != "strict" and value is not None:
            fields[name] = value
    return {"type": "function", "function": fields}


def _params(request: TextBody, setup: Setup) -> RequestOptions:
    defaults = _decoding(request, setup)
    values = request.options
    if isinstance(request, CompletionRequest):
        values.setdefault("max_tokens", defaults.max_tokens or LEGACY_MAX_TOKENS)
    try:
        return defaults.changed(**(values | _grammar(request, setup)))
    except ConfigError as error:  # its message begins with a field's name
        raise ApiError(400, str(error), param=re.split(r"\W", str(error))[0]) from None


def _decoding(request: TextBody, setup: Setup) -> RequestOptions:
    """Return the server's options, switched to the method that the request names, if it names one."""
    if request.speculation is None:
        return setup.options
    method = "ar" if request.speculation == OFF else request.speculation
    try:
        options = setup.options.switched(method)
        setup.engine.check_options(options)
    except ConfigError as error:
        raise invalid("speculation", str(error)) from None
    return options


def _grammar(request: TextBody, setup: Setup) -> dict[str, Any]:
    """Return the options that constrain the text; empty if nothing constrains it.

    A text is constrained to a call if the model must call a tool, otherwise to `response_format`.
    """
    cause = "response_format"
    schema = None
    if request.response_format is not None:
        schema = request.response_format.schema_to_keep
    if request.forced_functions:
        cause = "tools"
        functions = [function.model_dump() for function in request.forced_functions]
        try:
            schema = forced_schema(functions, setup.tools.key)
        except RecursionError:
            raise invalid("tools", "are nested too deep") from None
    if schema is None:
        return {}
    if request.ignore_eos:
        text = f"{cause} ends a text where it is whole, which ignore_eos forbids"
        raise ApiError(400, text, param="ignore_eos")
    try:
        grammar_of(RequestOptions(json_schema=schema).json_schema, None)
    except (ConfigError, RequestError) as error:
        raise invalid(cause, str(error)) from None
    return {"json_schema": schema, "regex": None}


def check_fits(tokens: Sequence[int], request: TextRequest, context: int) -> None:
    """Raise `ApiError` if the prompt is empty, or if the context is too small for prompt and text.

    The text needs max_tokens tokens if the request sets max_tokens, otherwise at least one.
    """
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
