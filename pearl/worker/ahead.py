"""The thread that a draft computes on: when a token is drawn it begins the next forward without being told.

What the loop does with a token - telling the target, asking its state machine what comes next - then happens while that
forward runs, not before it.  What the machine asks for next is nearly always what runs already; where it is not, the
forward is forgotten.  It is one that the draft would have begun in any case had the loop been a moment faster: nothing
is begun while a message waits to be read, or beyond what the target lets it draft.

On a GPU recorded forwards are chained: the next one is launched while one still runs, fed a token that the host does
not know yet, so that the GPU goes on at once.  It is launched late, for what is launched cannot be taken back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from pearl.drafting.proposer import Launched
from pearl.errors import DraftLost, TransportError
from pearl.protocol.events import Draft, Drafted, Rollback
from pearl.worker.execute import DraftExecutor, Event

_PATIENCE = 3.0  # seconds
_LEAST_LEAD = 1e-4  # seconds: a thread that slept may wake so late
_LONGEST_NAP = 5e-4  # seconds
_UNKNOWN = Drafted((-1,))  # a token that nobody knows yet; no command has it


class Ahead:
    """Carries out commands as `executor` does, whose only user it is. A context manager.

    Args:
        wanted: whether a forward that was not asked for may begin; called on the thread.
        computed: called on the thread with each event, as soon as it is there.
    """

    def __init__(
        self,
        executor: DraftExecutor,
        wanted: Callable[[], bool],
        computed: Callable[[object], None] = lambda event: None,
    ) -> None:
        self._executor, self._wanted, self._computed = executor, wanted, computed
        self._proposer = executor.proposer
        self._due = 0.0  # when what was launched last will be done, as far as one can tell
        self._took = 0.0  # seconds, the last forward of one token and its draw
        self._lead = 0.0  # seconds before the end of one forward at which the next is launched
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
        device = self._proposer.device
        try:
            with torch.inference_mode():
                if device.type == "cuda":
                    # A stream of its own: what the loop does with a row must not wait for the forward after it.
                    stream = torch.cuda.Stream(device)
                    stream.wait_stream(torch.cuda.default_stream(device))  # where the model was made and measured
                    with torch.cuda.stream(stream):
                        self._serve()
                else:
                    self._serve()
        except BaseException as error:  # none that a command has raised: those are outcomes
            self._outcomes.put(error)

    def _serve(self) -> None:
        guess: Draft | None = None  # what was begun without being told, and what came of it
        outcome: Event | _Begun | BaseException | None = None
        while (command := self._commands.get()) is not None:
            # A guess is forgotten with its failure, but not that ranks have lost each other over it.
            lasting = BaseException if guess is None else (DraftLost, TransportError)
            failed = isinstance(outcome, lasting)
            if not failed and (guess is None or not _same(command, guess)):
                outcome = self._attempt(command, guess)
            guess = None
            if isinstance(command, Draft):
                if isinstance(outcome, _Begun):
                    told, guess, outcome = self._collect(command, outcome.launched)
                    self._outcomes.put(told)
                else:
                    guess = self._next(command, outcome)
                    self._outcomes.put(outcome)
                    outcome = None if guess is None else self._attempt(guess)

    def _next(self, command: Draft, outcome: object) -> Draft | None:
        guess = _after(command, outcome) if isinstance(outcome, Drafted) else None
        return guess if guess is not None and self._wanted() else None

    def _attempt(self, command: object, forgotten: Draft | None = None) -> Event | _Begun | BaseException | None:
        try:
            # Of a guess the state machine knows nothing: it rolls back what it has asked for, and only that.
            if forgotten is not None and not isinstance(command, Rollback):
                self._executor.execute(Rollback(forgotten.start, request=forgotten.request))
            if self._proposer.chains and isinstance(command, Draft) and command.budget:
                return _Begun(self._launch(command))
            event = self._executor.execute(command)
            self._computed(event)
        except BaseException as error:
            return error
        return event

    # ---- chained ----

    def _launch(self, command: Draft, after: Launched | None = None) -> Launched:
        began = time.monotonic()
        launched = self._proposer.launch(command, after)
        now = time.monotonic()
        self._lead = _LEAST_LEAD + 2 * (now - began)
        self._due = max(self._due, now) + self._took
        return launched

    def _collect(
        self, command: Draft, launched: Launched
    ) -> tuple[Event | BaseException, Draft | None, _Begun | BaseException | None]:
        """What came of `command`; and what was begun before that was known, with what came of that."""
        guess: Draft | None = None
        following: _Begun | BaseException | None = None
        if command.budget > 1:
            self._wait_until_late(launched)
            if self._wanted():
                guess = _after(command, _UNKNOWN)
                assert guess is not None
                try:
                    following = _Begun(self._launch(guess, launched))
                except BaseException as error:
                    following = error
        try:
            drafted = self._proposer.collect(launched)
        except BaseException as error:
            return error, guess, following
        if len(command.tokens) == 1:
            self._took = drafted.seconds + drafted.draw
        self._due = time.monotonic() + (self._took if guess else 0.0)
        self._computed(drafted)
        if guess is not None and (known := _after(command, drafted)) is not None:
            guess = known
        return drafted, guess, following

    def _wait_until_late(self, launched: Launched) -> None:
        """In short naps: one that is done early, or was measured on a bad day, is not waited out."""
        while (left := self._due - self._lead - time.monotonic()) > 0 and not launched.done:
            time.sleep(min(left, _LONGEST_NAP))


@dataclass(frozen=True, slots=True)
class _Begun:
    """What was launched and is not collected yet."""

    launched: Launched


def _after(command: Draft, drafted: Drafted) -> Draft | None:
    """What the state machine asks for next, as things stand; None where that is nothing."""
    budget = command.budget - len(drafted.tokens)
    if not drafted.tokens or budget <= 0 or drafted.paused:
        return None
    start = command.start + len(command.tokens) + drafted.cached
    pending = command.pending + len(drafted.tokens)
    return Draft(start, drafted.tokens[drafted.cached :], budget, pending, request=command.request)


def _same(command: object, guess: Draft) -> bool:
    """Whether one forward answers both. What the bound allows beyond it may have grown meanwhile."""
    # field by field: this stands between two forwards
    return (
        isinstance(command, Draft)
        and command.budget > 0
        and command.start == guess.start
        and command.tokens == guess.tokens
        and command.request == guess.request
    )
