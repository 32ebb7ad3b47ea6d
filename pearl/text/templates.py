"""Chat templates without transformers, which takes a process a second to import: plain ones, of roles and contents.

The same settings of jinja2 as there, and the same walls around it: a template is a stranger's program.  Who keeps a
template compares the two (see `kept_tokenizer`), and goes on with transformers where they differ.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def render(template: str, messages: list[dict[str, str]], special: dict[str, Any]) -> str:
    """The prompt that asks for the next reply. `special`: the special tokens by name. Raises `TemplateError`."""
    return _compiled(template).render(
        messages=messages, tools=None, documents=None, add_generation_prompt=True, **special
    )


class _Dict:
    """In place of the class, whose attributes would be a way out."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """One that stores no name with which Python's internals could be reached."""

    def __init__(*args: Any, **items: Any) -> None:
        self, *others = args
        found = dict(*others, **items)
        for name in found:
            _check_name(name)
        Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"chat templates cannot store {name!r} on a namespace")


@cache
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(template)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own escapes what is special in HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
