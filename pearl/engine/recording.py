"""Traces that a front has the workers record."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pearl.errors import TargetLost, TraceError
from pearl.protocol.messages import Trace
from pearl.trace.chrome import merge
from pearl.trace.recorder import asked_for, part_paths

if TYPE_CHECKING:
    from pearl.engine.client import Client

log = logging.getLogger(__name__)

_RECORD_SECONDS = 10.0  # for both workers to begin or end a recording


class Recording:
    """One recording at a time. Raises `TraceError` if it cannot begin or end.

    Args:
        client: the connection; it puts the target's answers into `answer`.
        directory: the engine's, where the workers write their parts.
        is_taken: whether the workers already write a trace from start to end; then there can be no other.

    Attributes:
        file: what the recording is for; None: it is read while it is written, or there is none.
    """

    def __init__(self, client: Client, directory: Path, is_taken: bool) -> None:
        self._client, self._directory, self._is_taken = client, directory, is_taken
        self._number = 0  # of the recording that runs
        self.file: Path | None = None
        self.answer: Trace | TraceError | None = None

    def start(self, path: Path) -> None:
        """Begins to record for the file `path`."""
        try:
            is_writable = not path.is_dir() and os.access(path.parent, os.W_OK)
        except (OSError, ValueError):
            is_writable = False
        if not is_writable:
            raise TraceError(f"cannot write the trace {path}: name a file in a directory that exists")
        self.start_live()
        self.file = path

    def stop(self) -> Path:
        """Ends the recording, writes its file and returns the file's path. After a `TraceError` try again."""
        if self.file is None:
            raise TraceError("no trace is being recorded")
        self._request(Trace(self._number, False))
        merge(self.file, asked_for(self._directory, self._number))
        path, self.file, self._number = self.file, None, 0
        return path

    def stop_live(self) -> None:
        number, self._number = self._number, 0
        if number:
            self._abandon(number)

    def start_live(self) -> Path:
        """Begins a recording that is read while the workers write it (`pearl.trace.recorder.records_since`).

        Returns the path that names the workers' parts, which `stop_live` removes.
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
        self._client.post(Trace(number, False))
        for part in part_paths(asked_for(self._directory, number)):
            part.unlink(missing_ok=True)

    def _request(self, trace: Trace) -> None:
        """Returns once both workers have done it."""
        self.answer = None
        deadline = time.monotonic() + _RECORD_SECONDS
        self._client.post(trace)
        # A late echo of an abandoned request differs from `trace`.
        self._client.wait_until(
            lambda: self.answer == trace or isinstance(self.answer, TraceError) or time.monotonic() > deadline
        )
        if isinstance(self.answer, TraceError):
            raise self.answer
        if self.answer != trace:
            raise TraceError("the workers do not answer: one of them may be in a long forward. Try again")


@contextlib.contextmanager
def logged_not_raised() -> Iterator[None]:
    """For an engine's end: a trace that cannot be written does not make its texts wrong."""
    try:
        yield
    except (TraceError, TargetLost) as error:
        log.error("no trace: %s", error)
