"""One forward for several requests, or one per request if they cannot be computed together."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from pearl.errors import ForwardError

log = logging.getLogger(__name__)

_Command = TypeVar("_Command")
_Event = TypeVar("_Event")


def compute_together(
    commands: Sequence[_Command],
    compute: Callable[[Sequence[_Command]], Sequence[_Event]],
    failed: Callable[[_Command, ForwardError], _Event],
) -> Sequence[_Event]:
    """Compute commands together in one forward; return the event that answers each.

    If that forward fails, each command is computed alone. So a command fails only if it cannot be
    computed even alone. `failed` makes the event for such a command.
    """
    if len(commands) > 1:
        try:
            return compute(commands)
        except ForwardError as error:
            log.info("%s; computing %d requests one by one", error, len(commands))
    events: list[_Event] = []
    for command in commands:
        try:
            events += compute([command])
        except ForwardError as error:
            events.append(failed(command, error))
    return events
