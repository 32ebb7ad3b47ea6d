"""Launching worker processes and watching them. Knows a worker's status lines, nothing of decoding.

Used by the engine for both workers and, under torchrun, by each process for its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

from pearl import errors
from pearl.cache import Progress, silent
from pearl.device import Device
from pearl.silence import Silence
from pearl.worker.lifeline import DIRECTORY
from pearl.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

COMMAND = [sys.executable, "-m", "pearl.worker"]
END_SECONDS = 8.0  # for a worker to end by itself; then it is killed
_EXIT_SECONDS = 5.0  # for the last status line of a worker that exits
_LOOK_SECONDS = 0.2  # between two checks of a worker
# longest wait before a restart: a draft that dies at once must not become a busy loop
_MOST_BACK_OFF_SECONDS = 30.0
_SOUND_SECONDS = 600.0  # after a run this long, earlier restarts no longer count


class Worker:
    """One worker process. A thread reads its status lines; `wait_for` waits for them."""

    def __init__(self, settings: WorkerSettings, progress: Progress = silent) -> None:
        self.role = settings.role
        self.notes: list[str] = []  # sentences for the user, complete once it is ready
        self.silence = Silence(_LOOK_SECONDS * 5)
        self.began = time.monotonic()
        self.ready_since = 0.0
        self._progress = progress
        self._statuses: dict[str, dict[str, Any]] = {}  # by state: the last line that names it
        self._changed = threading.Condition()
        self._process = Popen(
            COMMAND,
            stdin=PIPE,
            stdout=PIPE,
            env=_environment(settings.model.place) | {DIRECTORY: str(settings.directory)},
            start_new_session=True,  # Ctrl-C is for the front; a worker ends when its stdin closes
        )
        self._stdin: Any = self._process.stdin
        self._stdout: Any = self._process.stdout
        self._write(settings.model_dump_json().encode() + b"\n")
        self._reader = threading.Thread(target=self._read, daemon=True, name=f"{self.role}-status")
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def address(self) -> str:
        """Where the target listens, once it is bound."""
        return str(self._statuses["bound"]["address"])

    @property
    def place(self) -> dict[str, str]:
        """Its device and dtype; empty until it is ready."""
        return self._statuses.get("ready", {})

    def _read(self) -> None:
        for line in self._stdout:
            with contextlib.suppress(ValueError):
                self._on_status(json.loads(line))
        self._process.wait()
        self._on_status({"state": "gone"})

    def _on_status(self, status: dict[str, Any]) -> None:
        self.silence.heard(status.get("allowance", 0.0))
        state = status.pop("state")
        if state == "loading":
            self._progress(f"{self.role}: {status['message']}")
        with self._changed:
            if state == "note":
                self.notes.append(str(status["message"]))
            if state == "ready":
                self.ready_since = time.monotonic()
            self._statuses[state] = status
            self._changed.notify_all()

    def _reaches(self, state: str, seconds: float) -> bool:
        """Waits until the worker has reached `state`, or is gone; returns whether it has reached it."""
        with self._changed:
            self._changed.wait_for(lambda: self._statuses.keys() & {state, "gone"}, seconds)
            return state in self._statuses

    def wait_for(
        self, state: str, deadline: float, check: Callable[[], None] = lambda: None
    ) -> None:
        """Waits until the worker has reached `state`: bound or ready.

        Raises the worker's own error if it failed, `StartError` if it died without one or time is up.

        Args:
            deadline: of time.monotonic().
            check: called now and then; what it raises ends the wait.
        """
        while not self._reaches(state, _LOOK_SECONDS):
            check()
            if not self.alive:
                raise self.exit_error()
            if time.monotonic() > deadline:
                raise errors.StartError(
                    f"{self.role} worker is not {state} in time; raise startup_timeout, or see "
                    "--log-level debug"
                )

    def is_gone(self) -> bool:
        """Whether the worker has ended; waits a moment for its last status line."""
        return self._reaches("gone", _EXIT_SECONDS)

    def exit_error(self) -> errors.PearlError:
        """Why the worker is gone."""
        self.is_gone()
        failure = self._statuses.get("failed")
        if failure is not None:
            kind = errors.error_named(failure["kind"])
            if kind is errors.DraftLost:  # it is the draft itself that failed
                kind = errors.StartError
            return kind(f"{self.role} worker: {failure['message']}")
        code = self._process.poll()
        if code is None or code >= 0:
            return errors.StartError(f"{self.role} worker ended with exit code {code}")
        hint = ""
        if code == -signal.SIGKILL:
            hint = "; a kill by signal 9 is often the kernel's, for lack of memory"
        return errors.StartError(f"{self.role} worker was killed by signal {-code}{hint}")

    def kill(self) -> None:
        """Kills it and its own children: it leads a session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Makes the worker end, by a byte and the end of its stdin, which a fork of this process may hold open too."""
        self._write(b"\n")
        with contextlib.suppress(OSError):
            self._stdin.close()

    def _write(self, line: bytes) -> None:
        # It may have ended already, and its status lines say why; or its stdin is closed.
        with contextlib.suppress(OSError, ValueError):
            self._stdin.write(line)
            self._stdin.flush()

    def end(self, seconds: float = END_SECONDS) -> None:
        """Waits until it has ended, and kills it if it does not."""
        self.close()
        try:
            self._process.wait(seconds)
        except TimeoutExpired:
            log.warning("%s worker does not end by itself: killing it", self.role)
            self.kill()
            self._process.wait()
        self._reader.join(1.0)
        self._stdout.close()


class DraftKeeper:
    """Restarts a draft worker that dies or falls silent, with back-off, at most `draft_restarts` times in a row.

    The target watches for silence only during requests; here it is watched always, and a draft that hangs is killed.
    """

    def __init__(self, settings: WorkerSettings, progress: Progress = silent) -> None:
        self._config = settings.config
        # A process group cannot be joined again.
        self._settings = settings.model_copy(update={"tensors": "frames"})
        self._closing = threading.Event()
        self._in_a_row = 0  # restarts since a sound run
        self.restarts = 0
        self.worker = Worker(settings, progress)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="draft-keeper")

    def keep(self) -> None:
        """Starts watching; until then a failed draft stays down, so that its error can be reported."""
        self._thread.start()

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            trouble = self._trouble()
            if trouble is None:
                continue
            ready_since = self.worker.ready_since
            if ready_since and time.monotonic() - ready_since > _SOUND_SECONDS:
                self._in_a_row = 0
            self.worker.kill()
            self.worker.end()
            if self._in_a_row == self._config.draft_restarts:
                log.error("%s; it is not started again, the target goes on alone", trouble)
                return
            self._in_a_row += 1
            self.restarts += 1
            log.warning("%s; starting it again (%d)", trouble, self._in_a_row)
            if not self._closing.wait(_back_off(self._in_a_row)):
                self._start_again()

    def _start_again(self) -> None:
        """Tries until there is a process; a lack of files, threads or memory does not count as a restart."""
        for tries in count(1):
            try:
                self.worker = Worker(self._settings)
                return
            except (OSError, RuntimeError) as error:
                log.warning("a draft worker could not be started: %s", error)
            if self._closing.wait(_back_off(tries)):
                return

    def _trouble(self) -> str | None:
        """What is wrong with the draft; None if nothing is."""
        worker = self.worker
        if not worker.alive:
            return str(worker.exit_error())
        if worker.ready_since:
            silence = worker.silence.seconds
            if silence > self._config.draft_timeout:
                return f"draft worker was silent for {silence:.1f} s"
        elif time.monotonic() - worker.began > self._config.startup_timeout:
            return "draft worker is not ready in time; see startup_timeout"
        return None

    def close(self) -> None:
        self._closing.set()
        self.worker.close()

    def end(self, seconds: float = END_SECONDS) -> None:
        self.close()
        if self._thread.is_alive():
            self._thread.join()
        self.worker.end(seconds)


def _back_off(times: int) -> float:
    return min(0.5 * 2.0 ** min(times, 16), _MOST_BACK_OFF_SECONDS)


def _environment(place: Device) -> dict[str, str]:
    """The worker's environment, read before any library starts its threads.

    It has as many threads as cores that it is pinned to. If it has several GPUs, only those are visible, so that a
    spread model stays off the other worker's.
    """
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    if place.cores:
        environment["OMP_NUM_THREADS"] = str(len(place.cores))
        environment["MKL_NUM_THREADS"] = str(len(place.cores))
    if len(place.gpus) > 1:
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            gpus = [str(gpu) for gpu in place.gpus]
        else:
            names = visible.split(",")
            gpus = [names[gpu] for gpu in place.gpus if gpu < len(names)]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environment
