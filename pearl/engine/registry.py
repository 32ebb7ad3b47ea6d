"""The card: a file in an engine's directory, by which the user's other processes find the engine.

The other processes can then list, use and stop the engine. Only the user who launched the engine
can read the engine's directory.
"""

import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pearl.transport.address import is_local, is_private, private_directories

_FILE = "engine.json"
ROLES = ("target", "draft")


class ModelPlace(NamedTuple):
    """A model's device and dtype."""

    device: str
    dtype: str


class Card(msgspec.Struct, frozen=True):
    """The contents of a card, in which an engine describes itself.

    Raises `ValueError` if `config` lacks a model, its device or its dtype.

    Attributes:
        pid, started: id and start time of the process that launched the engine. A later process
            with the same id has another start time.
        program: the command of that process, such as "pearl serve".
        address: where the target listens.
        config: the engine's settings, as JSON.
        places: role -> the device and dtype that the role's worker reported. The dtype is "" for a
            model without weights.
        directory: the directory from which the card was read; empty for a new card.
        age: seconds since the card was written; 0 for a new card.
    """

    pid: int
    started: int
    program: str
    address: str
    config: dict[str, Any]
    places: dict[str, dict[str, str]]
    directory: str = ""
    age: float = 0.0

    def __post_init__(self) -> None:
        for role in ROLES:
            for name in (role, f"{role}_device", f"{role}_dtype"):
                if not isinstance(self.config.get(name), str):
                    raise ValueError(f"config has no {name}")

    @property
    def alive(self) -> bool:
        return _started(self.pid) == self.started

    def place(self, role: str) -> ModelPlace:
        """Return the device and dtype that the worker reported.

        If the worker reported none, return the device and dtype of the settings.
        """
        reported = self.places.get(role, {})
        return ModelPlace(
            reported.get("device", self.config[f"{role}_device"]),
            reported.get("dtype", self.config[f"{role}_dtype"]),
        )

    @property
    def roles(self) -> list[str]:
        """The roles for which the engine has a model."""
        return [role for role in ROLES if self.config[role] != "none"]

    def to_json(self) -> dict[str, Any]:
        """Return the document that `pearl ps --json` prints."""
        document = {"pid": self.pid, "age_seconds": round(self.age, 1), "program": self.program}
        document |= {role: self.config[role] for role in ROLES}
        for role in self.roles:
            place = self.place(role)
            document[f"{role}_device"] = place.device
            document[f"{role}_dtype"] = place.dtype
        return document | {"directory": self.directory, "address": self.address}


def write_card(
    directory: Path, address: str, config: dict[str, Any], places: dict[str, dict[str, str]]
) -> None:
    """Write the card of an engine that this process has launched."""
    pid = os.getpid()
    card = Card(pid, _started(pid) or 0, _program(sys.argv), address, config, places)
    (directory / _FILE).write_bytes(msgspec.json.encode(card))


def read_card(directory: Path) -> Card | None:
    """Return the card in `directory`; None if the card is missing or cannot be used.

    A card cannot be used if it is damaged, or if another user could have written it. A card with an
    address on another machine cannot be used if its configuration names no keys.
    """
    path = directory / _FILE
    try:
        if not is_private(directory):
            return None
        age = max(0.0, time.time() - path.stat().st_mtime)
        card = msgspec.json.decode(path.read_bytes(), type=Card)
    except (OSError, ValueError, RecursionError):
        return None
    if not is_local(card.address) and not card.config.get("keys"):
        return None
    return msgspec.structs.replace(card, directory=str(directory), age=age)


def running_engines() -> list[Card]:
    """Return the cards of this user's running engines on this host, the newest first."""
    running = []
    for directory in private_directories():
        card = read_card(directory)
        if card is not None and card.alive:
            running.append(card)
    return running


def engines_named(name: str) -> list[Card]:
    """Return the cards of running engines that `name` names.

    `name` is the id of the process that launched them or, if there is no such process, the
    directory of one engine.
    """
    engines = [card for card in running_engines() if str(card.pid) == name]
    if not engines:
        card = read_card(Path(name))
        if card is not None and card.alive:
            engines.append(card)
    return engines


def stop(card: Card, seconds: float) -> bool:
    """Ask the process that launched the engine to end, by SIGTERM.

    Return whether it has ended within `seconds`.
    """
    try:
        process = os.pidfd_open(card.pid)
    except ProcessLookupError:
        return True
    try:
        # Checked after pidfd_open, because a pidfd never refers to a later process with this id.
        if not card.alive:
            return True
        signal.pidfd_send_signal(process, signal.SIGTERM)
        return bool(select.select([process], [], [], seconds)[0])
    finally:
        os.close(process)


def _program(arguments: list[str]) -> str:
    """Return the program's name. For PEARL's own program, append its command: "pearl serve"."""
    path = Path(arguments[0])
    name = path.parent.name if path.name == "__main__.py" else path.name
    if name == "pearl":
        return " ".join(["pearl", *arguments[1:2]])
    return "python" if name in ("", "-c") else name


def _started(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since boot; None if it has ended."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    is_zombie = fields[0] == "Z"
    return None if is_zombie else int(fields[19])
