"""What a JSON schema may ask of whoever makes a parser of it, before any limit of the parser's own counts. Pure.

Where several schemas hold of one value (`allOf`, or what stands beside `anyOf` and `$ref`), llguidance sets each of
their alternatives against each of the others', and looks whether all their expressions together match anything. Twenty
short patterns in one `allOf` so took half a minute, with each more twice or three times as long, and nothing interrupts
it.  Schemas of one page never come near these bounds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from math import lcm, prod
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote

MOST_REMAINDERS = 10_000  # of `multipleOf`; 0.03 s
MOST_MEETING = 8  # expressions that one string has to match; 5 ms, where 12 can take 0.3 s and 16 a minute
MOST_PAIRS = 200  # alternatives that are set against each other, in all; 0.1 s
MOST_PATTERN_PROPERTIES = 16  # in all; with many properties 0.2 s, and 300 take 10 s
MOST_PARTS = 500  # of an expression that may be repeated or left out; 0.1 s, and the time grows with their square
MOST_REPEATED = 20_000  # bytes that the counts of an expression come to; up to 30 ms a token
_COUNT = re.compile(r"(\d{1,9}),?(\d{0,9})\}", re.ASCII)  # behind its brace
_BRACED = re.compile(r"\\[pPxuU]\{[^}]*\}")


def check_schema(schema: Any) -> None:
    """Raises ValueError for a schema that would cost too much, with what to name."""
    _check_multiples(schema)
    try:
        _Costs(schema)
    except RecursionError:
        raise ValueError("the schema is nested too deep") from None


def check_regex(expression: str) -> None:
    """Raises ValueError for an expression of too many parts.

    Where each may be left out, the parser looks at all that may come first for each of them: 16,000 times ".*" took
    half a minute and 4 GB, in one step that no limit of its own interrupts.  A count costs little by itself, but its
    lexer takes ((((a{99}){99}){99}){99}) for so many expressions that it is half a second over them, and gives up.
    """
    if _repeated(expression) > MOST_REPEATED:
        raise ValueError(f"an expression's counts come to more than {MOST_REPEATED:,} bytes: use * or +")
    if sum(map(expression.count, "?*{(")) > MOST_PARTS:
        raise ValueError(f"an expression has more than {MOST_PARTS} groups, and parts that are repeated")


def _repeated(expression: str) -> int:
    """How many bytes it has once each count is written out; of a count with two bounds the higher one counts.

    Reads an expression that may be none: what is wrong with it is not told here.
    """
    groups: list[list[int]] = [[0, 0]]  # innermost last: of each the bytes so far, and those of its last part
    at = 0
    while at < len(expression):
        sign, at = expression[at], at + 1
        if sign == "(":
            groups.append([0, 0])
        elif sign == ")" and len(groups) > 1:
            inside = sum(groups.pop())
            groups[-1] = [sum(groups[-1]), inside]
        elif sign == "{" and (count := _COUNT.match(expression, at)):
            groups[-1][1] *= min(MOST_REPEATED + 1, max(int(count[2] or count[1]), 1))
            at = count.end()
        elif sign not in "*+?|^$":
            at = _behind(expression, at - 1)
            groups[-1] = [sum(groups[-1]), len(sign.encode(errors="replace"))]
    return sum(map(sum, groups))


def _behind(expression: str, at: int) -> int:
    """The place behind one character, escape or class."""
    if expression[at] == "\\":
        braced = _BRACED.match(expression, at)
        return braced.end() if braced else at + 2
    depth = 0
    while at < len(expression):
        depth += {"[": 1, "]": -1}.get(expression[at], 0)
        at += 1 + (expression[at] == "\\")
        if depth <= 0:
            break
    return at


def _check_multiples(schema: Any) -> None:
    """A parser has a state for each remainder of a number, and llguidance's limits do not count these."""
    states, waiting = 1, [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            number = one.get("multipleOf")
            if isinstance(number, (int, float)) and number:
                states = lcm(states, Fraction(str(number)).numerator)
            if states > MOST_REMAINDERS:
                raise ValueError(f"multipleOf: the least common multiple is over {MOST_REMAINDERS:,}")
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


class _Cost(NamedTuple):
    """Of the values that a schema describes.

    Attributes:
        expressions: the most that one string in such a value has to match.
        here: alternatives for the value itself.
        below: the most for what it holds, by the name under which it does; empty: under any, or as an element.
    """

    expressions: int = 0
    here: int = 1
    below: Mapping[str, int] = MappingProxyType({})


_NOTHING = _Cost()


class _Costs:
    """Follows a schema from its root. Raises ValueError where that comes to too much."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, _Cost] = {}
        self._pairs = self._patterns = 0
        self._of(root)

    def _of(self, schema: Any) -> _Cost:
        """What refers to itself adds nothing: llguidance refuses that beside anything else."""
        if not isinstance(schema, dict):
            return _NOTHING
        known = self._known.get(id(schema))
        if known is None:
            self._known[id(schema)] = _NOTHING
            self._known[id(schema)] = known = self._sum(schema)
        return known

    def _sum(self, schema: dict[str, Any]) -> _Cost:
        if schema is not self._root and any(isinstance(schema.get(name), str) for name in ("$id", "id")):
            raise ValueError("$id: a schema in a schema must not have one")
        inside = [(name, self._of(one)) for name, one in self._inside(schema)]
        together = [self._of(one) for one in _listed(schema.get("allOf"))]
        together += [_either([self._of(one) for one in _listed(schema.get(name))]) for name in ("anyOf", "oneOf")]
        if isinstance(reference := schema.get("$ref"), str):
            together.append(self._of(self._found(reference)))
        named = [name for name, _ in _items(schema.get("patternProperties"))]
        for expression in (schema.get("pattern"), *named):
            check_regex(expression if isinstance(expression, str) else "")
        own = ("pattern" in schema) + ("format" in schema)
        expressions = own + max((one.expressions for _, one in inside), default=0)
        expressions += sum(one.expressions for one in together)
        if expressions > MOST_MEETING:
            raise ValueError(f"one string would have to match more than {MOST_MEETING} patterns and formats")
        here = self._product(_count(schema.get("enum")), *(one.here for one in together))
        holds = _most((name, max(one.here, *one.below.values(), 1)) for name, one in inside)
        every = [holds, *(one.below for one in together)]
        below = {
            name: self._product(*(max(one.get(name, 1), one.get("", 1)) for one in every))
            for name in {name for one in every for name in one}
        }
        return _Cost(expressions, here, below)

    def _product(self, *alternatives: int) -> int:
        several = [number for number in alternatives if number > 1]
        self._pairs += prod(several) if len(several) > 1 else 0
        if self._pairs > MOST_PAIRS:
            raise ValueError(f"more than {MOST_PAIRS:,} alternatives would have to be set against each other")
        return prod(several)

    def _inside(self, schema: dict[str, Any]) -> Iterable[tuple[str, Any]]:
        """The schemas of what a value holds, by name."""
        patterns = [one for _, one in _items(schema.get("patternProperties"))]
        self._patterns += len(patterns)
        if self._patterns > MOST_PATTERN_PROPERTIES:
            raise ValueError(f"patternProperties: more than {MOST_PATTERN_PROPERTIES} in all")
        items = schema.get("items")
        elements = [*_listed(schema.get("prefixItems")), *(items if isinstance(items, list) else [items])]
        others = [schema.get("additionalProperties"), schema.get("additionalItems")]
        yield from (("", one) for one in [*patterns, *elements, *others])
        yield from _items(schema.get("properties"))

    def _found(self, reference: str) -> Any:
        """What a reference points to; None where that is nothing."""
        path, *more = unquote(reference).split("/")
        if path != "#":
            raise ValueError(f"$ref {reference[:60]!r}: only places in the schema are looked up, as in #/$defs/name")
        at = self._root
        for name in (one.replace("~1", "/").replace("~0", "~") for one in more):
            if isinstance(at, list) and name.isdecimal() and int(name[:9]) < len(at):
                at = at[int(name[:9])]
            elif isinstance(at, dict):
                at = at.get(name)
            else:
                return None
        return at


def _either(options: list[_Cost]) -> _Cost:
    """Of a value that keeps to one of several schemas."""
    if not options:
        return _NOTHING
    expressions, here, below = zip(*options, strict=True)
    return _Cost(max(expressions), sum(here), _most(item for one in below for item in one.items()))


def _most(items: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The most for each name; without those of which there is but one."""
    found: dict[str, int] = {}
    for name, number in items:
        if number > found.get(name, 1):
            found[name] = number
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _items(value: Any) -> list[tuple[str, Any]]:
    return [*value.items()] if isinstance(value, dict) else []


def _count(value: Any) -> int:
    return max(1, len(value)) if isinstance(value, list) else 1
