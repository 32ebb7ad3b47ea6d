"""The body of a request, made into what the engine is asked. Pure; raises `ApiError` that names the field.

A field is honoured, ignored because it changes no text by its meaning, or refused by name: nobody is to believe that a
setting took effect which did not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pearl.config import LONGEST_STOP, MAX_LOGPROBS, MOST_STOPS, SamplingParams
from pearl.document import parse_json
from pearl.engine.request import Chat, Prompt
from pearl.errors import ConfigError, RequestError
from pearl.models.grammar import grammar_of
from pearl.server.errors import ApiError

MOST_TEXTS = 128  # of one request: prompts times n
MOST_MESSAGES = 4096
LEGACY_MAX_TOKENS = 16  # what OpenAI's /v1/completions takes where max_tokens is missing

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
# As in SamplingParams.
_SAMPLING = (*_NUMBERS, "top_k", "seed", "max_tokens", "stop", "ignore_eos", "logit_bias")
_WHOLE = ("top_k", "seed", "max_tokens")
_COMMON = {"model", "n", "stream", "stream_options", "logprobs", "response_format", "structured_outputs", *_SAMPLING}
_CHAT = {*_COMMON, "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice"}
_COMPLETION = {*_COMMON, "prompt"}
_IGNORED = {"user", "safety_identifier", "prompt_cache_key"}  # they say who asks, not what
_ROLES = ("system", "user", "assistant", "tool")
MOST_TOOLS = 128

# Fields that are known but not served -> values that ask for nothing. Null does so for every field.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "min_tokens": (0,),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "prompt_cache_retention": (),
}
# Likewise of a message: clients send back the messages that they were given.
_NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "name": (),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
}


@dataclass(frozen=True)
class Asked:
    """What a client wants.

    Attributes:
        prompts: texts, token ids, or the messages of one chat.
        prompt_field: the field that they stood in.
        params: how to sample; `numbered` has them for each text.
        limit_field: the field that set max_tokens; empty: a default did.
        n: texts for each prompt.
        provenance: also say where each token came from, in the chunks of a stream.
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
        """The params of the text `sample`, from 0: all have one seed, and differ by their number under it.

        Args:
            room: tokens that the context has beside the prompt. A default of max_tokens gives way to it.
        """
        most = self.params.max_tokens
        fitting = most if most is None or self.limit_field else min(most, room)
        return self.params.model_copy(update={"sample": sample, "max_tokens": fitting})


def read_request(body: Any, chat: bool, model: str, defaults: SamplingParams) -> Asked:
    """Checks the parsed body.

    Args:
        chat: it came to /v1/chat/completions.
        model: the one that is served.
        defaults: for what the request does not set.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_kind(body)}")
    given = {name: value for name, value in body.items() if value is not None}
    _refuse(given, _CHAT if chat else _COMPLETION, _IGNORED, _NEUTRAL)
    _check_model(given, model)
    prompts = (_chat(given),) if chat else _prompts(given)
    n = _whole(given, "n", 1, MOST_TEXTS)
    if n * len(prompts) > MOST_TEXTS:
        raise ApiError(400, f"prompts times n are at most {MOST_TEXTS} texts a request", param="n")
    stream = _flag(given, "stream")
    options = _stream_options(given, stream)
    limit = next((name for name in ("max_completion_tokens", "max_tokens") if name in given), "")
    return Asked(chat, prompts, _params(given, chat, defaults).with_seed(), limit, n, stream, *options)


def _refuse(
    given: Mapping[str, Any], honoured: set[str], ignored: set[str], neutral: Mapping[str, Any], at: str = ""
) -> None:
    for name, value in given.items():
        if name in honoured or name in ignored:
            continue
        field = f"{at}{name:.100}"
        if name not in neutral:
            near = get_close_matches(name[:100], [*honoured, *neutral], n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise ApiError(400, f"unknown field {field!r}{meant}", param=field, code="unknown_parameter")
        if not any(_same(value, one) for one in neutral[name]):
            raise ApiError(400, f"{field} is not supported", param=field, code="unsupported_parameter")


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _check_model(given: Mapping[str, Any], served: str) -> None:
    name = given.get("model")
    if not isinstance(name, str):
        raise ApiError(400, f"model must be text: the name of the model, {served!r}", param="model")
    if name != served:
        raise ApiError(
            404, f"there is no model {name[:100]!r} here, only {served!r}", param="model", code="model_not_found"
        )


# ---- prompts ----


def _chat(given: Mapping[str, Any]) -> Prompt:
    messages, tools = _messages(given), given.get("tools", [])
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
        raise ApiError(400, f"tools must be a list of at most {MOST_TOOLS}", param="tools")
    told = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    choice = given.get("tool_choice", "auto")
    if choice not in ("none", "auto"):
        raise ApiError(400, "tool_choice must be none or auto: no call is forced", param="tool_choice")
    return Chat(messages, told) if told and choice == "auto" else messages


def _tool(tool: Any, at: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise ApiError(400, f"{at} must be an object of type 'function'", param=at)
    _refuse(tool, {"type", "function"}, set(), {}, f"{at}.")
    try:
        _unicode(json.dumps(tool, ensure_ascii=False), at)
    except RecursionError:
        raise ApiError(400, f"{at} is nested too deep", param=at) from None
    return {"type": "function", "function": _function(tool.get("function"), f"{at}.function")}


def _function(function: Any, at: str) -> dict[str, Any]:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{at} must be an object with a name", param=at)
    _refuse(function, {"name", "description", "parameters"}, {"strict"}, {}, f"{at}.")
    if not isinstance(function.get("description", ""), str) or not isinstance(function.get("parameters", {}), dict):
        raise ApiError(400, f"{at} takes a description, which is text, and parameters, an object", param=at)
    return {name: value for name, value in function.items() if name != "strict"}


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of at least one message", param="messages")
    if len(messages) > MOST_MESSAGES:
        raise ApiError(400, f"messages has {len(messages)} entries, at most {MOST_MESSAGES} are read", param="messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: Any, at: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ApiError(400, f"{at} must be an object with role and content, not {_kind(message)}", param=at)
    given = {name: value for name, value in message.items() if value is not None}
    _refuse(given, {"role", "content", "tool_calls", "tool_call_id"}, set(), _NEUTRAL_IN_MESSAGE, f"{at}.")
    role = given.get("role")
    if role not in _ROLES:
        shown = repr(role)[:100]
        raise ApiError(400, f"{at}.role must be one of {', '.join(_ROLES)}, not {shown}", param=f"{at}.role")
    more: dict[str, Any] = {}
    if calls := given.get("tool_calls"):
        if role != "assistant" or not isinstance(calls, list):
            raise ApiError(400, f"{at}.tool_calls must be a list, of an assistant's message", param=f"{at}.tool_calls")
        more["tool_calls"] = [_call(call, f"{at}.tool_calls[{number}]") for number, call in enumerate(calls)]
    if (call_id := given.get("tool_call_id")) is not None:
        if role != "tool" or not isinstance(call_id, str):
            raise ApiError(400, f"{at}.tool_call_id must be text, of a tool's message", param=f"{at}.tool_call_id")
        more["tool_call_id"] = call_id
    content = "" if calls and "content" not in given else _content(given.get("content"), f"{at}.content")
    return {"role": role, "content": content, **more}


def _call(call: Any, at: str) -> dict[str, Any]:
    """What the assistant called, as templates read it: with its arguments as an object, not as the text of one."""
    function = call.get("function") if isinstance(call, dict) and call.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{at} must be an object of type 'function', whose function has a name", param=at)
    try:
        arguments = parse_json(function.get("arguments") or "{}")
    except (TypeError, ValueError):
        arguments = None
    if not isinstance(arguments, dict):
        field = f"{at}.function.arguments"
        raise ApiError(400, f"{field} must be the text of a JSON object", param=field)
    _unicode(json.dumps([call, arguments], ensure_ascii=False), at)
    called = {"name": function["name"], "arguments": arguments}
    return {"type": "function", "function": called} | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


def _content(content: Any, at: str) -> str:
    if isinstance(content, str):
        return _unicode(content, at)
    if not isinstance(content, list) or not content:
        raise ApiError(400, f"{at} must be text or a list of text parts, not {_kind(content)}", param=at)
    return "\n".join(_part(part, f"{at}[{number}]") for number, part in enumerate(content))


def _part(part: Any, at: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = repr(part.get("type"))[:100] if isinstance(part, dict) else _kind(part)
        raise ApiError(400, f"{at} must be a part of type 'text', not {kind}: this server reads text only", param=at)
    _refuse(part, {"type", "text"}, set(), {}, f"{at}.")
    text = part.get("text")
    if not isinstance(text, str):
        raise ApiError(400, f"{at}.text must be text, not {_kind(text)}", param=f"{at}.text")
    return _unicode(text, f"{at}.text")


def _prompts(given: Mapping[str, Any]) -> tuple[Prompt, ...]:
    prompt = given.get("prompt")
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
    prompts = prompt if several and isinstance(prompt, list) else [prompt]
    if len(prompts) > MOST_TEXTS:
        raise ApiError(400, f"prompt has {len(prompts)} prompts, at most {MOST_TEXTS} are read", param="prompt")
    return tuple(_prompt(one) for one in prompts)


def _prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, str) and prompt:
        return _unicode(prompt, "prompt")
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 2**31 for token in prompt):
        return prompt
    raise ApiError(400, "prompt must be text or token ids, or a list of these, and not empty", param="prompt")


def _unicode(text: str, field: str) -> str:
    """JSON can spell halves of characters, which are no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(400, f"{field} holds half a surrogate pair, which is no character", param=field) from None
    return text


# ---- how to sample ----


def _params(given: Mapping[str, Any], chat: bool, defaults: SamplingParams) -> SamplingParams:
    values = {name: given[name] for name in _SAMPLING if name in given}
    if "max_completion_tokens" in given:
        values["max_tokens"] = given["max_completion_tokens"]
    elif not chat:
        values.setdefault("max_tokens", defaults.max_tokens or LEGACY_MAX_TOKENS)
    if (logprobs := _logprobs(given, chat)) is not None:
        values["logprobs"] = logprobs
    for name, value in values.items():
        field = "max_completion_tokens" if name == "max_tokens" and "max_completion_tokens" in given else name
        values[name] = _sampling_value(name, field, value)
    values |= _grammar(given)
    return SamplingParams(**(defaults.model_dump(exclude_unset=True) | values))


def _logprobs(given: Mapping[str, Any], chat: bool) -> int | None:
    """How many of the likeliest tokens are wanted beside each; None where nothing is.

    A chat has a flag, and a number beside it; elsewhere there is the number alone, and false is none of these.
    """
    if not chat:
        return None if given.get("logprobs", False) is False else _whole(given, "logprobs", 0, MAX_LOGPROBS)
    wanted = _flag(given, "logprobs")
    top = _whole(given, "top_logprobs", 0, MAX_LOGPROBS)
    if top and not wanted:
        raise ApiError(400, "top_logprobs is for requests with logprobs true", param="top_logprobs")
    return top if wanted else None


def _grammar(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the text is to keep to: of OpenAI's field, or of vLLM's."""
    fields = {"response_format": _of_response_format, "structured_outputs": _of_structured_outputs}
    asked = {field: grammar for field, read in fields.items() if field in given and (grammar := read(given[field]))}
    if len(asked) > 1:
        raise ApiError(400, "response_format and structured_outputs are two grammars", param="structured_outputs")
    for field, grammar in asked.items():
        if given.get("ignore_eos"):
            raise ApiError(400, f"{field} ends a text where it is whole, which ignore_eos forbids", param="ignore_eos")
        try:
            params = SamplingParams(**grammar)
            grammar_of(params.json_schema, params.regex)
        except (ConfigError, RequestError) as error:
            raise ApiError(400, f"{field}: {error}", param=field) from None
        return grammar
    return {}


def _of_response_format(value: Any) -> dict[str, Any]:
    at = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "json_schema":
        _refuse(value, {"type", "json_schema"}, set(), {}, f"{at}.")
        wanted, at = value.get("json_schema"), f"{at}.json_schema"
        if not isinstance(wanted, dict) or not isinstance(wanted.get("schema"), dict):
            raise ApiError(400, f"{at} must be an object with a schema, which is an object", param=at)
        _refuse(wanted, {"schema"}, {"name", "description", "strict"}, {}, f"{at}.")
        return {"json_schema": wanted["schema"]}
    if kind not in ("text", "json_object"):
        raise ApiError(400, f"{at}.type must be one of text, json_object, json_schema", param=f"{at}.type")
    _refuse(value, {"type"}, set(), {}, f"{at}.")
    return {"json_schema": {"type": "object"}} if kind == "json_object" else {}


def _of_structured_outputs(value: Any) -> dict[str, Any]:
    at = "structured_outputs"
    if not isinstance(value, dict):
        raise ApiError(400, f"{at} must be an object, not {_kind(value)}", param=at)
    given = {name: each for name, each in value.items() if each is not None}
    _refuse(given, {"json", "regex", "json_object"}, set(), {}, f"{at}.")
    if _flag(given, "json_object", f"{at}."):
        given["json"] = {"type": "object"}
    given.pop("json_object", None)
    if len(given) > 1:
        raise ApiError(400, f"{at} takes one of json, regex, json_object", param=at)
    return {{"json": "json_schema", "regex": "regex"}[name]: each for name, each in given.items()}


def _sampling_value(name: str, field: str, value: Any) -> Any:
    if name == "stop":
        value = _stops(value)
    elif name in _NUMBERS and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise ApiError(400, f"{field} must be a number, not {_kind(value)}", param=field)
    elif name in _WHOLE and type(value) is not int:
        raise ApiError(400, f"{field} must be a whole number, not {_kind(value)}", param=field)
    elif name == "logit_bias":
        value = _biases(value)
    elif name == "ignore_eos" and not isinstance(value, bool):
        raise ApiError(400, f"{field} must be true or false, not {_kind(value)}", param=field)
    try:
        SamplingParams(**{name: value})
    except ConfigError as error:
        said = str(error).partition(": ")[2] or str(error)
        raise ApiError(400, f"{field}: {said}", param=field) from None
    return value


def _biases(value: Any) -> tuple[tuple[int, Any], ...]:
    """Of an object whose keys are token ids, which JSON has as text."""
    if not isinstance(value, dict) or not all(key.isdecimal() and key.isascii() for key in value):
        raise ApiError(400, "logit_bias must be an object of token ids", param="logit_bias")
    for bias in value.values():
        if isinstance(bias, bool) or not isinstance(bias, (int, float)):
            raise ApiError(400, f"logit_bias must have numbers, not {_kind(bias)}", param="logit_bias")
    return tuple((int(key[:20]), bias) for key, bias in value.items())


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ApiError(400, "stop must be text or a list of texts", param="stop")
    if len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
        raise ApiError(
            400, f"stop takes at most {MOST_STOPS} texts of at most {LONGEST_STOP} characters each", param="stop"
        )
    return [_unicode(stop, "stop") for stop in stops]


def _stream_options(given: Mapping[str, Any], stream: bool) -> tuple[bool, bool]:
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise ApiError(400, f"stream_options must be an object, not {_kind(options)}", param="stream_options")
    if "stream_options" in given and not stream:
        raise ApiError(400, "stream_options is for requests with stream true", param="stream_options")
    options = {name: value for name, value in options.items() if value is not None}
    ours = {"include_usage", "include_provenance"}
    _refuse(options, ours, set(), {"include_obfuscation": (False,)}, "stream_options.")
    return _flag(options, "include_usage", "stream_options."), _flag(options, "include_provenance", "stream_options.")


def _flag(given: Mapping[str, Any], name: str, at: str = "") -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise ApiError(400, f"{at}{name} must be true or false, not {_kind(value)}", param=f"{at}{name}")
    return value


def _whole(given: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = given.get(name, least)
    if type(value) is not int or not least <= value <= most:
        raise ApiError(400, f"{name} must be a whole number from {least} to {most}", param=name)
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


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
