"""Traces that a client has the workers record between two of its requests."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from pearl.errors import PearlError, TargetLost, TraceError
from pearl.protocol.messages import Message, Trace
from pearl.trace.chrome import merge
from pearl.trace.recorder import asked_for, part_paths

log = logging.getLogger(__name__)

_RECORD_SECONDS = 10.0  # for both workers to begin or end a recording


class Talk(Protocol):
    """How a recording speaks with the target. What the target answers is put into `Recording.answer`."""

    def post(self, message: Message) -> None: ...
    def read_until(self, done: Callable[[], bool]) -> None: ...


class Recording:
    """One recording at a time. Raises `TraceError` where it cannot begin or end.

    Args:
        directory: the engine's, where the workers write their parts.
        taken: whether the workers write a trace of their whole life already; then there can be no other.
    """

    def __init__(self, directory: Path, taken: bool) -> None:
        self._directory, self._taken = directory, taken
        self._asked: tuple[Path, int] | None = None
        self.answer: Trace | TraceError | None = None  # the workers' last word

    @property
    def active(self) -> bool:
        return self._asked is not None

    def start(self, path: Path, talk: Talk) -> None:
        """Begins to record for the file `path`."""
        if self._taken or self.active:
            raise TraceError("this engine is recording a trace already")
        try:
            writable = not path.is_dir() and os.access(path.parent, os.W_OK)
        except (OSError, ValueError):
            writable = False
        if not writable:
            raise TraceError(f"cannot write the trace {path}: name a file in a directory that exists")
        self._asked = (path, self._begin(talk))

    def begin_live(self, talk: Talk, wanted: Callable[[], bool]) -> Path:
        """Begins to record for nobody but who reads the workers' parts as they grow: what these are named after.

        Waits for the end of all texts that are being written, as long as it is `wanted`.
        """
        if self._taken or self.active:
            raise TraceError("this engine is recording a trace already")
        number = self._begin(talk, wanted)
        self._asked = (asked_for(self._directory, number), number)
        return self._asked[0]

    def end_live(self, talk: Talk) -> None:
        """Ends that recording, and removes the parts."""
        if self._asked is None:
            return
        parts, number = self._asked
        self._asked = None
        try:
            self._ask(Trace(number, False), talk)
        finally:
            _remove(parts)

    def _begin(self, talk: Talk, wanted: Callable[[], bool] | None = None) -> int:
        """The number of the recording."""
        number = secrets.randbits(62) + 1
        try:
            self._ask(Trace(number, True), talk, wanted)
        except BaseException:
            talk.post(Trace(number, False))  # should it have begun, or be about to
            _remove(asked_for(self._directory, number))
            raise
        return number

    def stop(self, talk: Talk) -> Path:
        """Ends the recording and writes its file, whose path it returns. After a `TraceError` it can be tried again."""
        if self._asked is None:
            raise TraceError("no trace is being recorded")
        path, number = self._asked
        self._ask(Trace(number, False), talk)
        merge(path, asked_for(self._directory, number))
        self._asked = None
        return path

    def _ask(self, trace: Trace, talk: Talk, wanted: Callable[[], bool] | None = None) -> None:
        """Returns once both workers do, for which they have some seconds, or as long as it is `wanted`."""
        self.answer = None
        deadline = time.monotonic() + _RECORD_SECONDS
        wanted = wanted or (lambda: time.monotonic() <= deadline)
        talk.post(trace)

        def answered() -> bool:  # not by the echo of a wish that was given up, which may come only now
            return self.answer == trace or isinstance(self.answer, TraceError) or not wanted()

        talk.read_until(answered)
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
    """For the end of an engine: a trace that cannot be written does not make its texts wrong. Yields why."""
    raised: list[PearlError] = []
    try:
        yield raised
    except (TraceError, TargetLost) as error:
        raised.append(error)
        log.error("no trace: %s", error)
