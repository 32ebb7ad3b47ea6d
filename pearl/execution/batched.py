"""One forward for several requests, or one each where they cannot be computed together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from pearl.errors import ForwardError

log = logging.getLogger(__name__)

_Command = TypeVar("_Command")


def compute_together(
    commands: Sequence[_Command],
    together: Callable[[Sequence[_Command]], Sequence[object]],
    alone: Callable[[_Command], object],
) -> Sequence[object]:
    """The event that answers each command. If one of them fails, each is computed alone, so that no other fails too."""
    if len(commands) > 1:
        try:
            return together(commands)
        except ForwardError as error:
            log.info("%s; computing %d requests one by one", error, len(commands))
    return [alone(command) for command in commands]
