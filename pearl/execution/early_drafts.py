"""The thread that a draft computes on: once a token is drawn it starts the next forward without waiting for the loop.

The loop then sends the token and gets the next command of its state machine while that forward runs. It is nearly
always the forward that is running; if not, the running one is discarded. No forward is started early while a message
waits to be read, or past the position up to which the draft may draft.

On a GPU recorded forwards are chained: the next one is launched while one still runs, fed a token that the host does
not have yet, so that the GPU goes on at once. It is launched late, as a launch cannot be taken back. Where guesses or
branches are expected to gain more than the wait costs, the token is awaited instead, and fed together with them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from pearl.drafting.step import Step
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import Event
from pearl.protocol.events import Draft, Drafted, Rollback

_PATIENCE = 3.0  # seconds
_LEAST_LEAD = 1e-4  # seconds: a thread that slept may wake so late
_LONGEST_NAP = 5e-4  # seconds
_UNKNOWN = Drafted((-1,))  # a token that nobody knows yet; no command has it


class Ahead:
    """Carries out commands in its thread, with an executor that nobody else uses, until `close`.

    Args:
        wanted: whether a forward may start before it is requested; called in the thread.
        begins: called in the thread before anything else.
    """

    def __init__(
        self,
        executor: DraftExecutor,
        wanted: Callable[[], bool],
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        self._executor = executor
        self._wanted = wanted
        self._begins = begins
        self._proposer = executor.proposer
        self._due = 0.0  # when the last launched forward should be done
        self._took = 0.0  # seconds, the last forward of one token and its draw
        self._lead = 0.0  # seconds before the end of one forward at which the next is launched
        self._commands: SimpleQueue[object] = SimpleQueue()
        self._outcomes: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)
        self._thread.start()

    def execute(self, command: object) -> Event | None:
        """The event that answers `command`; None at once for a command without an answer.

        Raises what this command, or an unanswered one before it, has raised.
        """
        self._commands.put(command)
        return self._answer() if isinstance(command, Draft) else None

    def draft(self, commands: Sequence[Draft]) -> list[Drafted]:
        """Carry out several at once; the event that answers each. Raises as `execute`."""
        self._commands.put(commands)
        return self._answer()

    def _answer(self) -> Any:
        outcome = self._outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self) -> None:
        """End the thread after its current forward; a thread that hangs is abandoned after 3 s (it is a daemon)."""
        self._commands.put(None)
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        device = self._proposer.device
        try:
            self._begins()
            with torch.inference_mode():
                if device.type == "cuda":
                    # A stream of its own, so that copying a row to the host does not wait for the forward after it.
                    stream = torch.cuda.Stream(device)
                    stream.wait_stream(
                        torch.cuda.default_stream(device)
                    )  # where the model was made and measured
                    with torch.cuda.stream(stream):
                        self._serve()
                else:
                    self._serve()
        except BaseException as error:  # of the thread itself; errors of commands are outcomes
            self._outcomes.put(error)

    def _serve(self) -> None:
        guess: Draft | None = (
            None  # a forward started before it was requested; `outcome` is its result
        )
        outcome: Event | list[Drafted] | Step | BaseException | None = None
        while (command := self._commands.get()) is not None:
            failed = guess is None and isinstance(
                outcome, BaseException
            )  # a guess's error is discarded with it
            if not failed and (guess is None or not _same(command, guess)):
                outcome = self._attempt(command, guess)
            guess = None
            if isinstance(command, Draft):
                answer = outcome
                following = None
                if isinstance(outcome, Step):
                    answer, guess, following = self._collect(command, outcome)
                if guess is None:
                    guess = self._next(command, answer)
                    self._outcomes.put(answer)
                    outcome = None if guess is None else self._attempt(guess)
                else:
                    self._outcomes.put(answer)
                    outcome = following
            elif isinstance(
                command, Sequence
            ):  # start nothing early: the loop decides which requests come next
                self._outcomes.put(outcome)
                outcome = None

    def _next(self, command: Draft, outcome: object) -> Draft | None:
        guess = _after(command, outcome) if isinstance(outcome, Drafted) else None
        return guess if guess is not None and self._wanted() else None

    def _attempt(
        self, command: object, forgotten: Draft | None = None
    ) -> Event | list[Drafted] | Step | BaseException | None:
        try:
            # Rollbacks of the state machine, which does not know the guess, do not undo it.
            undoes = (
                isinstance(command, Rollback)
                and forgotten is not None
                and command.request == forgotten.request
            )
            if forgotten is not None and not undoes:
                self._executor.execute(Rollback(forgotten.start, request=forgotten.request))
            if (
                isinstance(command, Draft)
                and command.budget
                and self._proposer.chained(command.request)
            ):
                return self._launch(command)
            if isinstance(command, Sequence):
                return self._executor.draft(command)
            return self._executor.execute(command)
        except BaseException as error:
            return error

    # ---- chained ----

    def _launch(self, command: Draft, after: Step | None = None) -> Step:
        began = time.monotonic()
        launched = self._proposer.launch(command, after)
        now = time.monotonic()
        if launched.following is not None:  # else the launch has waited for the device
            self._lead = _LEAST_LEAD + 2 * (now - began)
        self._due = max(self._due, now) + self._took
        return launched

    def _collect(
        self, command: Draft, launched: Step
    ) -> tuple[Event | BaseException, Draft | None, Step | BaseException | None]:
        """The event of `command`, and the forward that was launched before it was known, with its outcome."""
        guess: Draft | None = None
        following: Step | BaseException | None = None
        if (
            command.budget > 1
            and launched.following is not None
            and not self._proposer.awaits(command, self._lead)
        ):
            self._wait_until_late(launched)
            if self._wanted():
                guess = _after(command, _UNKNOWN)
                assert guess is not None
                try:
                    following = self._launch(guess, launched)
                except BaseException as error:
                    following = error
        try:
            drafted = self._proposer.collect(launched)
        except BaseException as error:
            return error, guess, following
        if len(command.tokens) == 1 and launched.following is not None:
            self._took = drafted.seconds + drafted.draw
        self._due = time.monotonic() + (self._took if guess else 0.0)
        if guess is not None and (known := _after(command, drafted)) is not None:
            guess = known
        return drafted, guess, following

    def _wait_until_late(self, launched: Step) -> None:
        """Sleep until `_lead` seconds before the forward should end, in naps, in case it ends earlier."""
        while (left := self._due - self._lead - time.monotonic()) > 0 and not launched.done:
            time.sleep(min(left, _LONGEST_NAP))


def _after(command: Draft, drafted: Drafted) -> Draft | None:
    """The command that follows unless a message changes that; None if drafting pauses."""
    budget = command.budget - len(drafted.tokens)
    if not drafted.tokens or budget <= 0 or drafted.paused:
        return None
    start = command.start + len(command.tokens) + drafted.cached
    pending = command.pending + len(drafted.tokens)
    return Draft(start, drafted.tokens[drafted.cached :], budget, pending, request=command.request)


def _same(command: object, guess: Draft) -> bool:
    """Whether one forward answers both. Their budgets may differ, as the bound may have grown."""
    # Field by field, because comparing whole commands costs time between two forwards.
    return (
        isinstance(command, Draft)
        and command.budget > 0
        and command.start == guess.start
        and command.tokens == guess.tokens
        and command.request == guess.request
    )
