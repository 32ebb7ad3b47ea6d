"""The thread that a draft computes on: when a token is drawn it begins the next forward without being told.

What the loop does with a token - telling the target, asking its state machine what comes next - then happens while that
forward runs, not before it.  What the machine asks for next is nearly always what runs already; where it is not, the
forward is forgotten.  It is one that the draft would have begun in any case had the loop been a moment faster: nothing
is begun while a message waits to be read, or beyond what the target lets it draft.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from pearl.errors import DraftLost, TransportError
from pearl.protocol.events import Draft, Drafted, Rollback
from pearl.worker.execute import DraftExecutor, Event

_PATIENCE = 3.0  # seconds


class Ahead:
    """Carries out commands as `executor` does, whose only user it is. A context manager.

    Args:
        wanted: whether a forward that was not asked for may begin; called on the thread.
        execute: what it calls, where that is more than the executor's own `execute`.
    """

    def __init__(
        self,
        executor: DraftExecutor,
        wanted: Callable[[], bool],
        execute: Callable[[object], Event | None] | None = None,
    ) -> None:
        self._runner, self._execute, self._wanted = executor.runner, execute or executor.execute, wanted
        self._commands: SimpleQueue[object] = SimpleQueue()
        self._outcomes: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)
        self._thread.start()

    def execute(self, command: object) -> Event | None:
        """The event that answers `command`; what needs no answer is not waited for.

        Raises what its computation, or that of a command before it, has raised.
        """
        self._commands.put(command)
        if not isinstance(command, Draft):
            return None
        outcome: Event | BaseException | None = self._outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self) -> None:
        """Ends the thread, once what it computes is done; one that hangs is left to the end of the process."""
        self._commands.put(None)
        self._thread.join(_PATIENCE)

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        device = self._runner.device
        try:
            with torch.inference_mode():
                if device.type == "cuda":
                    # A stream of its own: what the loop does with a row must not wait for the forward after it.
                    with torch.cuda.stream(torch.cuda.Stream(device)):
                        self._serve()
                else:
                    self._serve()
        except BaseException as error:  # none that a command has raised: those are outcomes
            self._outcomes.put(error)

    def _serve(self) -> None:
        guess: Draft | None = None  # what was begun without being told, and what came of it
        outcome: Event | BaseException | None = None
        while (command := self._commands.get()) is not None:
            # A guess is forgotten with its failure, but not that ranks have lost each other over it.
            lasting = BaseException if guess is None else (DraftLost, TransportError)
            failed = isinstance(outcome, lasting)
            if not failed and (guess is None or not _same(command, guess)):
                outcome = self._attempt(command, guess)
            guess = None
            if isinstance(command, Draft):
                told, guess = outcome, self._next(command, outcome)
                self._outcomes.put(told)
                outcome = None if guess is None else self._attempt(guess)

    def _next(self, command: Draft, outcome: object) -> Draft | None:
        if not command.more or not isinstance(outcome, Drafted) or outcome.token is None or not self._wanted():
            return None
        return Draft(command.start + len(command.tokens), (outcome.token,), sample=True)

    def _attempt(self, command: object, forgotten: Draft | None = None) -> Event | BaseException | None:
        try:
            # Of a guess the state machine knows nothing: it rolls back what it has asked for, and only that.
            if forgotten is not None and not isinstance(command, Rollback):
                self._execute(Rollback(forgotten.start))
            return self._execute(command)
        except BaseException as error:
            return error


def _same(command: object, guess: Draft) -> bool:
    # field by field: this stands between two forwards
    return (
        isinstance(command, Draft)
        and command.sample
        and command.start == guess.start
        and command.tokens == guess.tokens
    )
