"""JSON schemas as llguidance reads them: it refuses some keywords whatever their value, and does not say where.

So keywords whose value constrains nothing are dropped, such as `uniqueItems: false`, and a refusal is given its place.
Imports nothing else of PEARL, see `parser`.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

_ANYTHING: tuple[Any, ...] = (True, {})  # schemas that every value matches
_MAPPINGS = (
    "$defs",
    "definitions",
    "dependentSchemas",
    "patternProperties",
    "properties",
)  # name -> schema
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = (
    *(
        "additionalItems",
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
    ),
    *("unevaluatedItems", "unevaluatedProperties"),
)
# An `if` precedes its branches, and a `contains` its numbers: without them these constrain nothing.
_DROPPED = (
    *(
        "$dynamicAnchor",
        "$recursiveAnchor",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
    ),
    *("if", "else", "then", "maxContains", "minContains", "not", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
)
_UNREAD = re.compile(
    r"Unimplemented keys: \[(?P<keys>.*?)\]|Unknown format: (?P<format>\S+)"
)  # llguidance's words


class Place(NamedTuple):
    """A schema within another one."""

    path: str  # a JSON pointer, such as "#/properties/tags"
    schema: dict[str, Any]


def simplified(text: str) -> str:
    """The JSON schema `text` without the keywords of `_DROPPED` that constrain nothing."""
    try:
        root = json.loads(text)
        for place in _places(root):
            _simplify(place.schema)
        return json.dumps(root)
    except (ValueError, RecursionError):  # llguidance says what is wrong with it
        return text


def place_of(text: str, problem: str) -> str:
    """Where within the JSON schema `text` is what llguidance's message `problem` is about; empty if that is unknown."""
    unread = _UNREAD.search(problem)
    if unread is None:
        return ""
    keywords = re.findall(r'"([^"]+)"', unread["keys"] or "")
    for place in _places(json.loads(text)):
        has_keyword = any(keyword in place.schema for keyword in keywords)
        if has_keyword or (unread["format"] and place.schema.get("format") == unread["format"]):
            return place.path.removeprefix("#")
    return ""


def _places(root: Any) -> Iterator[Place]:
    """A schema and those within it; one that is changed meanwhile is left by its remaining keywords."""
    pending = deque([("#", root)])
    while pending:
        path, schema = pending.popleft()
        if not isinstance(schema, dict):  # true, false, or an error
            continue
        yield Place(path, schema)
        for keyword, value in schema.items():
            if keyword in _SINGLE:
                pending.append((f"{path}/{keyword}", value))
            if keyword in _MAPPINGS and isinstance(value, dict):
                pending += [(f"{path}/{keyword}/{name}", inner) for name, inner in value.items()]
            if (keyword in _LISTS or keyword == "items") and isinstance(value, list):
                pending += [
                    (f"{path}/{keyword}/{number}", inner) for number, inner in enumerate(value)
                ]


def _simplify(schema: dict[str, Any]) -> None:
    for keyword in _DROPPED:
        if keyword in schema and _is_idle(keyword, schema):
            del schema[keyword]


def _is_idle(keyword: str, schema: dict[str, Any]) -> bool:
    """Whether every value that matches `schema` without this keyword matches it with the keyword, too."""
    value = schema[keyword]
    match keyword:
        case "uniqueItems" | "not" | "$recursiveAnchor":
            return value is False
        case "unevaluatedItems" | "unevaluatedProperties":
            return value in _ANYTHING
        case "propertyNames":
            return value in _ANYTHING or value == {"type": "string"}
        case "dependencies" | "dependentRequired" | "dependentSchemas":
            return value == {}
        case "contains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "if":
            return schema.get("then", True) in _ANYTHING and schema.get("else", True) in _ANYTHING
        case "then" | "else":
            return "if" not in schema
    return keyword == "$dynamicAnchor"  # a name: what refers to it is refused itself
