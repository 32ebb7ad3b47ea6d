"""The state diagrams, drawn from the tables: `python -m pearl.protocol.diagram` prints what the README shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pearl.protocol import drafter, request_machine


def mermaid(table: Mapping[Any, Mapping[type, frozenset[Any]]]) -> str:
    """A Mermaid state diagram: an arrow for each event that leads from one state to another (or back to itself)."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for state, events in table.items():
        for event, followers in events.items():
            for follower in sorted(followers, key=list(table).index):
                arrows.setdefault((state.name, follower.name), []).append(event.__name__)
    first = next(iter(table)).name
    lines = ["stateDiagram-v2", f"    [*] --> {first}"]
    lines += [f"    {a} --> {b}: {', '.join(events)}" for (a, b), events in arrows.items()]
    return "\n".join(lines)


def section() -> str:
    """Both diagrams as the README's Markdown."""
    parts = (("The target", request_machine.TRANSITIONS), ("The draft", drafter.TRANSITIONS))
    return "\n\n".join(f"{title}:\n\n```mermaid\n{mermaid(table)}\n```" for title, table in parts)


if __name__ == "__main__":
    print(section())
