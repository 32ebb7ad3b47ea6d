"""The target's side of the protocol: a state machine for each request, slots for them, and what outlives them.

Events in (`handle`), commands out.  `request_machine` has what happens to one request.
"""

from __future__ import annotations

from pearl.errors import LocalProtocolError
from pearl.protocol.events import DraftGone, DraftJoined, End
from pearl.protocol.messages import Cancel, DraftTokens, FinishReason, Resync, Submit
from pearl.protocol.request import Counts
from pearl.protocol.request_machine import RequestMachine, State
from pearl.protocol.scheduler import Scheduler
from pearl.protocol.sequence import TokenSequence
from pearl.protocol.window import Speeds


class Coordinator:
    """The target: a machine for each request that is worked on, and what outlives them.

    Args:
        speeds: forward times, acceptance and whether the draft pays, as known so far.
        slots: how many requests are worked on side by side.
        piece: see `Capabilities.prompt_piece`.
    """

    def __init__(self, speeds: Speeds | None = None, slots: int = 1, piece: int = 1) -> None:
        self.speeds, self.piece = speeds or Speeds(), piece
        self.draft_context = 0  # 0: no draft
        self.running: dict[int, RequestMachine] = {}
        self._scheduler = Scheduler(slots, piece)
        self._last: RequestMachine | None = None  # begun last

    def handle(self, event: object) -> list[object]:
        """Take one event, for the request that it names or for all; return the commands it leads to, in order.

        Raises `LocalProtocolError` for an event that the request's state does not allow, and `RemoteProtocolError` for
        a message that the draft had no right to send; nothing has changed then.
        """
        machine = self.running.get(getattr(event, "request", None))  # type: ignore[arg-type]
        if machine is not None and type(event) is not Submit:  # first: it stands between two forwards
            commands = machine.handle(event)
            return commands + self._go_on() if machine.has_ended else commands
        match event:
            case Submit():
                self._scheduler.submit(event)
                return self._go_on()
            case Cancel(request):
                is_waiting = self._scheduler.cancel(request)
                return [End(request, FinishReason.CANCELLED, 0, Counts(), 0)] if is_waiting else []
            case DraftTokens() | Resync():
                self.counts.stale += 1
                return []
            case DraftGone(request=int()):
                return []
            case DraftJoined() | DraftGone():
                return self._draft_changed(event) + self._go_on()
        raise LocalProtocolError(
            f"target in state {self.state.value} (epoch {self.epoch}) cannot take {event!r}: "
            f"it works on {list(self.running) or 'no request'}"
        )

    def _draft_changed(self, event: DraftJoined | DraftGone) -> list[object]:
        self.draft_context = 0
        if isinstance(event, DraftJoined):
            self.draft_context = event.context
            self.speeds.t_draft = event.seconds or self.speeds.t_draft  # its predecessor's says nothing of it
        return [command for machine in list(self.running.values()) for command in machine.handle(event)]

    def _go_on(self) -> list[object]:
        """Give the slots of requests that have ended to those that wait."""
        commands: list[object] = []
        for number, machine in list(self.running.items()):
            if machine.has_ended:
                del self.running[number]
                self._scheduler.release(machine.slot)
        while (admitted := self._scheduler.admit()) is not None:
            submit, slot = admitted
            sequence = self._scheduler.sequences[slot]
            known = self.speeds, self.draft_context, self.window
            self._last = RequestMachine(submit, sequence, slot, *known, self.running)
            self.running[submit.request] = self._last
            commands += self._last.handle(submit)
        return commands

    @property
    def waiting(self) -> list[int]:
        """Requests that wait for the draft's tokens."""
        return [number for number, machine in self.running.items() if machine.state in (State.HELD, State.GATHERING)]

    @property
    def reached(self) -> dict[int, tuple[int, int]]:
        """Of these each: its tokens that are committed, and those that are pending too."""
        texts = ((number, self.running[number].sequence) for number in self.waiting)
        return {number: (text.committed, len(text.tokens)) for number, text in texts}

    # ---- snapshots, of the request that is worked on, or was last ----

    @property
    def state(self) -> State:
        return self._last.state if self._last else State.IDLE

    @property
    def request(self) -> Submit | None:
        """None where no request is worked on."""
        return self._last.submit if self._last and not self._last.has_ended else None

    @property
    def sequence(self) -> TokenSequence:
        return self._last.sequence if self._last else self._scheduler.sequences[0]

    @property
    def counts(self) -> Counts:
        return self._last.counts if self._last else Counts()

    @property
    def epoch(self) -> int:
        return self._last.epoch if self._last else 0

    @property
    def window(self) -> int:
        """c as last used."""
        return self._last.request.window if self._last else 0
