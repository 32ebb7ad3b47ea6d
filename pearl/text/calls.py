"""Reads calls of tools from text that comes in pieces. Each notation of calls has its own reader.

A reader is a generator that reads from a `Cursor`. It yields None when it needs more text, and a
`Part` as soon as a part of a call is certain. A reader takes only the text of calls from the
cursor; all other text stays in the cursor.
"""

import ast
import json
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import regex
from msgspec import Struct

from pearl.document import parse_json
from pearl.text.marks import ANY, Marks

Schemas = Mapping[str, Mapping[str, Any]]  # name of a function -> the JSON schema of its arguments
NEVER = "(?!)"


class Part(NamedTuple):
    """A part of a call.

    Attributes:
        source: the text from which the part was read.
        name: the function's name; empty unless the part is the first of its call.
        arguments: the next piece of the arguments' JSON text.
    """

    source: str
    name: str = ""
    arguments: str = ""


class Cursor:
    """The part of a reply that has come but has not been read yet.

    Attributes:
        is_last: whether no more text will come.
    """

    def __init__(self, marks: Marks) -> None:
        self.text = ""
        self.is_last = False
        self._marks = marks

    def take(self, length: int) -> str:
        """Remove the next `length` characters, and return them."""
        text = self.text[:length]
        self.text = self.text[length:]
        return text

    def compiled(self, expression: str) -> regex.Pattern[str]:
        return self._marks.compiled(expression)

    def readable(self, text: str) -> str:
        return self._marks.readable(text)

    def match(self, expression: str, start: int = 0) -> Generator[None, None, Any]:
        """Return the match of an expression at `start`; None if there is no match.

        Yields until enough text has come to tell whether there is a match.
        """
        pattern = self.compiled(expression)
        while True:
            match = pattern.match(self.text, start, partial=not self.is_last)
            if match is None or not match.partial:
                return match
            yield

    def is_cut(self, expression: str) -> bool:
        """Return whether the reply ends with an incomplete match of an expression."""
        if not self.is_last or not self.text:
            return False
        match = self.compiled(expression).match(self.text, partial=True)
        return match is not None and match.partial


Reading = Generator[Part | None, None, bool]  # its return value: whether there was a call
# Reads one call. The number is the length of the text before the call, such as an opening tag; this
# text is taken from the cursor together with the call.
CallReader = Callable[[Cursor, int, Schemas], Reading]


def read_tail(cursor: Cursor, expression: str) -> Reading:
    """Read the text that `expression` matches, such as a closing tag, if this text comes next.

    Returns whether the whole text was read. If the reply ends within this text, the part that has
    come is read, and the result is False.
    """
    match = yield from cursor.match(expression)
    if match is not None:
        yield Part(cursor.take(match.end()))
        return True
    if cursor.is_cut(expression):
        yield Part(cursor.take(len(cursor.text)))
    return False


def read_block(
    cursor: Cursor,
    schemas: Schemas,
    opening: str,
    call: CallReader,
    between: str = NEVER,
    closing: str = NEVER,
) -> Reading:
    """Read calls that follow each other in one block.

    Args:
        opening: matches the text from the block's beginning to the first call.
        call: reads one call.
        between: matches the text between two calls.
        closing: matches the block's end, which may be missing.
    """
    lead = yield from cursor.match(opening)
    if lead is None:
        return False
    is_call = yield from call(cursor, lead.end(), schemas)
    if not is_call:
        return False
    while True:
        is_closed = yield from read_tail(cursor, closing)
        if is_closed:
            return True
        lead = yield from cursor.match(between)
        if lead is None:
            if cursor.is_cut(between):
                yield Part(cursor.take(len(cursor.text)))
            return True
        is_call = yield from call(cursor, lead.end(), schemas)
        if not is_call:
            return True


# ---- arguments in JSON ----

_NAME = r'"(?:name|tool_name)"'
_ARGUMENTS = r'"(?:arguments|parameters)"'
_OTHER = r'"(?:id|type|tool_call_id)"\s*:\s*"[^"]*"'
_NAMED = rf'\{{\s*(?:{_OTHER}\s*,\s*)*{_NAME}\s*:\s*"([^"\n]+)"\s*,\s*{_ARGUMENTS}\s*:\s*(?=\{{)'
_REST = rf"\s*(?:,\s*{_OTHER}\s*)*\}}"  # the rest of the object, after the arguments


def read_object(cursor: Cursor, lead: int, schemas: Schemas) -> Reading:
    """Read a call such as {"name": "add", "arguments": {"a": 1}}.

    The fields may come in any order, and may be inside an object "function".
    """
    head = yield from cursor.match(_NAMED, lead)
    if head is None:
        return (yield from _read_whole_object(cursor, lead))
    return (yield from _read_named(cursor, head, _REST))


def _read_named(cursor: Cursor, head: Any, rest: str) -> Reading:
    """Read the rest of a call, of which `head` has matched the text up to the arguments.

    `rest`: an expression for the text after the arguments, which may be missing.
    """
    name = cursor.readable(head.group(1))
    yield Part(cursor.take(head.end()), name)
    yield from _read_json(cursor)
    yield from read_tail(cursor, rest)
    return True


def read_known_object(cursor: Cursor, lead: int, schemas: Schemas) -> Reading:
    """Read an object, as `read_object` does, if it names a function in `schemas`."""
    arguments = yield from cursor.match(rf"\{{\s*{_ARGUMENTS}", lead)
    if arguments is not None:
        return (yield from _read_whole_object(cursor, lead, schemas))
    head = yield from cursor.match(rf'\{{[^{{}}]*?{_NAME}\s*:\s*"([^"\n]+)"', lead)
    if head is None or head.group(1) not in schemas:
        return False
    return (yield from read_object(cursor, lead, schemas))


def _read_whole_object(cursor: Cursor, lead: int, known: Schemas | None = None) -> Reading:
    """Wait until a JSON object is complete, and read the object if it is a call.

    `known`: the functions that a call may name; None if a call may name any function.
    """
    start = yield from cursor.match(r"\{", lead)
    if start is None:
        return False
    end = yield from _object_end(cursor, lead)
    if end is None:
        return False
    call = _call_in(cursor.readable(cursor.text[lead:end]))
    if call is None or (known is not None and call.name not in known):
        return False
    yield Part(cursor.take(end), call.name, call.arguments)
    return True


def _object_end(cursor: Cursor, start: int) -> Generator[None, None, int | None]:
    balance = _Balance()
    read = start
    while True:
        end = balance.find(cursor.text[read:])
        if end is not None:
            return read + end
        if cursor.is_last:
            return None
        read = len(cursor.text)
        yield


def _call_in(text: str) -> Part | None:
    """Return the call that the text of an object describes; None if it describes no call."""
    fields = value_in(text)
    if isinstance(fields, dict) and isinstance(fields.get("function"), dict):
        fields = fields["function"]
    if not isinstance(fields, dict):
        return None
    name = fields.get("name", fields.get("tool_name"))
    if not isinstance(name, str) or not name:
        return None
    return Part("", name, _arguments_in(fields.get("arguments", fields.get("parameters"))))


def _arguments_in(arguments: Any) -> str:
    """Return a call's arguments as JSON text.

    `arguments`: the parsed value, or a text that holds it. None and an empty text become {}.
    """
    if isinstance(arguments, str):
        value = value_in(arguments)
        if isinstance(value, dict) or arguments.strip() in ("", "null", "None"):
            arguments = value
    if arguments is None:
        return "{}"
    return json.dumps(arguments, ensure_ascii=False)


def _read_json(cursor: Cursor) -> Generator[Part | None, None, None]:
    """Read a JSON value at the cursor, and yield its text piece by piece."""
    balance = _Balance()
    while True:
        end = balance.find(cursor.text)
        length = len(cursor.text) if end is None else end
        if length:
            text = cursor.take(length)
            yield Part(text, arguments=cursor.readable(text))
        if end is not None or cursor.is_last:
            return
        yield None


class _Balance:
    """Finds the end of a JSON or Python value that comes in pieces of text.

    The value ends where every bracket outside strings has been closed.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """Take the next piece of text; return the index after the value's end.

        Returns None if the value does not end in this piece.
        """
        for index, character in enumerate(text):
            if self._quote:
                if self._is_escaped or character == "\\":
                    self._is_escaped = not self._is_escaped
                elif character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            elif character in "{[(":
                self._depth += 1
            elif character in "}])":
                self._depth -= 1
                if not self._depth:
                    return index + 1
        return None


class NamedCall(Struct, frozen=True, forbid_unknown_fields=True):
    """Reads a call that is a name followed by arguments in JSON, such as add{"a": 1}.

    If `head` does not match, it reads an object, as `read_object` does.

    Args:
        head: matches the text up to the arguments; its group is the name.
        rest: matches the text after the arguments, which may be missing.
    """

    head: str
    rest: str = NEVER

    def __call__(self, cursor: Cursor, lead: int, schemas: Schemas) -> Reading:
        head = yield from cursor.match(self.head, lead)
        if head is None:
            return (yield from read_object(cursor, lead, schemas))
        return (yield from _read_named(cursor, head, self.rest))


# ---- arguments in tags ----


class TaggedCall(Struct, frozen=True, forbid_unknown_fields=True):
    """Reads a call that is a name followed by arguments between tags.

    The function's schema says which type each argument has.

    Args:
        head: matches the text up to the first argument, or to `end` if there is none; its group is
            the function's name.
        key: matches the text before an argument's value; its group is the argument's name.
        value_end: matches the closing tag of a value, and looks ahead at the text after it, because
            a value may contain the closing tag.
        end: matches the end of the call.
        is_padded: whether each value stands between two line feeds that are not part of it.
        is_known: whether a call must name a function of the request.
    """

    head: str
    key: str
    value_end: str
    end: str
    is_padded: bool = False
    is_known: bool = False

    def __call__(self, cursor: Cursor, lead: int, schemas: Schemas) -> Reading:
        head = yield from cursor.match(self.head, lead)
        if head is None or (self.is_known and head.group(1) not in schemas):
            return False
        name = head.group(1)
        yield Part(cursor.take(head.end()), name)
        schema = schemas.get(name, {})
        opening = "{"
        while True:
            key = yield from cursor.match(self.key)
            if key is None:
                break
            name_text = json.dumps(key.group(1), ensure_ascii=False)
            yield Part(cursor.take(key.end()), arguments=f"{opening}{name_text}: ")
            opening = ", "
            is_whole = yield from self._read_value(cursor, property_of(schema, key.group(1)))
            if not is_whole:
                return True
        closing = "{}" if opening == "{" else "}"
        end = yield from cursor.match(self.end)
        if end is None:
            if not cursor.is_last:
                yield Part("", arguments=closing)
            elif cursor.is_cut(self.key) or cursor.is_cut(self.end):
                yield Part(cursor.take(len(cursor.text)))
            return True
        yield Part(cursor.take(end.end()), arguments=closing)
        return True

    def _read_value(self, cursor: Cursor, schema: Any) -> Reading:
        """Read one value; return whether it is complete.

        A string is yielded piece by piece; any other value is yielded once it is complete.
        """
        if types_of(schema) == {"string"}:
            return (yield from self._read_string(cursor))
        pattern = cursor.compiled(self.value_end)
        start = 0
        while True:
            match = pattern.search(cursor.text, start, partial=not cursor.is_last)
            if match is not None and not match.partial:
                value = self._unpadded(cursor.readable(cursor.text[: match.start()]))
                yield Part(cursor.take(match.end()), arguments=typed(value, schema))
                return True
            if cursor.is_last:
                text = cursor.take(self._cut_length(cursor))
                value = self._unpadded(cursor.readable(text))
                yield Part(text, arguments=_cut(value, schema))
                yield Part(cursor.take(len(cursor.text)))
                return False
            start = len(cursor.text) if match is None else match.start()
            yield None

    def _read_string(self, cursor: Cursor) -> Reading:
        pattern = cursor.compiled(self.value_end)
        quote = '"'
        if self.is_padded:
            padding = yield from cursor.match(r"\n")
            if padding is not None:
                yield Part(cursor.take(1), arguments=quote)
                quote = ""
        while True:
            match = pattern.search(cursor.text, partial=not cursor.is_last)
            if cursor.is_last and match is None:
                length = self._cut_length(cursor)
            else:
                length = len(cursor.text) if match is None else match.start()
            text = cursor.take(length)
            escaped = json.dumps(cursor.readable(text), ensure_ascii=False)[1:-1]
            if text or quote:
                yield Part(text, arguments=quote + escaped)
                quote = ""
            if match is not None and not match.partial:
                yield Part(cursor.take(len(match.group())), arguments='"')
                return True
            if cursor.is_last:
                yield Part(cursor.take(len(cursor.text)))
                return False
            yield None

    def _cut_length(self, cursor: Cursor) -> int:
        """Return the length of a value that is cut by the end of the reply.

        The beginning of a closing tag is not counted.
        """
        match = cursor.compiled(self.value_end).search(cursor.text, partial=True)
        return len(cursor.text) if match is None else int(match.start())

    def _unpadded(self, value: str) -> str:
        return value.removeprefix("\n") if self.is_padded else value


def property_of(schema: Mapping[str, Any], name: str) -> Any:
    """Return the schema of the property `name`.

    If that is a reference within `schema`, such as {"$ref": "#/$defs/Point"}, it is followed.
    """
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    member = properties.get(name, {})
    for _ in range(8):
        reference = member.get("$ref") if isinstance(member, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        member = schema
        for key in reference[2:].split("/"):
            member = member.get(key, {}) if isinstance(member, Mapping) else {}
    return member


def types_of(schema: Any) -> set[str]:
    """Return the JSON types that a schema allows; an empty set if the schema names no type."""
    if not isinstance(schema, Mapping):
        return set()
    stated = schema.get("type", [])
    types = {stated} if isinstance(stated, str) else set(stated)
    for choice in ("anyOf", "oneOf", "allOf"):
        for member in schema.get(choice, ()):
            types |= types_of(member)
    for value in schema.get("enum", ()):
        if isinstance(value, str):
            types.add("string")
    return types


def typed(text: str, schema: Any) -> str:
    """Return the value that a model wrote as `text`, as JSON of a type that the schema allows.

    For example the text 3 becomes 3 if the schema says integer, and "3" if it says string.
    """
    types = types_of(schema)
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    value = value_in(text.strip())
    is_null = value is None and text.strip() not in ("null", "None")
    if is_null or (isinstance(value, str) and "string" in types):
        value = text
    if types and "string" in types and not _fits(value, types):
        value = text
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        value = int(value)
    return json.dumps(value, ensure_ascii=False)


_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
    "string": (str,),
}


def _fits(value: Any, types: set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    return any(isinstance(value, _PYTHON_TYPES.get(name, ())) for name in types)


def _cut(text: str, schema: Any) -> str:
    """Return as JSON a value whose end is missing, because the reply ended within the value.

    `text`: the part that has come. For example, `re` of a string becomes `"re`, without a closing
    quote.
    """
    types = types_of(schema)
    if types and "string" not in types:
        return text.strip()
    return json.dumps(text, ensure_ascii=False)[:-1]


_CONSTANTS = {"true": True, "false": False, "null": None}


def value_in(text: str) -> Any:
    """Parse a text as JSON or, if it is no JSON, as a Python literal; None if it is neither."""
    try:
        return parse_json(text)
    except (ValueError, RecursionError):
        pass
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    try:
        value = ast.literal_eval(text)
        json.dumps(value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return value


# ---- calls in Python's notation ----


def read_python(cursor: Cursor, lead: int, schemas: Schemas) -> Reading:
    """Read calls such as [add(1, b="x"), stop()].

    Positional arguments get the names of the schema's properties, in their order. If any item of
    the list is no call of a function in `schemas`, the whole list is text.
    """
    head = yield from cursor.match(r"\[\s*([A-Za-z_][\w.-]*)\s*(?=\()", lead)
    if head is None or head.group(1) not in schemas:
        return False
    end = yield from _object_end(cursor, lead)
    if end is None:
        return False
    calls = _calls_in(cursor.readable(cursor.text[lead:end]), schemas)
    if not calls:
        return False
    source = cursor.take(end)
    for call in calls:
        yield Part(source, call.name, call.arguments)
        source = ""
    return True


def _calls_in(text: str, schemas: Schemas) -> list[Part]:
    """Return the calls in a Python list; no calls if any item cannot be read as a call."""
    try:
        listing = ast.parse(text, mode="eval").body
        assert isinstance(listing, ast.List)
        return [_call_of(node, schemas) for node in listing.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _call_of(node: ast.expr, schemas: Schemas) -> Part:
    """Return the call that a node of Python's syntax tree stands for.

    Raises `ValueError` if the node is no call of a function in `schemas`, or its arguments do not
    fit the schema.
    """
    if not isinstance(node, ast.Call):
        raise ValueError("no call")
    name = ast.unparse(node.func)
    if name not in schemas:
        raise ValueError("no function of the request")
    names = list(schemas[name].get("properties") or ())
    values = {}
    for key, value in zip(names, node.args, strict=False):
        values[key] = ast.literal_eval(value)
    if len(values) < len(node.args):
        raise ValueError("the schema has fewer arguments")
    for word in node.keywords:
        if word.arg is None or word.arg in values:
            raise ValueError("an argument without a name, or twice")
        values[word.arg] = ast.literal_eval(word.value)
    return Part("", name, json.dumps(values, ensure_ascii=False))


# ---- Gemma 4 ----

_QUOTE = regex.escape('<|"|>')
_GEMMA_END = rf"\}}\s*{regex.escape('<tool_call|>')}"


def read_gemma(cursor: Cursor, lead: int, schemas: Schemas) -> Reading:
    """Read a call such as call:add{a:1,b:<|"|>x<|"|>}.

    The token <|"|> stands for the quotes of strings; keys have no quotes.
    """
    head = yield from cursor.match(r"call:([\w.-]+)\s*(?=\{)", lead)
    if head is None:
        return False
    yield Part(cursor.take(head.end()), head.group(1))
    pattern = cursor.compiled(
        rf"(?:{_QUOTE}.*?{_QUOTE}|[^<{ANY}])*?\}}(?=\s*{regex.escape('<tool_call|>')})"
    )
    while True:
        match = pattern.match(cursor.text, partial=not cursor.is_last)
        if match is not None and not match.partial:
            arguments = _from_gemma(cursor, cursor.text[: match.end()])
            yield Part(cursor.take(match.end()), arguments=arguments)
            return True
        if cursor.is_last:
            text = cursor.take(len(cursor.text))
            end = cursor.compiled(_GEMMA_END).search(text, partial=True)
            length = len(text) if end is None else end.start() + 1
            yield Part(text, arguments=_from_gemma(cursor, text[:length]))
            return True
        if match is None:
            yield Part("", arguments="{}")
            return True
        yield None


def _from_gemma(cursor: Cursor, text: str) -> str:
    """Return arguments in Gemma's notation as JSON text.

    If the end of the reply has cut the arguments, the JSON is cut at the same place.
    """
    pattern = cursor.compiled(
        rf"{_QUOTE}(?P<string>.*?)(?P<end>{_QUOTE}|$)|(?P<key>[^\s{{}}\[\],:{ANY}]+)(?=\s*:)"
    )

    def as_json(match: Any) -> str:
        words = match.group("string")
        if words is None:
            return json.dumps(cursor.readable(match.group("key")), ensure_ascii=False)
        string = json.dumps(cursor.readable(words), ensure_ascii=False)
        return string if match.group("end") else string[:-1]

    if not text.endswith("}"):
        half_quote = regex.search(_QUOTE, text, partial=True, pos=max(0, len(text) - 4))
        if half_quote is not None:
            text = text[: half_quote.start()]
        text = regex.sub(r"(?<=[{,])\s*[\w.-]+$", "", text)  # a key that has no value yet
    return str(pattern.sub(as_json, text))
