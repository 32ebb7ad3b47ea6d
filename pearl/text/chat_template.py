"""Renders chat templates, with the messages in a form that the template accepts.

jinja2 is set up as in transformers; importing transformers itself would take a second. A template
is untrusted code, so it runs in jinja2's sandbox.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pearl.errors import RequestError

if TYPE_CHECKING:  # importing jinja2 takes 50 ms, which a front need not spend
    from jinja2 import Template

    from pearl.text.stream import Tools

log = logging.getLogger(__name__)


def render(
    template: str,
    tools: Tools,
    special: dict[str, str],
    messages: list[dict[str, Any]],
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Return the prompt for the next reply. Raises the exceptions that the template raises.

    Args:
        special: the special tokens by their names in templates, such as {"bos_token": "<s>"}.
        variables: further variables of the template, such as enable_thinking.
    """
    context = {
        **variables,
        **special,
        "messages": [_for_template(message) for message in messages],
        "tools": None if tools is None else list(tools),
        "documents": None,
        "add_generation_prompt": True,
    }
    return _compiled(template).render(context)


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without null fields.

    The reasoning gets both names that templates read: `reasoning_content` and `reasoning`.
    """
    fields = {key: value for key, value in message.items() if value is not None}
    reasoning = fields.get("reasoning_content", fields.get("reasoning"))
    if reasoning is not None:
        fields["reasoning_content"] = reasoning
        fields["reasoning"] = reasoning
    return fields


@cache
def _compiled(template: str) -> Template:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Reads {% generation %}, which marks text for training; the prompt has only the text."""

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
    """Return `value` as JSON, without jinja2's escapes for HTML. `form`: further arguments of `json.dumps`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)


Messages = list[dict[str, Any]]


def chat_prompt(
    render: Callable[[Messages], str],
    messages: Messages,
    as_plain: Callable[[str], str] = lambda text: text,
) -> str:
    """Return `render(messages)`, with the messages in a form that the template accepts.

    Many templates print a system message only at the beginning, and refuse or leave out a later
    system message. Some templates refuse any system message. So three forms are tried in order: the
    unchanged messages; the text of all system messages at the beginning; this text in the first
    message of the user. The first form whose prompt has the text of all system messages is used. If
    there is none, the first form that the template accepts is used. Raises `RequestError` if the
    template accepts no form.

    Args:
        as_plain: changes the text of a user or tool so that no control token is read in it.
    """
    messages = [_as_plain(_with_joined_parts(message), as_plain) for message in messages]
    prompts = []  # that lack the text of a system message
    problem = None
    for form in _forms(messages):
        try:
            prompt = _rendered(render, form)
        except Exception as error:
            problem = problem or error
            continue
        if _has_system_texts(prompt, messages):
            if form is not messages:
                _say_moved()
            return prompt
        prompts.append(prompt)
    if prompts:
        return prompts[0]
    assert problem is not None
    raise _refusal(problem) from problem


def _refusal(problem: Exception) -> RequestError:
    if isinstance(problem, RecursionError):  # a template that writes nested tools as JSON
        return RequestError(
            "tools or their calls are nested too deep for the model's chat template"
        )
    name = type(problem).__name__
    reason = f"{name}: {problem}"
    if type(problem).__module__.startswith("jinja2"):
        reason = str(problem)
    return RequestError(
        f"The model's chat template does not take these messages: {reason}. "
        "Change their roles or order, or send a raw prompt."
    )


# ---- system messages ----


def _forms(messages: Messages) -> Iterator[Messages]:
    """Yield the forms of the messages to try, the unchanged messages first.

    The second form has one system message, at the beginning. The third has none: the text of the
    system messages is in the first message of the user.
    """
    yield messages
    texts = _system_texts(messages)
    if not texts:
        return
    instructions = "\n\n".join(texts)
    others = [message for message in messages if message.get("role") != "system"]
    yield [{"role": "system", "content": instructions}, *others]
    for index, message in enumerate(others):
        content = message.get("content")
        if message.get("role") == "user" and isinstance(content, str):
            joined = {**message, "content": f"{instructions}\n\n{content}"}
            yield [*others[:index], joined, *others[index + 1 :]]
            return


def _system_texts(messages: Messages) -> list[str]:
    texts = []
    for message in messages:
        content = message.get("content")
        if message.get("role") == "system" and isinstance(content, str):
            texts.append(content)
    return texts


def _has_system_texts(prompt: str, messages: Messages) -> bool:
    """Return whether a prompt has the text of every system message. White space is not compared."""
    texts = _system_texts(messages)
    if not texts:
        return True
    joined = "".join(prompt.split())
    return all("".join(text.split()) in joined for text in texts)


@cache
def _say_moved() -> None:
    log.warning(
        "the chat template has no place for a system message where one stands: the text of system messages is moved "
        "to the beginning, or into the first message of the user"
    )


# ---- calls of tools ----


def _rendered(render: Callable[[Messages], str], messages: Messages) -> str:
    """Render messages, with the arguments of calls as objects.

    Most templates accept objects. If this template refuses them, as DeepSeek's does, the arguments
    are given as text.
    """
    with_objects = [_with_arguments(message, _as_object) for message in messages]
    try:
        return render(with_objects)
    except Exception:
        with_texts = [_with_arguments(message, _as_text) for message in messages]
        if with_texts != with_objects:
            with suppress(Exception):
                return render(with_texts)
        raise


def _as_plain(message: dict[str, Any], as_plain: Callable[[str], str]) -> dict[str, Any]:
    content = message.get("content")
    if message.get("role") not in ("user", "tool") or not isinstance(content, str):
        return message
    return {**message, "content": as_plain(content)}


def _with_joined_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its text parts joined into one text, which every template takes."""
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


def _as_object(arguments: Any) -> dict[str, Any]:
    """Return arguments as an object. Text that was cut off is read as far as it goes.

    For example, the text `{"key": "re` becomes {"key": "re"}. Text that is no JSON object becomes
    an argument with the name "arguments": the text `red` becomes {"arguments": "red"}.
    """
    from pydantic_core import from_json  # which refuses half a surrogate pair, as tokenizers do

    if isinstance(arguments, dict):
        return arguments
    text = _as_text(arguments)
    with suppress(ValueError):
        document = from_json(text or "null", allow_partial="trailing-strings")
        if document is None:
            return {}
        if isinstance(document, dict):
            return document
    return {"arguments": text}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
