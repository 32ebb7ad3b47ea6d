"""Carries out those commands of the draft's state machine that compute something."""

from collections.abc import Sequence

from pearl.drafting.proposer import ModelProposer
from pearl.drafting.step import Step
from pearl.errors import NumericalError
from pearl.execution.target import Event
from pearl.protocol.events import Draft, Drafted, Open, Rollback
from pearl.protocol.messages import HiddenStates


class DraftExecutor:
    """Carries out the commands of a `Drafter` with a `ModelProposer`."""

    def __init__(self, proposer: ModelProposer) -> None:
        self.proposer = proposer

    def execute(self, command: object) -> Event | None:
        """Carry out `command`; return the event that answers it, or None if it needs no answer."""
        match command:
            case Open():
                self.proposer.open(command)
            case Rollback(length):
                self.proposer.rollback(length, command.request)
            case HiddenStates():
                self.proposer.see(command)
            case Draft():
                return self._collect(self.proposer.launch(command))
            case _:
                raise AssertionError(command)
        return None

    def draft(self, commands: Sequence[Draft]) -> list[Drafted]:
        """Compute one forward for several requests; return the event that answers each command."""
        return list(map(self._collect, self.proposer.launch_together(commands)))

    def _collect(self, launched: Step) -> Drafted:
        try:
            return self.proposer.collect(launched)
        except NumericalError as error:  # concerns only this request
            return Drafted(failure=str(error), request=launched.command.request)
