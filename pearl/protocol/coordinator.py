"""The target's side of the protocol: a state machine for each running request, and measured speeds.

`handle` takes an event and returns commands. `request_machine` decides what happens to one request;
`scheduler` decides which requests run.
"""

from pearl.errors import LocalProtocolError
from pearl.protocol.events import DraftGone, DraftJoined, End, Forwarded, Verifier
from pearl.protocol.messages import Cancel, DraftTokens, FinishReason, Resync, Submit
from pearl.protocol.request import Counts
from pearl.protocol.request_machine import WAITING, RequestMachine, State
from pearl.protocol.scheduler import Scheduler
from pearl.protocol.speeds import Speeds


class Coordinator:
    """Runs the state machines of all requests in the target.

    Args:
        verifier: judges draft tokens and draws tokens, with the logits of a request's last forward.
        speeds: forward times, acceptance rate and method auto's estimates, as measured so far.
        slots: how many requests run side by side.
        piece: how many prompt tokens are computed together; see `Capabilities.prompt_piece`.
    """

    def __init__(
        self, verifier: Verifier, speeds: Speeds | None = None, slots: int = 1, piece: int = 1
    ) -> None:
        self._verifier = verifier
        self.speeds = speeds or Speeds()
        self.draft_context = 0  # 0: no draft
        self.running: dict[int, RequestMachine] = {}
        self.scheduler = Scheduler(slots, piece)
        self.window = 0  # window length c that the last finished request used last
        self.stale = 0  # messages of the draft that were dropped because their request is over

    def handle(self, event: object) -> list[object]:
        """Handle one event; return the commands that it leads to, in order.

        An event concerns the request that it names, or all requests if it names none.

        Raises `LocalProtocolError` for an event that the request's state does not allow, and
        `RemoteProtocolError` for a message that the draft had no right to send. Either error leaves
        everything unchanged.
        """
        machine = self.running.get(getattr(event, "request", None))  # type: ignore[arg-type]
        if machine is not None and type(event) is not Submit:
            # First, because these events come between two forwards, where time matters.
            return self._pass(event, machine)
        match event:
            case Submit():
                self.scheduler.submit(event)
                return self._admit()
            case Cancel(request):
                if not self.scheduler.cancel(request):
                    return []
                return [End(request, FinishReason.CANCELLED, 0, Counts(), 0)]
            case DraftTokens() | Resync():
                self.stale += 1
                return []
            case DraftGone(request=int()):
                return []
            case DraftJoined() | DraftGone():
                return self._change_draft(event)
        raise LocalProtocolError(
            f"target in state {self.state.value} cannot take {event!r}: "
            f"running are {list(self.running) or 'no requests'}"
        )

    def _change_draft(self, event: DraftJoined | DraftGone) -> list[object]:
        self.draft_context = 0
        if isinstance(event, DraftJoined):
            self.draft_context = event.context
            if event.seconds:  # replaces the time of an earlier draft
                self.speeds.t_draft = event.seconds
        commands = []
        for machine in list(self.running.values()):
            commands += self._pass(event, machine)
        return commands

    def _pass(self, event: object, machine: RequestMachine) -> list[object]:
        """Give an event to a request's machine. If the request ends, begin waiting requests."""
        commands = machine.handle(event)
        if machine.state is State.IDLE:
            commands += self._release(machine)
        elif type(event) is not Forwarded and machine.draft.resyncs_too_often:
            gone = DraftGone("it was given the whole prefix too often", machine.request.number)
            commands += self._pass(gone, machine)
        return commands

    def _release(self, machine: RequestMachine) -> list[object]:
        del self.running[machine.request.number]
        self.window = machine.draft.window
        self.scheduler.release(machine.slot)
        return self._admit()

    def _admit(self) -> list[object]:
        """Begin waiting requests in the free slots."""
        commands = []
        while (admitted := self.scheduler.admit()) is not None:
            submit, slot = admitted
            machine = RequestMachine(
                submit,
                self.scheduler.sequences[slot],
                slot,
                self.speeds,
                self._verifier,
                self.draft_context,
                self.window,
                self.running,
            )
            self.running[submit.request] = machine
            commands += machine.handle(submit)
        return commands

    @property
    def waiting(self) -> dict[int, tuple[int, int]]:
        """The running requests that wait for draft tokens.

        Maps each request's number to (number of committed tokens, number of committed and pending
        tokens). Pending tokens are drafted and not judged yet.
        """
        lengths = {}
        for number, machine in self.running.items():
            if machine.state in WAITING:
                lengths[number] = (machine.sequence.committed, len(machine.sequence.tokens))
        return lengths

    @property
    def state(self) -> State:
        """The state of the request that began last; IDLE if none is running."""
        if not self.running:
            return State.IDLE
        return next(reversed(self.running.values())).state
