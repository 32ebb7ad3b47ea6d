"""Recordings that a front has the workers make, and reads while they are written."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path

from pearl.errors import TraceError
from pearl.protocol.messages import Message, Trace
from pearl.trace.recorder import asked_for, part_paths

_RECORD_SECONDS = 10.0  # for both workers to begin or end a recording


class Recording:
    """One recording at a time. Raises `TraceError` if it cannot begin or end.

    Args:
        post, wait_until: the client's, which puts the target's answers into `answer`.
        directory: the engine's, where the workers write their parts.
        is_taken: whether the workers already write a trace from start to end; then there can be no other.
    """

    def __init__(
        self,
        post: Callable[[Message], None],
        wait_until: Callable[[Callable[[], bool]], None],
        directory: Path,
        is_taken: bool,
    ) -> None:
        self._post = post
        self._wait_until = wait_until
        self._directory = directory
        self._is_taken = is_taken
        self._number = 0  # of the recording that runs
        self.answer: Trace | TraceError | None = None

    def stop(self) -> None:
        """End the recording, if one runs, and remove its parts."""
        if self._number:
            number = self._number
            self._number = 0
            self._abandon(number)

    def start(self) -> Path:
        """Begins a recording that is read while the workers write it (`pearl.trace.recorder.records_since`).

        Returns the path that names the workers' parts, which `stop` removes.
        """
        if self._is_taken or self._number:
            raise TraceError("this engine is recording a trace already")
        number = secrets.randbits(62) + 1
        try:
            self._request(Trace(number, True))
        except BaseException:
            self._abandon(number)  # it may have begun, or be about to
            raise
        self._number = number
        return asked_for(self._directory, number)

    def _abandon(self, number: int) -> None:
        self._post(Trace(number, False))
        for part in part_paths(asked_for(self._directory, number)):
            part.unlink(missing_ok=True)

    def _request(self, trace: Trace) -> None:
        """Returns once both workers have done it."""
        self.answer = None
        deadline = time.monotonic() + _RECORD_SECONDS
        self._post(trace)

        def is_done() -> bool:
            # A late echo of an abandoned request differs from `trace`.
            is_answered = self.answer == trace or isinstance(self.answer, TraceError)
            return is_answered or time.monotonic() > deadline

        self._wait_until(is_done)
        if isinstance(self.answer, TraceError):
            raise self.answer
        if self.answer != trace:
            raise TraceError(
                "the workers do not answer: one of them may be in a long forward. Try again"
            )
