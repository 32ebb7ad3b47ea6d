"""Base of the state machines, which are tables of allowed events and of the states that may follow.

An event that a machine's table does not allow raises an error, which lists the last transitions.
The machine is then unchanged.
"""

from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, ClassVar, TypeVar

from pearl.errors import LocalProtocolError

Do = Callable[[object], None]  # takes a command
States = TypeVar("States", bound=Enum)
Table = Mapping[
    States, Mapping[type, frozenset[States]]
]  # state -> event -> the states that may follow

_STORY = 12  # transitions in an error message


class Machine:
    """A state machine. `handle(event)` returns the commands that the event leads to, in order.

    A subclass defines `role`, `transitions`, `handlers`, `state`, `epoch` and `anytime`. The events
    in `anytime` are legal in every state, but change the state only where `transitions` lists them.
    """

    role: ClassVar[str]
    transitions: ClassVar[Table[Any]]
    anytime: ClassVar[tuple[type, ...]]
    handlers: ClassVar[Mapping[type, Callable[..., None]]]

    state: Any
    epoch: int

    def __init__(self) -> None:
        self._story: deque[tuple[Enum, type, Enum]] = deque(maxlen=_STORY)

    def handle(self, event: object) -> list[object]:
        """Handle one event; return the commands that it leads to, in order.

        Raises `LocalProtocolError` for an event that the state does not allow, and
        `RemoteProtocolError` for a message that the peer had no right to send. Either error leaves
        the machine unchanged.
        """
        kind = type(event)
        before = self.state
        allowed = self.transitions[before].get(kind)
        if allowed is None and kind not in self.anytime:
            raise LocalProtocolError(
                f"{self.role} in state {before.value} (epoch {self.epoch}) cannot take {event!r}; before: {self.story}"
            )
        commands: list[object] = []
        self.handlers[kind](self, event, commands.append)
        assert self.state is before or self.state in (allowed or ()), (
            self.role,
            event,
            self.state,
            self.story,
        )
        self._story.append((before, kind, self.state))
        return commands

    @property
    def story(self) -> str:
        """The last transitions, oldest first, such as "idle -Begin-> drafting, drafting -..."."""
        steps = []
        for state, event, next_state in self._story:
            steps.append(f"{state.value} -{event.__name__}-> {next_state.value}")
        return ", ".join(steps) or "nothing"
