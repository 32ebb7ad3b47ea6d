"""Tools for models to call, and their calls as clients read them."""

from typing import Any

POINT = {
    "type": "object",
    "properties": {"y": {"type": "boolean"}},
    "required": ["y"],
    "additionalProperties": False,
}
ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"x": {"enum": [1, 22]}, "at": {"$ref": "#/$defs/Point"}},
        "required": ["x", "at"],
        "additionalProperties": False,
        "$defs": {"Point": POINT},
    },
}
STOP = {
    "name": "stop",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS: list[Any] = [{"type": "function", "function": ADD}, {"type": "function", "function": STOP}]


def joined(chunks: list[Any]) -> list[dict[str, Any]]:
    """The calls of a stream's deltas, as clients join them."""
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"][0]["delta"].get("tool_calls", ()):
            call = calls.setdefault(part["index"], {"function": {"name": "", "arguments": ""}})
            call |= {name: part[name] for name in ("id", "type") if name in part}
            for name, text in part["function"].items():
                call["function"][name] += text
    return [calls[index] for index in sorted(calls)]
