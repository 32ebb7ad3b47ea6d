"""The thread that a draft computes on, which starts forwards before they are requested.

Once a token is drawn, the thread starts the next forward. While that forward runs, the worker's
loop sends the token, and gets the next command from its state machine. Nearly always this command
asks for the forward that is running; otherwise that forward is discarded. No forward is started
early if a message waits to be read, or if the draft has reached the position up to which it may
draft.

On a GPU, forwards that are recorded as CUDA graphs are chained. The next forward is launched while
the one before still runs, and is fed a token that the host does not have yet. So the GPU does not
idle between them. The launch happens as late as possible, because it cannot be taken back. If
guesses or branches are expected to gain more than the waiting costs, the host waits for the token
instead, and feeds guesses or branches together with it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from pearl.drafting.step import Step
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import Event
from pearl.protocol.events import Draft, Drafted, Rollback

PATIENCE = 3.0  # seconds that `close` waits for the thread
LEAST_LEAD = 1e-4  # seconds by which a sleeping thread may wake too late
_LONGEST_NAP = 5e-4  # seconds
_UNKNOWN = Drafted((-1,))  # stands for a token that is not known yet; no token has the id -1

Outcome = Event | list[Drafted] | Step | BaseException | None


@dataclass(frozen=True)
class EarlyDraft:
    """A forward that was started before it was requested.

    Attributes:
        command: the command that the forward is expected to answer.
        outcome: the event that answers the command, or the exception that the forward raised. While
            the forward runs, it is the forward's `Step`.
    """

    command: Draft
    outcome: Outcome


class DraftThread:
    """Carries out a draft's commands in a thread, and starts forwards early.

    Args:
        executor: what carries out the commands; nobody else may use it.
        may_start: whether a forward may start before it is requested; called in the thread.
        prepare: called in the thread before anything else.
    """

    def __init__(
        self,
        executor: DraftExecutor,
        may_start: Callable[[], bool],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._executor = executor
        self._may_start = may_start
        self._prepare = prepare
        self._proposer = executor.proposer
        self._due = 0.0  # when the last launched forward is expected to be done
        self._took = 0.0  # seconds of the last forward of one token, its draw included
        self._lead = 0.0  # seconds before the end of one forward at which the next is launched
        self._commands: SimpleQueue[object] = SimpleQueue()
        self._outcomes: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="draft", daemon=True)
        self._thread.start()

    def execute(self, command: object) -> Event | None:
        """Carry out `command` and return the event that answers it.

        If the command needs no answer, return None without waiting for it. Raises the error of this
        command, or that of an earlier command that needed no answer.
        """
        self._commands.put(command)
        if isinstance(command, Draft):
            return self._answer()
        return None

    def draft(self, commands: Sequence[Draft]) -> list[Drafted]:
        """Carry out several commands in one forward; return the event that answers each.

        Raises the errors of `execute`.
        """
        if len(commands) == 1:
            self._commands.put(commands[0])
            return [self._answer()]
        self._commands.put(commands)
        return self._answer()

    def _answer(self) -> Any:
        outcome = self._outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self) -> None:
        """End the thread after its current forward.

        A thread that has not ended after 3 s is abandoned; it is a daemon, so it does not keep the
        process from ending.
        """
        self._commands.put(None)
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        device = self._proposer.device
        try:
            self._prepare()
            with torch.inference_mode():
                if device.type == "cuda":
                    # A stream of its own, so that copying a row to the host does not wait for the forward after it.
                    stream = torch.cuda.Stream(device)
                    # The model was made and measured on the default stream.
                    stream.wait_stream(torch.cuda.default_stream(device))
                    with torch.cuda.stream(stream):
                        self._serve()
                else:
                    self._serve()
        except BaseException as error:  # of the thread itself; errors of commands are outcomes
            self._outcomes.put(error)

    def _serve(self) -> None:
        """Carry out commands until `close`; between two commands a forward may be started early."""
        early = None
        failure = None  # the error of a command without an answer; the next command raises it
        while (command := self._commands.get()) is not None:
            if failure is not None:
                outcome: Outcome = failure
            elif early is not None and _same(command, early.command):
                outcome = early.outcome
            else:
                outcome = self._attempt(command, early)
            early = None
            failure = None
            if isinstance(command, Draft):
                early = self._answer_draft(command, outcome)
            elif isinstance(command, Sequence):
                # Start nothing early: the loop decides which requests come next.
                self._outcomes.put(outcome)
            elif isinstance(outcome, BaseException):
                failure = outcome

    def _answer_draft(self, command: Draft, outcome: Outcome) -> EarlyDraft | None:
        """Pass on the answer to `command`; return the forward that was started early, if any."""
        early = None
        if isinstance(outcome, Step):
            outcome, early = self._collect(command, outcome)
        following = None
        if early is None and isinstance(outcome, Drafted):
            following = _after(command, outcome)
        starts = following is not None and self._may_start()
        self._outcomes.put(outcome)
        if following is not None and starts:
            early = EarlyDraft(following, self._attempt(following))
        return early

    def _attempt(self, command: object, discarded: EarlyDraft | None = None) -> Outcome:
        """Return the outcome of `command`. First undo `discarded`, which was started early."""
        try:
            if discarded is not None and not _undoes(command, discarded.command):
                start = discarded.command.start
                self._executor.execute(Rollback(start, request=discarded.command.request))
            if isinstance(command, Draft) and self._is_chained(command):
                return self._launch(command)
            if isinstance(command, Sequence):
                return self._executor.draft(command)
            return self._executor.execute(command)
        except BaseException as error:
            return error

    # ---- chained ----

    def _is_chained(self, command: Draft) -> bool:
        return command.budget > 0 and self._proposer.chained(command.request)

    def _launch(self, command: Draft, previous: Step | None = None) -> Step:
        began = time.monotonic()
        launched = self._proposer.launch(command, previous)
        now = time.monotonic()
        if launched.following is not None:  # otherwise the launch has waited for the device
            self._lead = LEAST_LEAD + 2 * (now - began)
        self._due = max(self._due, now) + self._took
        return launched

    def _collect(
        self, command: Draft, launched: Step
    ) -> tuple[Drafted | BaseException, EarlyDraft | None]:
        """Return the event that answers `command`, and the next forward if it was launched."""
        early = self._launch_next(command, launched)
        try:
            drafted = self._proposer.collect(launched)
        except BaseException as error:
            return error, early
        if len(command.tokens) == 1 and launched.following is not None:
            self._took = drafted.seconds + drafted.draw
        self._due = time.monotonic()
        if early is not None:
            self._due += self._took
            following = _after(command, drafted)
            if following is not None:
                early = EarlyDraft(following, early.outcome)
        return drafted, early

    def _launch_next(self, command: Draft, launched: Step) -> EarlyDraft | None:
        """Wait until `launched` has almost ended; then launch the next forward, and return it.

        Return None if no forward may follow, or if it pays to wait for the token of `launched`.
        """
        if command.budget <= 1 or launched.following is None:
            return None
        if self._proposer.awaits(command, self._lead):
            return None
        self._wait_until_late(launched)
        if not self._may_start():
            return None
        following = _after(command, _UNKNOWN)
        assert following is not None
        try:
            return EarlyDraft(following, self._launch(following, launched))
        except BaseException as error:
            return EarlyDraft(following, error)

    def _wait_until_late(self, launched: Step) -> None:
        """Sleep until shortly before the forward is expected to end: `self._lead` seconds before.

        Sleep in short naps, because the forward may end earlier than expected.
        """
        latest = self._due - self._lead
        while not launched.done and time.monotonic() < latest:
            time.sleep(min(max(0.0, latest - time.monotonic()), _LONGEST_NAP))


def _after(command: Draft, drafted: Drafted) -> Draft | None:
    """Return the command that the state machine will issue next, unless a message comes.

    Return None if drafting pauses, or if the command's budget of tokens to propose is used up.
    """
    budget = command.budget - len(drafted.tokens)
    if not drafted.tokens or budget <= 0 or drafted.paused:
        return None
    start = command.start + len(command.tokens) + drafted.cached
    pending = command.pending + len(drafted.tokens)
    return Draft(start, drafted.tokens[drafted.cached :], budget, pending, request=command.request)


def _undoes(command: object, discarded: Draft) -> bool:
    """Return whether `command` is a rollback of the request that `discarded` is for.

    Such a rollback undoes the forward that was started early for `discarded`. No other rollback is
    needed then.
    """
    return isinstance(command, Rollback) and command.request == discarded.request


def _same(command: object, early: Draft) -> bool:
    """Return whether the same forward answers both commands.

    The commands may differ in `budget`, the number of tokens that may be proposed. The budget grows
    when a message allows the draft to go further.
    """
    # Field by field, because comparing whole commands costs time between two forwards.
    return (
        isinstance(command, Draft)
        and command.budget > 0
        and command.start == early.start
        and command.tokens == early.tokens
        and command.request == early.request
    )
