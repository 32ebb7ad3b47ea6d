"""Prepares JSON schemas for llguidance, which refuses some keywords whatever their value.

So we drop keywords whose value constrains nothing, such as `uniqueItems: false`. llguidance does
not say where a refused keyword is, so we find its place. This file imports nothing else of PEARL,
because the child process of `parser` imports it.
"""

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

_ANYTHING: tuple[Any, ...] = (True, {})  # schemas that every value matches
_MAPPINGS = {  # keywords whose value is name -> schema
    "$defs",
    "definitions",
    "dependentSchemas",
    "patternProperties",
    "properties",
}
_LISTS = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}  # whose value is a list of schemas
_SINGLE = {  # whose value is a schema
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
}
# Keywords to drop where they constrain nothing. `if` precedes `then` and `else`, and `contains` precedes `maxContains`
# and `minContains`, because those constrain nothing once `if` or `contains` is dropped.
_DROPPED = (
    "$dynamicAnchor",
    "$recursiveAnchor",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "if",
    "else",
    "then",
    "maxContains",
    "minContains",
    "not",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
)
# Messages of llguidance.
_UNREAD = re.compile(r"Unimplemented keys: \[(?P<keys>.*?)\]|Unknown format: (?P<format>\S+)")


class SchemaPlace(NamedTuple):
    """A schema within another one."""

    path: str  # a JSON pointer, such as "#/properties/tags"
    schema: Any  # an object, true or false


def simplified(text: str) -> str:
    """Return the JSON schema `text` without the keywords of `_DROPPED` that constrain nothing."""
    try:
        root = json.loads(text)
        for place in _places(root):
            _simplify(place.schema)
        return json.dumps(root)
    except (ValueError, RecursionError):  # llguidance says what is wrong with it
        return text


def place_of(text: str, problem: str) -> str:
    """Return the place in the JSON schema `text` that a message of llguidance is about.

    The place is a JSON pointer such as "/properties/tags"; it is empty if the place is not known.
    `problem`: the message.
    """
    unread = _UNREAD.search(problem)
    if unread is None:
        return ""
    keywords = re.findall(r'"([^"]+)"', unread["keys"] or "")
    for place in _places(json.loads(text)):
        has_keyword = any(keyword in place.schema for keyword in keywords)
        if has_keyword or (unread["format"] and place.schema.get("format") == unread["format"]):
            return place.path.removeprefix("#")
    return ""


def _places(root: Any) -> Iterator[SchemaPlace]:
    """Yield a schema, and then the schemas within it. The schemas true and false are left out.

    The caller may drop keywords of a schema before it takes the next one.
    """
    pending = deque([SchemaPlace("#", root)])
    while pending:
        place = pending.popleft()
        if not isinstance(place.schema, dict):  # true, false, or an error
            continue
        yield place
        for keyword, value in place.schema.items():
            path = f"{place.path}/{keyword}"
            if keyword in _SINGLE:
                pending.append(SchemaPlace(path, value))
            inner: Iterable[tuple[Any, Any]] = ()
            if keyword in _MAPPINGS and isinstance(value, dict):
                inner = value.items()
            elif keyword in _LISTS and isinstance(value, list):
                inner = enumerate(value)
            for name, schema in inner:
                pending.append(SchemaPlace(f"{path}/{name}", schema))


def _simplify(schema: dict[str, Any]) -> None:
    for keyword in _DROPPED:
        if keyword in schema and _is_idle(keyword, schema):
            del schema[keyword]


def _is_idle(keyword: str, schema: dict[str, Any]) -> bool:
    """Return whether a keyword constrains nothing.

    This is so if every value that matches `schema` without the keyword also matches it with the
    keyword.
    """
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
    return keyword == "$dynamicAnchor"  # only a name; llguidance refuses references to it
