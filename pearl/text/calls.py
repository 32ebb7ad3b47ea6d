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
from pearl.printable import is_unicode
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
_REST = rf"\s*(?:,[^{{}}<{ANY}]*)?\}}"  # the rest of the object, after the arguments


def read_object(cursor: Cursor, lead: int, schemas: Schemas) -> Reading:
    """Read a call such as {"name": "add", "arguments": {"a": 1}}.

    The fields may come in any order, and may be inside an object "function". `lead` is the index in
    the cursor's text where the call begins, here and in the other readers.
    """
    head = yield from cursor.match(_NAMED, lead)
    if head is None:
        return (yield from _read_whole_object(cursor, lead))
    return (yield from _read_named(cursor, head, _REST))


def _read_named(cursor: Cursor, head: Any, rest: str) -> Reading:
    """Read a call whose text up to the arguments has been matched.

    Args:
        head: this match; its group is the function's name.
        rest: an expression for the text after the arguments, which may be missing.
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
    end = yield from _value_end(cursor, lead)
    if end is None:
        return False
    call = _call_in(cursor.readable(cursor.text[lead:end]))
    if call is None or (known is not None and call.name not in known):
        return False
    yield Part(cursor.take(end), call.name, call.arguments)
    return True


def _value_end(cursor: Cursor, start: int) -> Generator[None, None, int | None]:
    """Return the index after a value that begins at `start`; None if the value has no end."""
    balance = _Balance()
    read = start
    while True:
        end = balance.find(cursor.text[read:])
        if end is not None and not balance.missing:
            return read + end
        if end is not None or cursor.is_last:
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
    if not isinstance(name, str) or not name or not is_unicode(name):
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
    return _as_json(arguments)


def _as_json(value: Any) -> str:
    """Return a value as JSON that UTF-8 can encode.

    If the value has half a surrogate pair, all characters outside ASCII are written as escapes.
    Raises `ValueError` for a number that JSON cannot write, such as NaN.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_unicode(text) else json.dumps(value)


def _read_json(cursor: Cursor) -> Generator[Part | None, None, None]:
    """Read a JSON value at the cursor, and yield its text piece by piece.

    Brackets that the model forgot to close before the call's closing tag are closed here. A complete
    object with single quotes is yielded as a whole.
    """
    single_quote = yield from cursor.match(r"\{\s*'")
    if single_quote is not None:
        end = yield from _value_end(cursor, 0)
        if end is not None:
            text = cursor.take(end)
            yield Part(text, arguments=_arguments_in(cursor.readable(text)))
            return
    balance = _Balance()
    while True:
        end = balance.find(cursor.text)
        length = len(cursor.text) if end is None else end
        if length:
            text = cursor.take(length)
            yield Part(text, arguments=cursor.readable(text))
        if end is not None:
            yield Part("", arguments=balance.missing)
            return
        if cursor.is_last:
            return
        yield None


_CLOSING = {"{": "}", "[": "]", "(": ")"}


class _Balance:
    """Finds the end of a JSON or Python value that comes in pieces of text.

    The value ends where every bracket outside strings has been closed. It also ends before a tag
    outside strings, with brackets missing: {"a": [1</tool_call> lacks "]}".

    Attributes:
        missing: the brackets that would close the value, the innermost first.
    """

    def __init__(self) -> None:
        self.missing = ""
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
            elif character in _CLOSING:
                self.missing = _CLOSING[character] + self.missing
            elif character in "}])":
                self.missing = self.missing[1:]
                if not self.missing:
                    return index + 1
            elif character == "<" or "\ud800" <= character <= "\udfff":  # see `marks.ANY`
                return index
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
        key: matches the text before an argument's value; its first group is the argument's name.
            The second group, if there is one, is "true" where the value is a string.
        value_end: matches the closing tag of a value, and looks ahead at the text after it, because
            a value may contain the closing tag.
        end: matches the end of the call.
        unclosed: matches the end of a value without a closing tag, before the next argument or
            before the end of the call.
        is_padded: whether each value stands between two line feeds that are not part of it.
        is_known: whether a call must name a function of the request.
    """

    head: str
    key: str
    value_end: str
    end: str
    unclosed: str = NEVER
    is_padded: bool = False
    is_known: bool = False

    def __call__(self, cursor: Cursor, lead: int, schemas: Schemas) -> Reading:
        head = yield from cursor.match(self.head, lead)
        if head is None or (self.is_known and head.group(1) not in schemas):
            return False
        name = cursor.readable(head.group(1))
        yield Part(cursor.take(head.end()), name)
        yield from self._read_arguments(cursor, schemas.get(name, {}))
        return True

    def _read_arguments(
        self, cursor: Cursor, schema: Mapping[str, Any]
    ) -> Generator[Part | None, None, None]:
        """Read all arguments, and the end of the call."""
        opening = "{"
        while True:
            key = yield from cursor.match(self.key)
            if key is None:
                break
            name = cursor.readable(key.group(1))
            yield Part(cursor.take(key.end()), arguments=f"{opening}{_as_json(name)}: ")
            opening = ", "
            types = types_of(property_of(schema, name), schema)
            is_string = key.lastindex == 2 and key.group(2) == "true"
            if is_string and (not types or "string" in types):
                types = {"string"}
            is_whole = yield from self._read_value(cursor, types)
            if not is_whole:
                return
        closing = "{}" if opening == "{" else "}"
        yield from self._read_end(cursor, closing)

    def _read_end(self, cursor: Cursor, closing: str) -> Generator[Part | None, None, None]:
        """Read the end of the call, which may be missing or cut; `closing` ends the JSON text."""
        end = yield from cursor.match(self.end)
        if end is not None:
            yield Part(cursor.take(end.end()), arguments=closing)
        elif not cursor.is_last:
            yield Part("", arguments=closing)
        elif cursor.is_cut(self.key) or cursor.is_cut(self.end):
            yield Part(cursor.take(len(cursor.text)))

    def _read_value(self, cursor: Cursor, types: set[str]) -> Reading:
        """Read a value, which has one of these JSON types; return whether it is complete.

        A string is yielded piece by piece; any other value is yielded once it is complete.
        """
        if types == {"string"}:
            return (yield from self._read_string(cursor))
        pattern = cursor.compiled(self._value_end)
        start = 0
        while True:
            match = pattern.search(cursor.text, start, partial=not cursor.is_last)
            if match is not None and not match.partial:
                value = self._unpadded(cursor.readable(cursor.text[: match.start()]))
                yield Part(cursor.take(match.end()), arguments=typed(value, types))
                return True
            if cursor.is_last:
                text = cursor.take(_cut_length(cursor, self._value_end))
                value = self._unpadded(cursor.readable(text))
                yield Part(text, arguments=_cut(value, types))
                yield Part(cursor.take(len(cursor.text)))
                return False
            start = len(cursor.text) if match is None else match.start()
            yield None

    def _read_string(self, cursor: Cursor) -> Reading:
        quote = '"'
        if self.is_padded:
            padding = yield from cursor.match(r"\n")
            if padding is not None:
                yield Part(cursor.take(1), arguments=quote)
                quote = ""
        return (yield from _read_string(cursor, self._value_end, quote))

    @property
    def _value_end(self) -> str:
        return f"{self.value_end}|{self.unclosed}"

    def _unpadded(self, value: str) -> str:
        return value.removeprefix("\n") if self.is_padded else value


def _read_string(cursor: Cursor, end: str, quote: str = "") -> Reading:
    """Read a string up to a match of `end`, and yield it as JSON piece by piece.

    Returns whether the string is complete. `quote`: the opening quote, if it was not yielded yet.
    """
    pattern = cursor.compiled(end)
    while True:
        match = pattern.search(cursor.text, partial=not cursor.is_last)
        if cursor.is_last and match is None:
            length = _cut_length(cursor, end)
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


def _cut_length(cursor: Cursor, end: str) -> int:
    """Return the length of a value that is cut by the end of the reply.

    The beginning of a closing tag, which `end` matches, is not counted.
    """
    match = cursor.compiled(end).search(cursor.text, partial=True)
    return len(cursor.text) if match is None else int(match.start())


def property_of(schema: Mapping[str, Any], name: str) -> Any:
    """Return the schema of the property `name`; {} if there is none."""
    properties = schema.get("properties")
    return properties.get(name, {}) if isinstance(properties, Mapping) else {}


def types_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows; an empty set if the schema names no type.

    Clients send any schema, so a value of a wrong type, such as "enum": null, counts as missing.
    `root`: the schema to which references such as "#/$defs/Point" refer.
    """
    types: set[str] = set()
    pending = [schema]
    read_ids = set()  # of the schemas that were read, because references may form a circle
    while pending:
        schema = pending.pop()
        if not isinstance(schema, Mapping) or id(schema) in read_ids:
            continue
        read_ids.add(id(schema))
        stated = schema.get("type")
        for name in [stated, *_listed(stated)]:
            if isinstance(name, str):
                types.add(name)
        for value in [schema.get("const"), *_listed(schema.get("enum"))]:
            if isinstance(value, str):
                types.add("string")
        pending.append(_referred(schema.get("$ref"), root))
        for choice in ("anyOf", "oneOf", "allOf"):
            pending += _listed(schema.get(choice))
    return types


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema within `root` that a reference names; None if it names none."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    member: Any = root
    for key in reference[2:].split("/"):
        member = member.get(key) if isinstance(member, Mapping) else None
    return member


def typed(text: str, types: set[str]) -> str:
    """Convert a value that a model wrote as `text` to JSON of one of these types.

    For example the text 3 becomes 3 if the types are {"integer"}, and "3" if they are {"string"}.
    """
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
    return _as_json(value)


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


def _cut(text: str, types: set[str]) -> str:
    """Return as JSON a value whose end is missing, because the reply ended within the value.

    `text`: the part that has come. For example, `re` of a string becomes `"re`, without a closing
    quote.
    """
    if types and "string" not in types:
        return text.strip()
    return json.dumps(text, ensure_ascii=False)[:-1]


_CONSTANTS = {"true": True, "false": False, "null": None}


def value_in(text: str) -> Any:
    """Parse a text as JSON or, if it is no JSON, as a Python literal.

    Returns None if it is neither, or has a number that JSON cannot write, such as NaN.
    """
    for parse in (parse_json, _literal_in):
        try:
            value = parse(text)
            json.dumps(value, allow_nan=False)
            return value
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            pass
    return None


def _literal_in(text: str) -> Any:
    name = text.strip().lower()
    if name in _CONSTANTS:
        return _CONSTANTS[name]
    return _literal(ast.parse(text.strip(), mode="eval").body)


def _literal(node: ast.expr) -> Any:
    """Return the value of a Python literal, which may also contain JSON's true, false and null.

    Raises `ValueError` for any other expression.
    """
    return ast.literal_eval(_JsonConstants().visit(node))


class _JsonConstants(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in _CONSTANTS:
            return ast.Constant(_CONSTANTS[node.id])
        return node


# ---- calls in Python's notation ----


def read_python(cursor: Cursor, lead: int, schemas: Schemas) -> Reading:
    """Read calls such as [add(1, b="x"), stop()].

    Positional arguments get the names of the schema's properties, in their order. If any item of
    the list is no call of a function in `schemas`, the whole list is text.
    """
    head = yield from cursor.match(r"\[\s*([A-Za-z_][\w.-]*)\s*(?=\()", lead)
    if head is None or head.group(1) not in schemas:
        return False
    end = yield from _value_end(cursor, lead)
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
        values[key] = _literal(value)
    if len(values) < len(node.args):
        raise ValueError("the schema has fewer arguments")
    for word in node.keywords:
        if word.arg is None or word.arg in values:
            raise ValueError("an argument without a name, or twice")
        values[word.arg] = _literal(word.value)
    return Part("", name, _as_json(values))


# ---- Gemma 4 ----

_QUOTE = regex.escape('<|"|>')
_END = regex.escape("<tool_call|>")
_GEMMA_KEY = (
    rf"\s*+(?:(?P<close>[}}\]])|(?P<comma>,)|(?:{_QUOTE})?"
    rf"(?P<key>(?:(?!{_QUOTE})[^\s{{}}\[\],:{ANY}])++)(?:{_QUOTE})?\s*+:)"
)
_GEMMA_VALUE = (
    rf"\s*+(?:(?P<open>[{{\[])|(?P<close>[}}\]])|(?P<comma>,)|(?P<quote>{_QUOTE})"
    rf"|(?P<word>(?:(?!{_END})[^{{}}\[\],{ANY}])++)(?=[}}\],]|{_END}))"
)


def read_gemma(cursor: Cursor, lead: int, schemas: Schemas) -> Reading:
    """Read a call such as call:add{a:1,b:<|"|>x<|"|>}.

    The token <|"|> stands for the quotes of strings; keys have no quotes. A value without quotes is
    a string, unless it is JSON or a Python literal. Brackets that the model forgot to close are
    closed here.
    """
    head = yield from cursor.match(r"call:([\w.-]+)\s*(?=\{)", lead)
    if head is None:
        return False
    yield Part(cursor.take(head.end()), head.group(1))
    yield from _read_gemma_arguments(cursor)
    return True


def _read_gemma_arguments(cursor: Cursor) -> Generator[Part | None, None, None]:
    missing = ""  # the brackets that close the arguments, the innermost first
    previous = "open"  # the kind of the part before
    expression = _GEMMA_VALUE
    while True:
        match = yield from cursor.match(expression)
        if match is None:
            break
        kind = match.lastgroup
        text = cursor.readable(match.group(kind))
        if kind == "open":
            missing = _CLOSING[text] + missing
        elif kind == "close":
            text = missing[0]
            missing = missing[1:]
        written = _between(previous, kind) + _gemma_json(kind, text)
        yield Part(cursor.take(match.end()), arguments=written)
        if kind != "comma" or previous != "open":
            previous = kind
        if kind == "quote":
            is_whole = yield from _read_string(cursor, _QUOTE)
            if not is_whole:
                return
        if not missing:
            return
        expression = _GEMMA_VALUE
        if kind in ("open", "comma") and missing[0] == "}":
            expression = _GEMMA_KEY
    if cursor.is_last and (not cursor.text or cursor.is_cut(expression)):
        yield Part(cursor.take(len(cursor.text)))
    else:
        yield Part("", arguments=_between(previous, "close") + missing)


def _between(previous: str, kind: str) -> str:
    """Return the JSON that stands between two parts of Gemma's arguments, given their kinds.

    A comma is written once something follows it. A value that the model forgot is null.
    """
    if previous == "key" and kind in ("comma", "close"):
        return "null"
    if previous == "comma" and kind not in ("comma", "close"):
        return ", "
    return ""


def _gemma_json(kind: str, text: str) -> str:
    """Return the JSON of a part of Gemma's arguments; `kind` is the name of its group."""
    match kind:
        case "key":
            return f"{_as_json(text)}: "
        case "comma":
            return ""
        case "quote":
            return '"'
        case "word":
            return typed(text.strip(), set())
    return text
