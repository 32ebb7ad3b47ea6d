"""The body of a request as what the engine is asked for. Pure; raises `ApiError` that names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pearl.config import SamplingParams
from pearl.engine.request import Chat, Prompt
from pearl.errors import ConfigError, RequestError
from pearl.server.bodies import MOST_TEXTS, SAMPLING, ChatCompletionRequest, CompletionRequest, validate
from pearl.server.errors import ApiError
from pearl.text.grammar import grammar_of

LEGACY_MAX_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions

Request = ChatCompletionRequest | CompletionRequest


@dataclass(frozen=True)
class Asked:
    """What a client wants.

    Attributes:
        prompts: texts, token ids, or the messages of one chat.
        params: how to sample; `numbered` has them for each text.
        limit_field: the field that set max_tokens; empty: it is a default.
        n: texts for each prompt.
        provenance: the chunks of a stream also say where each token came from.
    """

    chat: bool
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    limit_field: str = ""
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    provenance: bool = False

    @property
    def prompt_field(self) -> str:
        return "messages" if self.chat else "prompt"

    def numbered(self, sample: int, room: int) -> SamplingParams:
        """The params of text number `sample`, from 0; all share one seed.

        Args:
            room: tokens that the context has beside the prompt. A default of max_tokens shrinks to it.
        """
        most = self.params.max_tokens
        fitting = most if most is None or self.limit_field else min(most, room)
        return self.params.model_copy(update={"sample": sample, "max_tokens": fitting})


def read_request(body: Any, chat: bool, model: str, defaults: SamplingParams) -> Asked:
    """Checks the parsed body.

    Args:
        chat: it came to /v1/chat/completions.
        model: the name of the model that is served.
        defaults: for what the request does not set.
    """
    asked = validate(ChatCompletionRequest, body) if chat else validate(CompletionRequest, body)
    if asked.model != model:
        text = f"there is no model {asked.model[:100]!r} here, only {model!r}"
        raise ApiError(404, text, param="model", code="model_not_found")
    prompts = (_chat(asked, body),) if isinstance(asked, ChatCompletionRequest) else _prompts(asked)
    if asked.n * len(prompts) > MOST_TEXTS:
        raise ApiError(400, f"prompts times n may be at most {MOST_TEXTS} texts a request", param="n")
    limit = next((name for name in ("max_completion_tokens", "max_tokens") if name in asked.model_fields_set), "")
    params = _params(asked, limit, defaults)
    options = asked.stream_options
    flags = (options.include_usage, options.include_provenance) if options else ()
    return Asked(chat, prompts, params.with_seed(), limit, asked.n, asked.stream, *flags)


def _chat(asked: ChatCompletionRequest, body: Mapping[str, Any]) -> Prompt:
    messages = [message.for_template() for message in asked.messages]
    if not asked.tools or asked.tool_choice == "none":
        return messages
    # From the body, for templates write the fields in the client's order.
    functions = [{n: v for n, v in t["function"].items() if n != "strict" and v is not None} for t in body["tools"]]
    return Chat(messages, [{"type": "function", "function": function} for function in functions])


def _prompts(asked: CompletionRequest) -> tuple[Prompt, ...]:
    prompt: Any = asked.prompt
    return tuple(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else (prompt,)


def _params(asked: Request, limit: str, defaults: SamplingParams) -> SamplingParams:
    values = {name: getattr(asked, name) for name in SAMPLING if name in asked.model_fields_set}
    if limit:
        values["max_tokens"] = getattr(asked, limit)
    if isinstance(asked, CompletionRequest):
        values.setdefault("max_tokens", defaults.max_tokens or LEGACY_MAX_TOKENS)
        given = {"logprobs": asked.logprobs, "stop": asked.stop}
    else:
        given = {"logprobs": asked.top_logprobs if asked.logprobs else None, "stop": asked.stop}
    values |= {name: value for name, value in given.items() if value is not None}
    if asked.logit_bias:
        values["logit_bias"] = tuple((int(token), bias) for token, bias in asked.logit_bias.items())
    try:
        SamplingParams(**values)
    except ConfigError as error:
        raise ApiError(400, str(error), param=str(error).partition(":")[0]) from None
    values |= _grammar(asked)
    return SamplingParams(**(defaults.model_dump(exclude_unset=True) | values))


def _grammar(asked: Request) -> dict[str, Any]:
    formats = {"response_format": asked.response_format, "structured_outputs": asked.structured_outputs}
    grammars = {field: given.grammar for field, given in formats.items() if given is not None and given.grammar}
    if len(grammars) > 1:
        raise ApiError(400, "response_format and structured_outputs are two grammars", param="structured_outputs")
    for field, grammar in grammars.items():
        if asked.ignore_eos:
            raise ApiError(400, f"{field} ends a text where it is whole, which ignore_eos forbids", param="ignore_eos")
        try:
            params = SamplingParams(**grammar)
            grammar_of(params.json_schema, params.regex)
        except (ConfigError, RequestError) as error:
            raise ApiError(400, f"{field}: {error}", param=field) from None
        return grammar
    return {}


def check_fits(tokens: Sequence[int], asked: Asked, context: int) -> None:
    """Raises `ApiError` where the context does not hold prompt and text."""
    wanted = asked.params.max_tokens if asked.limit_field else None
    if tokens and len(tokens) + (wanted or 1) <= context:
        return
    if not tokens:
        raise ApiError(400, "the prompt is empty", param=asked.prompt_field)
    too_long = len(tokens) >= context
    more = f" and {asked.limit_field} asks for {wanted}" if wanted else ""
    raise ApiError(
        400,
        f"the context holds {context} tokens; the prompt has {len(tokens)}{more}",
        param=asked.prompt_field if too_long else asked.limit_field,
        code="context_length_exceeded",
    )
