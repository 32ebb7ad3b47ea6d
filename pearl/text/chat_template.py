"""Renders chat templates, with the messages in the form that each template takes.

The settings of jinja2 are those of transformers, which takes a process a second to import. A template is untrusted
code, so it runs in jinja2's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pearl.document import parse_json
from pearl.errors import RequestError

if TYPE_CHECKING:  # which takes a front 50 ms to import
    from jinja2 import Template

    from pearl.text.stream import Tools


def render(
    template: str,
    tools: Tools,
    special: dict[str, str],
    messages: list[dict[str, Any]],
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Return the prompt for the next reply. Raises what the template raises.

    Args:
        special: the special tokens by name.
        variables: further variables of the template, such as enable_thinking.
    """
    context = {
        **variables,
        **special,
        "messages": [_without_nulls(message) for message in messages],
        "tools": None if tools is None else list(tools),
        "documents": None,
        "add_generation_prompt": True,
    }
    return _compiled(template).render(context)


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}


@cache
def _compiled(template: str) -> Template:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks text that a model is trained to write; a prompt has the text without the mark."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
    """Write JSON, without jinja2's escapes for HTML; `form`: more arguments of `json.dumps`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)


def chat_prompt(
    render: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]]
) -> str:
    """Return `render(messages)`, with the messages in a form that the template takes.

    Most templates take the arguments of tool calls as an object, and some, such as DeepSeek's, as text. Raises
    `RequestError` for whatever a template raises.
    """
    messages = [_with_joined_parts(message) for message in messages]
    with_objects = [_with_arguments(message, _parsed) for message in messages]
    try:
        return render(with_objects)
    except Exception as error:
        with suppress(Exception):
            with_texts = [_with_arguments(message, _as_text) for message in messages]
            if with_texts != with_objects:
                return render(with_texts)
        if isinstance(error, RecursionError):  # a template that writes nested tools as JSON
            raise RequestError(
                "tools or their calls are nested too deep for the model's chat template"
            ) from None
        name = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
        raise RequestError(
            f"The model's chat template does not take these messages: {name}{error}. "
            "Change their roles or order, or send a raw prompt."
        ) from error


def _with_joined_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Join a content of several text parts into one text, which every template takes."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            return message
        texts.append(str(part.get("text")))
    return {**message, "content": "\n".join(texts)}


def _with_arguments(message: dict[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    converted_calls = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and "arguments" in function:
            arguments = convert(function["arguments"])
            call = {**call, "function": {**function, "arguments": arguments}}
        converted_calls.append(call)
    return {**message, "tool_calls": converted_calls}


def _parsed(arguments: Any) -> Any:
    with suppress(TypeError, ValueError):
        document = parse_json(arguments)
        if isinstance(document, dict):
            return document
    return arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
