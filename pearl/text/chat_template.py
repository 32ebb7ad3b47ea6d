"""Rendering chat templates: messages in the form that each template takes.

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
    """The prompt for the next reply. Raises what the template raises.

    Args:
        special: the special tokens by name.
        variables: further ones of the template, such as enable_thinking.
    """
    given = [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    listed = None if tools is None else [*tools]
    ours = {"messages": given, "tools": listed, "documents": None, "add_generation_prompt": True}
    return _compiled(template).render({**variables, **special, **ours})


@cache
def _compiled(template: str) -> Template:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what a model is trained to write; a prompt has it without the mark."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(
                parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
            )

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter, without escapes for HTML."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def chat_prompt(
    render: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]]
) -> str:
    """`render` applied to `messages` in a form that the template takes.

    The arguments of tool calls are an object to most templates, and text to some, such as DeepSeek's. Raises
    `RequestError` for whatever a template raises.
    """
    given = [_with_joined_parts(message) for message in messages]
    objects = [_with_arguments(message, _parsed) for message in given]
    try:
        return render(objects)
    except Exception as error:
        with suppress(Exception):
            if (texts := [_with_arguments(message, _as_text) for message in given]) != objects:
                return render(texts)
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
    """A content of several text parts as one text, which every template takes."""
    parts = message.get("content")
    if not isinstance(parts, list) or not all(
        isinstance(one, dict) and one.get("type") == "text" for one in parts
    ):
        return message
    return {**message, "content": "\n".join(str(part.get("text")) for part in parts)}


def _with_arguments(message: dict[str, Any], form: Callable[[Any], Any]) -> dict[str, Any]:
    def call(given: Any) -> Any:
        function = given.get("function") if isinstance(given, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return given
        return {**given, "function": {**function, "arguments": form(function["arguments"])}}

    calls = message.get("tool_calls")
    return (
        {**message, "tool_calls": [call(each) for each in calls]}
        if isinstance(calls, list)
        else message
    )


def _parsed(arguments: Any) -> Any:
    with suppress(TypeError, ValueError):
        if isinstance(given := parse_json(arguments), dict):
            return given
    return arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
