"""The card in an engine's private directory, by which the user's other processes find, list and stop the engine.

A user who can read that directory may use the engine; others cannot reach it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from pearl.errors import ConfigError
from pearl.transport.address import is_local, is_private, private_directories

_FILE = "engine.json"
_HEADER = ("PID", "AGE", "TARGET", "DRAFT", "DEVICES", "PROGRAM", "DIRECTORY")


class Card(msgspec.Struct, frozen=True):
    """What an engine reports of itself.

    Attributes:
        pid, started: the process that holds the engine; a later process with the same id has another start time.
        program: what that process runs, such as "pearl serve".
        address: where the engine listens.
        config: its settings, as JSON.
        places: role -> device and dtype ("" for a model without weights) as reported by its worker, if known.
        directory, age: where the card is, and seconds since the engine was ready; of a card that was read.
    """

    pid: int
    started: int
    program: str
    address: str
    config: dict[str, Any]
    places: dict[str, dict[str, str]]
    directory: str = ""
    age: float = 0.0

    @property
    def alive(self) -> bool:
        return _started(self.pid) == self.started

    def place(self, role: str) -> tuple[str, str]:
        """Device and dtype of a model: those that its worker reported, otherwise the settings."""
        found = {
            what: str(self.config[f"{role}_{what}"]) for what in ("device", "dtype")
        } | self.places.get(role, {})
        return found["device"], found["dtype"]

    @property
    def roles(self) -> list[str]:
        """The roles that have a model."""
        return [role for role in ("target", "draft") if self.config[role] != "none"]

    def to_json(self) -> dict[str, Any]:
        """The document that `pearl ps --json` prints."""
        document = {"pid": self.pid, "age_seconds": round(self.age, 1), "program": self.program}
        document |= {role: self.config[role] for role in ("target", "draft")}
        for role in self.roles:
            document[f"{role}_device"], document[f"{role}_dtype"] = self.place(role)
        return document | {"directory": self.directory, "address": self.address}


def write_card(
    directory: Path, address: str, config: dict[str, Any], places: dict[str, dict[str, str]]
) -> None:
    """Write the card of an engine that this process holds."""
    pid = os.getpid()
    card = Card(pid, _started(pid) or 0, _program(sys.argv), address, config, places)
    (directory / _FILE).write_bytes(msgspec.json.encode(card))


def read_card(directory: Path) -> Card | None:
    """The card there. None if there is no valid one, another user could have written it, or its address is on another
    machine without keys.
    """
    path = directory / _FILE
    try:
        if not is_private(directory):
            return None
        age = max(0.0, time.time() - path.stat().st_mtime)
        card = msgspec.json.decode(path.read_bytes(), type=Card)
        card = msgspec.structs.replace(card, directory=str(directory), age=age)
        card.to_json()  # fails here rather than later
        table([card])
    except (OSError, ValueError, KeyError, RecursionError):
        return None
    return card if is_local(card.address) or card.config.get("keys") else None


def running_engines() -> list[Card]:
    """This user's engines on this host, newest first."""
    return [
        card
        for each in private_directories()
        if (card := read_card(each)) is not None and card.alive
    ]


def find_card(name: str) -> Card:
    """A running engine. `name`: its directory or process id; empty: the only one.

    Raises `ConfigError` if there is none, or several match.
    """
    running = running_engines()
    if name:
        of_pid = [card for card in running if str(card.pid) == name]
        here = read_card(Path(name))
        found = of_pid or ([here] if here is not None and here.alive else [])
        if not found:
            raise ConfigError(
                f"no running engine of yours is named {name}: give a PID or a directory of `pearl ps`"
            )
        running = found
    if not running:
        raise ConfigError("no engine is running: start one with `pearl serve`")
    if len(running) > 1:
        raise ConfigError(
            f"several engines are running, name one by its PID or directory:\n{table(running)}"
        )
    return running[0]


def stop(card: Card, seconds: float) -> bool:
    """Ask the process that holds the engine to end (SIGTERM). Return whether it has ended within `seconds`."""
    try:
        process = os.pidfd_open(card.pid)
    except ProcessLookupError:
        return True
    try:
        if not card.alive:  # checked now that `process` cannot become another one
            return True
        signal.pidfd_send_signal(process, signal.SIGTERM)
        return bool(select.select([process], [], [], seconds)[0])
    finally:
        os.close(process)


def table(cards: Iterable[Card]) -> str:
    """One line for each engine, below a header."""
    rows = [_HEADER]
    for card in cards:
        devices = " + ".join(card.place(role)[0] for role in card.roles)
        models = (str(card.config["target"]), str(card.config["draft"]))
        rows.append(
            (
                str(card.pid),
                f"{card.age // 60:.0f} min",
                *models,
                devices,
                card.program,
                card.directory,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _program(arguments: list[str]) -> str:
    """The name of the program, with the command if it is ours."""
    path = Path(arguments[0])
    name = path.parent.name if path.name == "__main__.py" else path.name
    if name == "pearl":
        return " ".join([name, *arguments[1:2]])
    return "python" if name in ("", "-c") else name


def _started(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it has ended."""
    try:
        state, *fields = Path("/proc", str(pid), "stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(fields[18])
