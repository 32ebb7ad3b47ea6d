"""Bounds on JSON schemas and regular expressions, checked before llguidance builds a parser from them. Pure.

llguidance's own limits do not count everything.  Where several schemas apply to one value (`allOf`, or `anyOf` or
`$ref` beside other keywords) it pairs the alternatives of each with those of the others, and tests whether all their
patterns can match together: twenty short patterns in one `allOf` take half a minute, and nothing interrupts it.
Schemas of one page never come near these bounds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from math import lcm, prod
from typing import Any, NamedTuple
from urllib.parse import unquote

MOST_REMAINDERS = 10_000  # states for `multipleOf`; 0.03 s
MOST_PATTERNS = 8  # patterns and formats that apply to one string; 5 ms, where 12 can take 0.3 s and 16 a minute
MOST_PAIRS = 400  # intersected alternatives, in all; 0.2 s
MOST_PATTERN_PROPERTIES = 16  # in all; with many properties 0.2 s, and 300 take 10 s
MOST_PARTS = 500  # groups and repetitions of an expression; 0.1 s, and the time grows with their square
MOST_BYTES = 20_000  # of an expression with its counts written out; up to 30 ms a token
_ATOM = re.compile(r"\\[pPxuU]\{[^}]*\}|\\.|\[(?:\\.|\[(?:\\.|[^]\\])*\]|[^][\\])*\]", re.DOTALL)  # escape or class
_PARTS = re.compile(r"\{(\d{1,9},?\d{0,9})\}|(.)", re.DOTALL | re.ASCII)  # a count, or any other character


def check_regex(expression: str) -> None:
    """Raise ValueError for an expression that llguidance would spend too long on.

    It looks at everything that can come first after each optional part: 16,000 times ".*" took half a minute and 4 GB.
    Nested counts such as ((((a{99}){99}){99}){99}) cost its lexer half a second.
    """
    if _written_out(expression) > MOST_BYTES:
        raise ValueError(f"an expression's counts come to more than {MOST_BYTES:,} bytes: use * or +")
    if sum(map(expression.count, "?*{(")) > MOST_PARTS:
        raise ValueError(f"an expression has more than {MOST_PARTS} groups, and parts that are repeated")


def _written_out(expression: str) -> int:
    """Bytes of the expression with each count (its upper bound) written out. Accepts invalid expressions."""
    groups = [[0, 0]]  # innermost last; for each: bytes so far, bytes of its last part
    for count, sign in _PARTS.findall(_ATOM.sub(".", expression)):
        if count:
            most = max(map(int, re.findall(r"\d+", count)))
            groups[-1][1] *= min(MOST_BYTES + 1, max(most, 1))
        elif sign == "(":
            groups.append([0, 0])
        elif sign == ")" and len(groups) > 1:
            inside = sum(groups.pop())
            groups[-1] = [sum(groups[-1]), inside]
        elif sign not in "*+?|^$":
            groups[-1] = [sum(groups[-1]), len(sign.encode(errors="replace"))]
    return sum(map(sum, groups))


def check_schema(schema: Any) -> None:
    """Raise ValueError, naming the keyword, for a schema that llguidance would spend too long on."""
    try:
        _check_multiples(schema)
        _Costs(schema).of(schema)
    except RecursionError:
        raise ValueError("the schema is nested too deep") from None


def _check_multiples(schema: Any) -> None:
    """A parser has a state for each remainder, which llguidance's limits do not count."""
    states = 1
    for one in _all_objects(schema):
        if isinstance(number := one.get("multipleOf"), (int, float)) and number:
            states = lcm(states, Fraction(str(number)).numerator)
        if states > MOST_REMAINDERS:
            raise ValueError(f"multipleOf: the least common multiple is over {MOST_REMAINDERS:,}")


def _all_objects(schema: Any) -> Iterator[dict[str, Any]]:
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


class _Cost(NamedTuple):
    """What one schema asks of a value.

    Attributes:
        patterns: the most that apply to one string in the value.
        alternatives: the most for the value itself, or for one value in it.
    """

    patterns: int = 0
    alternatives: int = 1


class _Costs:
    """The costs of one document's schemas; raises ValueError where they add up to too much."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, _Cost] = {}
        self._pairs = self._pattern_properties = 0

    def of(self, schema: Any) -> _Cost:
        """Zero for a schema that refers to itself: llguidance refuses that beside other keywords."""
        if not isinstance(schema, dict):
            return _Cost()
        if id(schema) not in self._known:
            self._known[id(schema)] = _Cost()
            self._known[id(schema)] = self._sum(schema)
        return self._known[id(schema)]

    def _sum(self, schema: dict[str, Any]) -> _Cost:
        if schema is not self._root and any(isinstance(schema.get(name), str) for name in ("$id", "id")):
            raise ValueError("$id: a schema in a schema must not have one")
        named = _items(schema.get("patternProperties"))
        for expression in (schema.get("pattern"), *(name for name, _ in named)):
            check_regex(expression if isinstance(expression, str) else "")
        self._pattern_properties += len(named)
        if self._pattern_properties > MOST_PATTERN_PROPERTIES:
            raise ValueError(f"patternProperties: more than {MOST_PATTERN_PROPERTIES} in all")
        inside = [self.of(one) for one in _inside(schema)]
        together = [self.of(one) for one in _listed(schema.get("allOf"))]
        together += [_either([self.of(one) for one in _listed(schema.get(name))]) for name in ("anyOf", "oneOf")]
        if isinstance(reference := schema.get("$ref"), str):
            together.append(self.of(self._found(reference)))
        patterns = ("pattern" in schema) + ("format" in schema) + sum(one.patterns for one in together)
        patterns += max((one.patterns for one in inside), default=0)
        if patterns > MOST_PATTERNS:
            raise ValueError(f"one string would have to match more than {MOST_PATTERNS} patterns and formats")
        own = max(len(_listed(schema.get("enum"))), *(one.alternatives for one in inside), 1)
        return _Cost(patterns, self._intersect([own, *(one.alternatives for one in together)]))

    def _intersect(self, alternatives: list[int]) -> int:
        several = [number for number in alternatives if number > 1]
        self._pairs += prod(several) if len(several) > 1 else 0
        if self._pairs > MOST_PAIRS:
            raise ValueError(f"more than {MOST_PAIRS:,} alternatives would have to be set against each other")
        return prod(several)

    def _found(self, reference: str) -> Any:
        """What a reference points to; None where there is nothing."""
        path, *more = unquote(reference).split("/")
        if path != "#":
            raise ValueError(f"$ref {reference[:60]!r}: only places in the schema are looked up, as in #/$defs/name")
        at = self._root
        for name in (one.replace("~1", "/").replace("~0", "~") for one in more):
            if isinstance(at, list):
                at = at[int(name[:9])] if name.isdecimal() and int(name[:9]) < len(at) else None
            else:
                at = at.get(name) if isinstance(at, dict) else None
        return at


def _inside(schema: dict[str, Any]) -> list[Any]:
    """The schemas of what a value holds."""
    items = schema.get("items")
    found = [one for name in ("properties", "patternProperties") for _, one in _items(schema.get(name))]
    found += [*_listed(schema.get("prefixItems")), *(items if isinstance(items, list) else [items])]
    return [*found, schema.get("additionalProperties"), schema.get("additionalItems")]


def _either(options: list[_Cost]) -> _Cost:
    """The cost of a value that keeps to one of several schemas."""
    if not options:
        return _Cost()
    return _Cost(max(one.patterns for one in options), sum(one.alternatives for one in options))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _items(value: Any) -> list[tuple[str, Any]]:
    return [*value.items()] if isinstance(value, dict) else []
