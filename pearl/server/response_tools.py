"""Tools of /v1/responses as functions of a chat, where names have no namespace.

Codex sends the functions of an MCP server as a group, and newer versions send all tools as an item
of `input`:

    {"type": "additional_tools", "tools": [
        {"type": "namespace", "name": "mcp__files", "tools": [
            {"type": "function", "name": "read"}]}]}

The model sees a function named mcp__files__read. If it calls this function, the client gets the
name "read" and the namespace "mcp__files", which together tell it what to run.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

_SEPARATOR = "__"
_TOP = "functions"  # the namespace of functions that are in no other


class _Member(NamedTuple):
    """A tool and its namespace, which is empty if the tool is in none."""

    namespace: str
    tool: dict[str, Any]


class ResponseTools:
    """The tools of one request.

    Attributes:
        chat_tools: the tools in the notation of /v1/chat/completions. Tools of types other than
            `function` are unchanged.
    """

    def __init__(self, tools: list[Any], items: list[dict[str, Any]]) -> None:
        self._members: dict[str, _Member] = {}  # by the function's name in the chat
        others = []
        for item in items:
            if item.get("type") == "additional_tools":
                tools = tools + objects_in(item.get("tools"))
        for member in _members(tools):
            if member.tool.get("type") == "function":
                name = chat_name(member.namespace, str(member.tool.get("name")))
                self._members[name] = member  # the latest, if it is sent again
            else:
                others.append(member.tool)
        functions = [_chat_tool(name, member.tool) for name, member in self._members.items()]
        self.chat_tools = functions + others

    def call_fields(self, name: str) -> dict[str, Any]:
        """Return the fields of a call that say which function is called.

        `name`: the function's name in the chat.
        """
        member = self._members.get(name)
        if member is None or not member.namespace:
            return {"name": name}
        return {"name": member.tool["name"], "namespace": member.namespace}


def chat_name(namespace: Any, name: str) -> str:
    """Return a function's name in the chat: ("mcp__files", "read") is "mcp__files__read"."""
    if not isinstance(namespace, str) or namespace in ("", _TOP):
        return name
    return f"{namespace.removesuffix(_SEPARATOR)}{_SEPARATOR}{name}"


def _members(tools: list[Any]) -> Iterator[_Member]:
    for tool in tools:
        if tool.get("type") == "namespace":
            for inner_tool in objects_in(tool.get("tools")):
                yield _Member(str(tool.get("name") or ""), inner_tool)
        else:
            yield _Member("", tool)


def objects_in(values: Any) -> list[dict[str, Any]]:
    """Return the JSON objects in `values`, which should be a list of objects; skip all else."""
    if not isinstance(values, list):
        return []
    return [value for value in values if isinstance(value, dict)]


def _chat_tool(name: str, tool: dict[str, Any]) -> dict[str, Any]:
    function = {key: value for key, value in tool.items() if key != "type"}
    if isinstance(function.get("name"), str):
        function["name"] = name
    return {"type": "function", "function": function}
