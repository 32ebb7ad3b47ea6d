"""Trace recordings, which the user's process starts, and reads while the workers write them."""

import secrets
import time
from collections.abc import Callable
from pathlib import Path

from pearl.errors import TraceError
from pearl.protocol.messages import Message, Trace
from pearl.trace.recorder import asked_for, part_paths

_RECORD_SECONDS = 10.0  # longest wait for both workers to begin or end a recording


class Recording:
    """Starts and stops recordings, one at a time. Raises `TraceError` if a recording cannot begin or end.

    Args:
        post, wait_until: these methods of the `Client`. The client puts the target's answers into
            `answer`.
        directory: the engine's directory. Each worker writes its part of the recording to a file in
            this directory.
        is_taken: whether the workers already write a trace of the whole run. If so, `start` raises
            `TraceError`.
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
        self._number = 0  # of the current recording; 0 if there is none
        self.answer: Trace | TraceError | None = None

    def stop(self) -> None:
        """End the recording, if there is one, and remove the workers' files."""
        if self._number:
            number = self._number
            self._number = 0
            self._abandon(number)

    def start(self) -> Path:
        """Begin a recording; return the path from which `part_paths` derives the workers' files.

        `pearl.trace.recorder.records_since` reads these files while the workers write them. `stop`
        removes the files.
        """
        if self._is_taken or self._number:
            raise TraceError("this engine is recording a trace already")
        number = secrets.randbits(62) + 1
        try:
            self._request(Trace(number, True))
        except BaseException:
            self._abandon(number)  # a worker may have begun to record, or may do so later
            raise
        self._number = number
        return asked_for(self._directory, number)

    def _abandon(self, number: int) -> None:
        self._post(Trace(number, False))
        for part in part_paths(asked_for(self._directory, number)):
            part.unlink(missing_ok=True)

    def _request(self, trace: Trace) -> None:
        """Send `trace`, and wait until both workers have begun or ended the recording.

        Raises `TraceError` if they do not.
        """
        self.answer = None
        deadline = time.monotonic() + _RECORD_SECONDS
        self._post(trace)

        def is_done() -> bool:
            # A late answer to an abandoned request differs from `trace`.
            is_answered = self.answer == trace or isinstance(self.answer, TraceError)
            return is_answered or time.monotonic() > deadline

        self._wait_until(is_done)
        if isinstance(self.answer, TraceError):
            raise self.answer
        if self.answer != trace:
            raise TraceError(
                "the workers do not answer: one of them may be in a long forward. Try again"
            )
