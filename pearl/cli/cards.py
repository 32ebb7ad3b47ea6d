"""The running engines as a table, and the one that a user names."""

from __future__ import annotations

from collections.abc import Iterable

from pearl.engine.registry import Card, engines_named, running_engines
from pearl.errors import ConfigError

_HEADER = ("PID", "AGE", "TARGET", "DRAFT", "DEVICES", "PROGRAM", "DIRECTORY")


def table(cards: Iterable[Card]) -> str:
    """Return one line for each engine, below a header."""
    rows = [_HEADER]
    for card in cards:
        row = (
            str(card.pid),
            f"{card.age // 60:.0f} min",
            card.config["target"],
            card.config["draft"],
            " + ".join(card.place(role).device for role in card.roles),
            card.program,
            card.directory,
        )
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def find_card(name: str) -> Card:
    """Return a running engine. `name`: its directory or process id; empty: the only one.

    Raises `ConfigError` if there is none, or several match.
    """
    engines = engines_named(name) if name else running_engines()
    if len(engines) > 1:
        raise ConfigError(
            f"several engines are running, name one by its PID or directory:\n{table(engines)}"
        )
    if engines:
        return engines[0]
    if name:
        raise ConfigError(
            f"no running engine of yours is named {name}: give a PID or a directory of `pearl ps`"
        )
    raise ConfigError("no engine is running: start one with `pearl serve`")
