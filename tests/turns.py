"""Target and draft in one process, several requests at once: a forward serves all that are ready. Without a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pearl.execution.draft import DraftExecutor
from pearl.execution.target import TargetExecutor
from pearl.lab.simulate import Timing, known_speeds
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.drafter import Drafter
from pearl.protocol.events import Deliver, Draft, DraftJoined, End, Forward, Open, Send, Wait
from pearl.protocol.messages import Committed, Submit


class Turns:
    """Runs both sides in turns: each handles its events, and makes one forward for all requests that are ready.

    Attributes:
        tokens: committed, by request.

    Args:
        timing: what windows are chosen by.
        context: of the draft's model, tokens.
    """

    def __init__(
        self, target: TargetExecutor, draft: DraftExecutor, timing: Timing, slots: int, context: int = 1 << 20
    ) -> None:
        piece = target.runner.capabilities.prompt_piece
        self._machines = Coordinator(known_speeds(timing), slots, piece), Drafter(context, slots, piece)
        self._target, self._draft, self._joined = target, draft, DraftJoined(context)
        self._events: tuple[deque[object], deque[object]] = deque(), deque()
        self._todo: tuple[deque[object], deque[object]] = deque(), deque()
        self._left = 0
        self.tokens: dict[int, list[int]] = {}

    def run(self, submits: Sequence[Submit]) -> dict[int, list[int]]:
        """Serve all requests, submitted at once."""
        self._left = len(submits)
        self._events[0].extend([self._joined, *submits])
        while self._left:
            assert any((*self._events, *self._todo)), "both sides wait for ever"
            for side in (0, 1):
                self._turn(side)
        return self.tokens

    def _turn(self, side: int) -> None:
        todo, events, ready = self._todo[side], self._events[side], []
        while todo or events:
            if not todo:
                todo.extend(self._machines[side].handle(events.popleft()))
                continue
            if isinstance(todo[0], Open) and side and ready:  # another request may take their slot
                break
            match todo.popleft():
                case Send(message):
                    self._events[1 - side].append(message)
                case Deliver(Committed(request, _, tokens)):
                    self.tokens.setdefault(request, []).extend(tokens)
                case End():
                    self._left -= 1
                case Deliver() | Wait():
                    pass
                case Forward() | Draft() as command:
                    ready.append(command)
                case command:
                    event = (self._draft if side else self._target).execute(command)
                    if event is not None:
                        todo.extend(self._machines[side].handle(event))
        if ready:
            events.extend(self._draft.draft(ready) if side else self._target.forward(ready))
