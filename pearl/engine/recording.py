"""Traces that a front has the workers record between two of its requests."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pearl.errors import PearlError, TargetLost, TraceError
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
    """

    def __init__(self, client: Client, directory: Path, is_taken: bool) -> None:
        self._client, self._directory, self._is_taken = client, directory, is_taken
        self._current: tuple[Path, int] | None = None
        self.answer: Trace | TraceError | None = None

    @property
    def is_active(self) -> bool:
        return self._current is not None

    def start(self, path: Path) -> None:
        """Begins to record for the file `path`."""
        self._check_idle()
        try:
            is_writable = not path.is_dir() and os.access(path.parent, os.W_OK)
        except (OSError, ValueError):
            is_writable = False
        if not is_writable:
            raise TraceError(f"cannot write the trace {path}: name a file in a directory that exists")
        self._current = path, self._begin()

    def stop(self) -> Path:
        """Ends the recording, writes its file and returns the file's path. After a `TraceError` try again."""
        if self._current is None:
            raise TraceError("no trace is being recorded")
        path, number = self._current
        self._request(Trace(number, False))
        merge(path, asked_for(self._directory, number))
        self._current = None
        return path

    def begin_live(self, is_wanted: Callable[[], bool]) -> Path:
        """Begins a recording that is read while the workers write it (`pearl.trace.recorder.records_since`).

        It begins once all texts in progress have ended, and new ones wait for it; it is abandoned once `is_wanted` is
        false. Returns the path that names the workers' parts, which `end_live` removes.
        """
        self._check_idle()
        number = self._begin(is_wanted)
        self._current = asked_for(self._directory, number), number
        return self._current[0]

    def end_live(self) -> None:
        if self._current is None:
            return
        (parts, number), self._current = self._current, None
        try:
            self._request(Trace(number, False))
        finally:
            _remove(parts)

    def _check_idle(self) -> None:
        if self._is_taken or self.is_active:
            raise TraceError("this engine is recording a trace already")

    def _begin(self, is_wanted: Callable[[], bool] | None = None) -> int:
        """The number of the recording."""
        number = secrets.randbits(62) + 1
        try:
            self._request(Trace(number, True), is_wanted)
        except BaseException:
            self._client.post(Trace(number, False))  # it may have begun, or be about to
            _remove(asked_for(self._directory, number))
            raise
        return number

    def _request(self, trace: Trace, is_wanted: Callable[[], bool] | None = None) -> None:
        """Returns once both workers have done it; they have some seconds, or as long as `is_wanted`."""
        self.answer = None
        deadline = time.monotonic() + _RECORD_SECONDS
        is_wanted = is_wanted or (lambda: time.monotonic() <= deadline)
        self._client.post(trace)
        # A late echo of an abandoned request differs from `trace`.
        self._client.wait_until(lambda: self.answer == trace or isinstance(self.answer, TraceError) or not is_wanted())
        if isinstance(self.answer, TraceError):
            raise self.answer
        if self.answer != trace:
            raise TraceError(
                "the workers do not answer yet: a recording begins and ends once the texts that are being written have "
                "ended; try again then"
            )


def _remove(parts: Path) -> None:
    for part in part_paths(parts):
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def logged_not_raised() -> Iterator[list[PearlError]]:
    """For an engine's end: a trace that cannot be written does not make its texts wrong. Yields the errors."""
    errors: list[PearlError] = []
    try:
        yield errors
    except (TraceError, TargetLost) as error:
        errors.append(error)
        log.error("no trace: %s", error)
