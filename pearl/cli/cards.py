"""Prints the running engines as a table, and finds the engine that a user names."""

from collections.abc import Iterable

from pearl.engine.registry import Card, engines_named, running_engines
from pearl.errors import ConfigError

_HEADER = ("PID", "AGE", "TARGET", "DRAFT", "DEVICES", "PROGRAM", "DIRECTORY")


def table(cards: Iterable[Card]) -> str:
    """Return a table with a line for each engine, below a header."""
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
    """Return the running engine that `name` names: its directory, or its process id.

    An empty `name` stands for the only running engine. Raises `ConfigError` if no engine or several
    match.
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
