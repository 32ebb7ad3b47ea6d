"""The body of a request as prompts and sampling parameters. Pure; raises `ApiError` that names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pearl.config import RequestOptions, Settings
from pearl.engine.request import Chat, Prompt
from pearl.errors import ConfigError, RequestError
from pearl.server.bodies import (
    MOST_TEXTS,
    SAMPLING,
    ChatCompletionRequest,
    CompletionRequest,
    Function,
)
from pearl.server.errors import ApiError, no_model
from pearl.server.fields import validate
from pearl.server.http import Parts
from pearl.text.grammar import grammar_of
from pearl.text.reasoning import splitter_of
from pearl.text.stream import Tokenizer
from pearl.text.tools import FORMATS, CallSplitter, Format, forced_schema

LEGACY_MAX_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions

Body = ChatCompletionRequest | CompletionRequest


@dataclass(frozen=True)
class Setup:
    """What a server serves, and how.

    Attributes:
        model: the name under which clients request the model.
        settings: options for what requests do not set; the engine's.
        tools: how the model writes calls.
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
        format: of calls in the text; None: they are not looked for.
        named: what the client calls the fields of the prompt and of a chat's limit.
    """

    body: Body
    prompts: tuple[Prompt, ...]
    params: RequestOptions
    format: Format | None = None
    named: tuple[str, str] = ("messages", "max_completion_tokens")

    @property
    def is_chat(self) -> bool:
        return isinstance(self.body, ChatCompletionRequest)

    def parts(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> Parts:
        """Takes reasoning and calls out of one text."""
        if not isinstance(self.body, ChatCompletionRequest):
            return Parts()
        has_grammar = (
            self.params.json_schema is not None or self.params.regex is not None
        )  # without a model's tags
        thoughts = None if has_grammar else splitter_of(tokenizer, prompt)
        if self.format is None:
            return Parts(thoughts)
        names = [tool.function.name for tool in self.body.tools]
        most = None if self.body.parallel_tool_calls else 1
        return Parts(
            thoughts, CallSplitter(self.format, names, bool(self.body.forced_functions), most)
        )

    @property
    def prompt_field(self) -> str:
        return self.named[0] if self.is_chat else "prompt"

    @property
    def limit_field(self) -> str:
        """The field that set max_tokens; empty if it is a default."""
        names = {"max_completion_tokens": self.named[1], "max_tokens": "max_tokens"}
        return next(
            (named for name, named in names.items() if name in self.body.model_fields_set), ""
        )

    def numbered(self, sample: int, room: int) -> RequestOptions:
        """The params of text number `sample`, from 0; all share one seed.

        Args:
            room: tokens that the context has besides the prompt; bounds a default of max_tokens.
        """
        most = self.params.max_tokens
        bounded = most if most is None or self.limit_field else min(most, room)
        return self.params.changed(sample=sample, max_tokens=bounded)


def read_request(body: Any, is_chat: bool, setup: Setup) -> TextRequest:
    """Check the parsed body. `is_chat`: it was sent to /v1/chat/completions."""
    model = ChatCompletionRequest if is_chat else CompletionRequest
    asked: Body = validate(model, body)
    if asked.model != setup.model:
        raise no_model(asked.model, setup.model)
    prompts = (
        (_chat(asked, body, setup),)
        if isinstance(asked, ChatCompletionRequest)
        else _prompts(asked)
    )
    if asked.n * len(prompts) > MOST_TEXTS:
        raise ApiError(
            400, f"prompts times n may be at most {MOST_TEXTS} texts a request", param="n"
        )
    params = _params(asked, setup).with_seed()
    may_call = isinstance(prompts[0], Chat) and bool(prompts[0].tools)
    if isinstance(asked, ChatCompletionRequest) and not asked.forced_functions:
        may_call = may_call and params.json_schema is None
    return TextRequest(asked, prompts, params, setup.tools if may_call else None)


def _chat(asked: ChatCompletionRequest, body: Mapping[str, Any], setup: Setup) -> Prompt:
    messages = [message.for_template() for message in asked.messages]
    prefix = messages.pop()["content"] if asked.continue_final_message else ""
    tools: list[dict[str, Any]] = []
    if asked.tools and asked.tool_choice != "none":
        # From the body, for templates write the fields in the client's order.
        known = Function.known - {"strict"}
        functions = (
            {n: v for n, v in t["function"].items() if n in known and v is not None}
            for t in body["tools"]
        )
        tools = [{"type": "function", "function": function} for function in functions]
    if asked.forced_functions:
        prefix += setup.tools.prefix
    return (
        Chat(messages, tools, prefix, asked.variables)
        if tools or prefix or asked.variables
        else messages
    )


def _prompts(asked: CompletionRequest) -> tuple[Prompt, ...]:
    prompt: Any = asked.prompt
    return (
        tuple(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else (prompt,)
    )


def _params(asked: Body, setup: Setup) -> RequestOptions:
    given, defaults = asked.model_fields_set, setup.settings.options
    values = {name: getattr(asked, name) for name in SAMPLING if name in given}
    if isinstance(asked, CompletionRequest):
        values.setdefault("max_tokens", defaults.max_tokens or LEGACY_MAX_TOKENS)
    else:
        if asked.max_completion_tokens is not None:
            values["max_tokens"] = asked.max_completion_tokens
        if asked.logprobs:
            values["logprobs"] = asked.top_logprobs
    if asked.stop is not None:
        values["stop"] = asked.stop
    if asked.stop_token_ids:
        values["stop_token_ids"] = tuple(asked.stop_token_ids)
    if asked.logit_bias:
        values["logit_bias"] = tuple((int(token), bias) for token, bias in asked.logit_bias.items())
    try:
        return defaults.changed(**(values | _grammar(asked, setup)))
    except ConfigError as error:  # it begins with a field's name
        raise ApiError(400, str(error), param=re.split(r"\W", str(error))[0]) from None


def _grammar(asked: Body, setup: Setup) -> dict[str, Any]:
    """The fields of `RequestOptions` that keep the text to a grammar; calls that must be made have one, too."""
    field = "response_format"
    schema = asked.response_format.schema_to_keep if asked.response_format is not None else None
    if isinstance(asked, ChatCompletionRequest) and (functions := asked.forced_functions):
        field = "tools"
        try:
            schema = forced_schema(
                [function.model_dump() for function in functions], setup.tools.key
            )
        except RecursionError:
            raise ApiError(400, "tools: are nested too deep", param="tools") from None
    if schema is None:
        return {}
    if asked.ignore_eos:
        raise ApiError(
            400,
            f"{field} ends a text where it is whole, which ignore_eos forbids",
            param="ignore_eos",
        )
    try:
        grammar_of(RequestOptions(json_schema=schema).json_schema, None)
    except (ConfigError, RequestError) as error:
        raise ApiError(400, f"{field}: {error}", param=field) from None
    return {"json_schema": schema, "regex": None}


def check_fits(tokens: Sequence[int], asked: TextRequest, context: int) -> None:
    """Raises `ApiError` if prompt and text do not fit the context."""
    if not tokens:
        raise ApiError(400, "the prompt is empty", param=asked.prompt_field)
    limit = asked.limit_field
    wanted = asked.params.max_tokens if limit else None
    if len(tokens) + (wanted or 1) > context:
        more = f" and {limit} asks for {wanted}" if wanted else ""
        raise ApiError(
            400,
            f"the context holds {context} tokens; the prompt has {len(tokens)}{more}",
            param=asked.prompt_field if len(tokens) >= context else limit,
            code="context_length_exceeded",
        )
