"""Turns a user's prompt and options into a `Submit` message for the target, without any I/O.

Raises `RequestError` for what cannot be served.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any, TypedDict

from pearl.config import RequestOptions
from pearl.config.option_values import MOST_PREDICTED
from pearl.config.options import Reasoning
from pearl.errors import RequestError
from pearl.protocol.messages import Submit
from pearl.text.grammar import grammar_of
from pearl.text.reasoning import end_of, tags_for
from pearl.text.reasoning_marks import reasoning_of
from pearl.text.stream import Tokenizer, Tools
from pearl.text.tokenizer import GenerationDefaults
from pearl.text.tools import in_words, knows_tools


@dataclass(frozen=True)
class Chat:
    """Chat messages, with other inputs of the chat template.

    Messages and tools have OpenAI's format. The generated text contains tool calls as the model
    writes them; `pearl.text.tools` parses them.

    Attributes:
        messages: the messages of the conversation, the oldest first.
        tools: tools that the model may call.
        prefix: the beginning of the reply. It belongs to the prompt, not to the generated text.
        call: the beginning of a tool call that must be made. It is appended to `prefix`, unless
            `prefix` ends within reasoning.
        variables: variables of the template, such as enable_thinking.
    """

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    prefix: str = ""
    call: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict)


log = logging.getLogger(__name__)

_MOST_CHARACTERS = 32  # in a prompt per token of the context; usual texts have 2 to 5 per token
Prompt = str | Sequence[int] | Sequence[dict[str, Any]] | Chat
_PROMPT = "a prompt is text, a list of chat messages, or a list of token ids"


class Options(TypedDict, total=False):
    """How one text is generated.

    method, rule: replace the method and rule of the `RequestOptions`.
    prefix: the beginning of the reply, for a prompt of token ids that ends with it. For a `Chat`,
        set `Chat.prefix` instead.
    preview: whether pieces have draft tokens too, which are not judged yet (`Piece.preview`).
    raw: whether to take a text prompt as it is; True by default. If False, the chat template is
        applied, if there is one.
    show: special tokens that are to appear in the text by name.
    """

    method: str | None
    prefix: str
    preview: bool
    raw: bool
    rule: str | None
    show: Collection[str]


def as_prompts(prompts: Any) -> list[Prompt]:
    """Return one prompt or several as a list. A list of ints or of messages is one prompt."""
    if isinstance(prompts, (str, Chat)):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping):
        raise RequestError(f"{_PROMPT}, or a list of these; not {_named(prompts)}")
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], (int, dict)) else prompts


def encode(
    tokenizer: Tokenizer, prompt: Prompt, raw: bool = True, context: float = inf
) -> list[int]:
    """Return the tokens of a prompt, which is text, token ids, or chat messages.

    Args:
        raw: whether to take text as it is. If False, the chat template is applied, if there is one.
        context: the model's context, in tokens. A text that is much longer is refused before it is
            encoded.

    Raises `RequestError` if the prompt is invalid, or if its text is much longer than the context.
    """
    if isinstance(prompt, str):
        chat = None if raw else tokenizer.chat_text([{"role": "user", "content": prompt}])
        if chat is None:
            return _encoded(tokenizer, prompt, context, special=True)
        return _encoded(tokenizer, chat, context, special=False)
    if isinstance(prompt, Chat):
        text = _chat_text(tokenizer, prompt)
        # The template writes special tokens itself.
        return _encoded(tokenizer, text, context, special=False)
    if not isinstance(prompt, Iterable) or isinstance(prompt, Mapping):
        raise RequestError(f"{_PROMPT}; not {_named(prompt)}")
    items: list[Any] = list(prompt)
    if items and all(isinstance(item, dict) for item in items):
        return encode(tokenizer, Chat(items), raw, context)
    if not all(map(_is_token, items)):
        raise RequestError(_PROMPT)
    if items and max(items) >= 2**31:
        raise RequestError("the prompt holds a token id of 2**31 or more, which no model has")
    return items


def _is_token(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and item >= 0


def _chat_text(tokenizer: Tokenizer, chat: Chat) -> str:
    def render(messages: Sequence[dict[str, Any]], tools: Tools = None) -> str | None:
        return tokenizer.chat_text(list(messages), tools, **chat.variables)

    if not chat.tools or knows_tools(tokenizer):
        text = render(chat.messages, chat.tools or None)
    else:
        _say_in_words()
        try:
            text = render(in_words(chat.messages, chat.tools))
        except RequestError:  # the template takes no system messages
            text = render(in_words(chat.messages, chat.tools, "user"))
    if text is None:
        raise RequestError("this model has no chat template: give the prompt as text or token ids")
    tags = tags_for(tokenizer)
    prefix = chat.prefix
    if tags is None or not tags.are_open_within(prefix):
        prefix += chat.call
    if prefix and tags is not None:
        return tags.continued(text, prefix)
    return text + prefix


@cache
def _say_in_words() -> None:
    log.warning(
        "the chat template does not tell its model of tools: the system prompt does, in Hermes' "
        "format"
    )


def _encoded(tokenizer: Tokenizer, text: str, context: float, *, special: bool) -> list[int]:
    """Return the tokens of a text.

    A text that cannot fit into the context is refused before it is encoded, because encoding it
    would delay other requests by seconds.
    """
    if len(text) > _MOST_CHARACTERS * context:
        raise RequestError(
            f"the context holds {context} tokens; the prompt has {len(text)} characters"
        )
    return tokenizer.encode(text, special=special)


def _named(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def submission(
    number: int,
    tokens: Sequence[int],
    context: int,
    options: RequestOptions,
    defaults: GenerationDefaults,
    preview: bool = False,
    tokenizer: Tokenizer | None = None,
    prefix: str = "",
) -> Submit:
    """Return the message that submits a request to the target.

    Raises `RequestError` if the prompt is empty, or if the prompt and `options.max_tokens` together
    exceed the context.

    Args:
        number: the number of the request.
        tokens: the prompt.
        context: the target's context, in tokens.
        options: the user's options; their seed must be set.
        defaults: the checkpoint's defaults.
        preview: whether to send pending tokens too.
        tokenizer: the target's tokenizer. If it is None, a prediction is ignored, and reasoning is
            not recognised, so that stop strings and grammars apply to the whole text.
        prefix: the beginning of the reply, if it is part of the prompt.
    """
    if tokenizer is not None:
        tokens = prompt_for(tokenizer, tokens, options, prefix)
    room = max(0, context - len(tokens))
    max_tokens = options.max_tokens or min(defaults.max_tokens or context, room)
    limit = len(tokens) + max_tokens
    if not tokens:
        raise RequestError("the prompt is empty: give at least one token")
    if len(tokens) >= context or limit > context:
        text = f" + {options.max_tokens} to generate" if options.max_tokens else ""
        raise RequestError(
            f"the prompt has {len(tokens)} tokens{text}, the context holds {context}: "
            "shorten the prompt, lower max_tokens, or raise max_context"
        )
    ends = list(options.stop_token_ids)
    if not options.ignore_eos:
        ends = list(defaults.eos) + ends
    read: dict[str, Any] = {}
    if tokenizer is not None:
        read["reasoning"] = _reasoning(tokenizer, tokens, options, prefix)
        read["predicted"] = _predicted(tokenizer, options.prediction or "", max_tokens)
    return Submit(
        number,
        tuple(tokens),
        limit,
        resolved(options, defaults, len(tokens)).changed(**read),
        eos=tuple(dict.fromkeys(ends)),
        preview=preview,
    )


def prompt_for(
    tokenizer: Tokenizer, tokens: Sequence[int], options: RequestOptions, prefix: str = ""
) -> list[int]:
    """Return the prompt, extended so that the answer can begin if the options have a grammar.

    Some chat formats have a text that begins an answer. This text is appended if the prompt ends
    where a reply begins. If the prompt has opened reasoning, the grammar begins after the token
    that ends the reasoning. If the vocabulary has no such token, the text that ends the reasoning
    is appended.

    Args:
        prefix: the beginning of the reply, if it is part of the prompt.
    """
    prompt = list(tokens)
    tags = tags_for(tokenizer)
    if not options.has_grammar or tags is None:
        return prompt
    reasoning = _reasoning(tokenizer, tokens, options, prefix)
    if reasoning is None or not reasoning.is_open:
        if tags.turn and end_of(tokenizer, tags, prompt).endswith(tags.turn):
            prompt += tokenizer.encode(tags.answer, special=False)
    elif not reasoning.end_tokens:
        prompt += tokenizer.encode(f"\n{tags.closing}\n\n", special=False)
    return prompt


def _reasoning(
    tokenizer: Tokenizer, tokens: Sequence[int], options: RequestOptions, prefix: str
) -> Reasoning | None:
    """Return the marks around the reasoning before the answer.

    Return None if the options need no marks, because neither stop strings nor a grammar are set.
    """
    if options.stop or options.has_grammar:
        return reasoning_of(tokenizer, tokens, prefix)
    return None


def _predicted(tokenizer: Tokenizer, prediction: str, most: int) -> tuple[int, ...]:
    """Return the tokens of a prediction, at most `most`, because the text cannot have more."""
    if not prediction:
        return ()
    most = min(most, MOST_PREDICTED)
    text = prediction[: _MOST_CHARACTERS * most]
    return tuple(tokenizer.encode(text, special=False)[:most])


def resolved(
    options: RequestOptions, defaults: GenerationDefaults, prompt_length: int
) -> RequestOptions:
    """Return the user's options with the checkpoint's defaults, in the form that a worker reads.

    Raises `RequestError` if there is a grammar, but the model has no token that ends a text.
    """
    assert options.seed is not None
    grammar = grammar_of(options.json_schema, options.regex)
    if grammar and not defaults.eos:
        raise RequestError("this model has no token that ends a text, which a grammar needs")
    biases = dict(options.logit_bias).items()
    return options.resolved(defaults.sampling).changed(
        logit_bias=tuple((token, bias) for token, bias in biases if bias),
        json_schema=None,
        regex=None,
        prediction=None,
        prompt_length=prompt_length,
        grammar=grammar,
        grammar_ends=defaults.eos if grammar else (),
    )
